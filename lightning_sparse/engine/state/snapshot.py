"""Everything an averager must remember to go on, as named tensors and plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, dict[str, Tensor]]
"""By kind, then by parameter name: flat, in the order of the parameter's indices, two numbers per complex element."""


@dataclass
class Snapshot:
    """The state of one averager between two optimizer steps.

    Tensors may be the averager's own memory, which later steps change.

    Attributes:
        numbers: plain values that are equal on all ranks: settings, λ and its controller, counters, layouts.
        history: what the exchange and the sparsifier have seen of this rank's buckets, under ``"exchange"`` and
            ``"sparsifier"``. Equal on all workers.
        shared: tensors that are equal on all workers: ``"anchor"``, and the outer optimizer's state as ``"outer.KEY"``.
        own: tensors of this worker alone: ``"residual"``, or ``"weights"`` and ``"unsent"``.
        extra: what else this rank alone has, such as ``"buffers"``; plain containers and tensors.
    """

    numbers: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)
    shared: Tensors = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def copied(self) -> dict[str, Any]:
        """Return the fields by name, with copies of all tensors on the CPU."""
        fields: dict[str, Any] = copied(vars(self))
        return fields


def copied(tree: Any) -> Any:
    """Return nested containers with every tensor copied to the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        return {name: copied(entry) for name, entry in tree.items()}
    return [copied(entry) for entry in tree] if isinstance(tree, list) else tree
