"""The state of an outer optimizer by parameter name, which another division into buckets or shards can read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.drift.anchor import AnchorBucket


def kind_of(outer: Optimizer | None) -> str | None:
    """Returns what is saved beside a state, by which another run can tell whether it is for its own."""
    return None if outer is None else type(outer).__qualname__


def is_of_kind(outer: Optimizer | None, saved: str | None) -> bool:
    """Returns whether a state is for this optimizer; says so where it is for another.

    Args:
        outer: that of now.
        saved: what ``kind_of`` returned in the other run; None if that is not known, or had none.
    """
    now = kind_of(outer)
    if saved is not None and saved != now:
        rank_zero_warn(
            f"lightning_sparse: the checkpoint's outer optimizer is {saved}, that of now "
            f"{'none' if now is None else now + ', which begins anew'}: what the other has gathered is dropped."
        )
        return False
    return outer is not None


def outer_by_name(
    outer: Optimizer | None, buckets: Sequence[AnchorBucket]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """Returns by key and name what is as large as the anchor, flat views; and by name and key what is not, copies.

    Args:
        outer: that moves the anchors; None has nothing.
        buckets: whose.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for bucket in buckets if outer is not None else ():
        assert outer is not None
        for key, value in outer.state.get(bucket.anchor, {}).items():
            if isinstance(value, Tensor) and value.shape == bucket.anchor.shape:
                tensors.setdefault(key, {}).update(bucket.by_name(value))
            else:
                one = value.cpu().clone() if isinstance(value, Tensor) else value
                for name in bucket.layout.names:
                    numbers.setdefault(name, {})[key] = one
    return tensors, numbers


def load_outer(
    outer: Optimizer,
    buckets: Sequence[AnchorBucket],
    tensors: Mapping[str, Mapping[str, Tensor]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Makes an outer optimizer's state what ``outer_by_name`` returned; what is missing of a tensor is zero.

    Args:
        outer: the optimizer.
        buckets: that it has now.
        tensors: by key and name.
        numbers: by name and key.
    """
    outer.state.clear()
    for bucket in buckets:
        state: dict[str, Any] = {}
        for name in bucket.layout.names:
            for key, value in numbers.get(name, {}).items():
                state.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        for key, of_names in tensors.items():
            if of_names.keys() & set(bucket.layout.names):
                state[key] = torch.zeros_like(bucket.anchor)
                for name, part in bucket.by_name(state[key]).items():
                    if name in of_names and of_names[name].numel() == part.numel():
                        part.copy_(of_names[name])
        if state:
            outer.state[bucket.anchor] = state
