"""The outer optimizer's state by parameter name, which fits other buckets and shards too."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.drift.anchor import AnchorBucket
from lightning_sparse.engine.snapshot import Tensors

PREFIX = "outer."
"""Begins the kinds of the outer optimizer's tensors in a `Snapshot`."""


def outer_state(outer: Optimizer | None, buckets: Sequence[AnchorBucket]) -> tuple[Tensors, dict[str, Any]]:
    """Return an outer optimizer's tensors, and its kind and numbers.

    Tensors as large as the anchor are flat views by ``PREFIX`` + key and by name. All else is a number: a copy by name
    and key, under ``"numbers"``.

    Args:
        outer: moves the anchors; None has no state.
        buckets: the anchors.
    """
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for bucket in buckets if outer is not None else ():
        assert outer is not None
        for key, value in outer.state.get(bucket.anchor, {}).items():
            if isinstance(value, Tensor) and value.shape == bucket.anchor.shape:
                tensors.setdefault(PREFIX + key, {}).update(bucket.by_name(value))
            else:
                number = value.cpu().clone() if isinstance(value, Tensor) else value
                for name in bucket.layout.names:
                    numbers.setdefault(name, {})[key] = number
    return tensors, {"kind": _kind_of(outer), "numbers": numbers}


def load_outer(
    outer: Optimizer | None,
    buckets: Sequence[AnchorBucket],
    tensors: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Any],
) -> None:
    """Load the results of ``outer_state``; missing parts of a tensor become zero.

    Warns, and loads nothing, if they are of another kind of optimizer.

    Args:
        outer: the current optimizer, or None.
        buckets: its anchors.
        tensors: by kind and name; kinds without ``PREFIX`` are ignored.
        saved: kind and numbers.
    """
    now = _kind_of(outer)
    if saved["kind"] is not None and saved["kind"] != now:
        rank_zero_warn(
            f"lightning_sparse: the checkpoint's outer optimizer is {saved['kind']}, that of now "
            f"{'none' if now is None else now + ', which begins anew'}: what the other has gathered is dropped."
        )
        return
    if outer is None:
        return
    outer.state.clear()
    for bucket in buckets:
        state: dict[str, Any] = {}
        for name in bucket.layout.names:
            for key, value in saved["numbers"].get(name, {}).items():
                state.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        for kind, of_names in tensors.items():
            if kind.startswith(PREFIX) and of_names.keys() & set(bucket.layout.names):
                flat = state[kind.removeprefix(PREFIX)] = torch.zeros_like(bucket.anchor)
                for name, part in bucket.by_name(flat).items():
                    if name in of_names and of_names[name].numel() == part.numel():
                        part.copy_(of_names[name])
        if state:
            outer.state[bucket.anchor] = state


def _kind_of(outer: Optimizer | None) -> str | None:
    return None if outer is None else type(outer).__qualname__
