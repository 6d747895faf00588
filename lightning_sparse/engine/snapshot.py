"""Snapshots: an averager's state as named tensors and plain numbers, and the seal that detects damage to it.

A flipped bit, a NaN or a missing entry could otherwise corrupt hours of training unnoticed. The seal maps the path of
each saved entry to a short description. For a tensor, it contains dtype, shape and the CRC-32 of the content. The seal
detects damage and edits, but does not protect against forgery.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_sparse.engine.grouping import local
from lightning_sparse.selection.statistics import squared_norm

Tensors = dict[str, dict[str, Tensor]]
"""Flat tensors by kind and parameter name, in the order of indices, with two numbers per complex element."""
SEAL = "seal"


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


def unsent_norm(unsent: Mapping[str, Tensor]) -> float:
    """Return the norm ‖e‖ of a worker's unsent values."""
    return sqrt(sum(float(squared_norm(tensor.flatten())) for tensor in unsent.values()))


def warn_of_discarded(norm: float | None) -> None:
    """Warn that saved residuals are lost because this run keeps none."""
    if norm:
        rank_zero_warn(
            f"lightning_sparse: the saved residuals (norm {norm:.3g}) are lost: error_feedback='none' keeps none. "
            "Resume with error_feedback='gradient' to keep them."
        )


class DamagedStateError(RuntimeError):
    """Raised if saved state has changed; names the first changed entry and its difference."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"lightning_sparse cannot resume: in the saved state, {path} {problem}. The state was edited or damaged "
            "after it was saved. Resume from another checkpoint, or load its weights alone."
        )


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return state (nested dicts and lists of tensors and plain values) with its seal."""
    return {**state, SEAL: seal_of(state)}


def seal_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a description of every entry by its path; equal for states of equal content."""
    return {path: _description(entry) for path, entry in _entries_of(state)}


def require_seal(state: Any) -> None:
    """Raise ``DamagedStateError`` if an entry has changed since ``sealed``."""
    seal = state.get(SEAL) if isinstance(state, Mapping) else None
    if not isinstance(seal, Mapping):
        raise DamagedStateError("the seal", "is missing")
    entries = dict(_entries_of(state))
    for path in seal:
        if path not in entries:
            raise DamagedStateError(path, "is missing")
    for path, entry in entries.items():
        if path not in seal:
            raise DamagedStateError(path, "was added")
        now, then = _description(entry), seal[path]
        if now != then:
            raise DamagedStateError(path, f"is {now[:80]} and was {str(then)[:80]}")


def _entries_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every entry, containers before their content."""
    if path:
        yield path, tree
    if isinstance(tree, Mapping):
        for name, entry in tree.items():
            if path or name != SEAL:
                key = name if isinstance(name, str) else repr(name)
                yield from _entries_of(entry, f"{path}/{key}" if path else key)
    elif isinstance(tree, (list, tuple)):
        for place, entry in enumerate(tree):
            yield from _entries_of(entry, f"{path}/{place}")


def _description(entry: Any) -> str:
    if isinstance(entry, Tensor):
        # The momentum of an nn.Embedding(sparse=True) is sparse.
        parts = (entry._values(), entry._indices()) if entry.is_sparse else (local(entry),)
        crc = 0
        for part in parts:
            crc = crc32(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data, crc)
        return f"a tensor of {entry.dtype}, shape {list(entry.shape)} and CRC {crc:08x}"
    if isinstance(entry, (Mapping, list, tuple)):
        return f"a {'dict' if isinstance(entry, Mapping) else 'list'} of {len(entry)}"
    return repr(entry)
