"""Snapshots: an averager's state as named tensors and plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

Tensors = dict[str, dict[str, Tensor]]
"""Flat tensors by kind and parameter name, in the order of indices, with two numbers per complex element."""


@dataclass
class Snapshot:
    """The state of one averager between two optimizer steps.

    Tensors may share the averager's memory, which later steps change.

    Attributes:
        numbers: plain values that are equal on all ranks: settings, λ and its controller, counters, layouts.
        history: of the exchange and the sparsifier, under ``"exchange"`` and ``"sparsifier"``. Equal on all workers;
            each rank of a sharded replica has its own.
        shared: tensors that are equal on all workers: ``"anchor"``, and the outer optimizer's state as ``"outer.KEY"``.
        own: tensors of this worker alone: ``"unsent"``, which are residuals or unsent drift, and ``"weights"``.
        extra: additional state of this rank alone, such as ``"buffers"``; plain containers and tensors.
    """

    numbers: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)
    shared: Tensors = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def copied(tree: Any) -> Any:
    """Return nested containers with each tensor copied to the CPU, once, and in the same memory format."""
    return tree_map_only(Tensor, cache(lambda tensor: tensor.detach().to("cpu", copy=True)), tree)


def not_plain(tree: Any) -> str | None:
    """Return the type of a value that ``torch.load(weights_only=True)`` does not read, None if there is none."""
    if isinstance(tree, Tensor) or type(tree) in (type(None), bool, int, float, complex, str):
        return None
    if isinstance(tree, (Mapping, list, tuple, set)):
        entries = [*tree, *tree.values()] if isinstance(tree, Mapping) else tree
        return next(filter(None, map(not_plain, entries)), None)
    return f"values of type {type(tree).__module__}.{type(tree).__qualname__}"
