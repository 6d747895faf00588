"""The anchor: the weights that all workers share and from which each worker's own drift."""

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sparse.engine.grouping import ParameterBucket, as_real, bucketed, kept_dtype, local


@dataclass
class AnchorBucket(ParameterBucket):
    """Parameters and their flat tensors, all of shape (layout.num_elements,).

    Attributes:
        anchor: x, the same bits on all workers: float32, or float64 where parameters are.
        drift: holds x − θ, and after the exchange the average.
        kept: unsent values.
    """

    anchor: Tensor
    drift: Tensor
    kept: Tensor

    def read(self, out: Tensor) -> Tensor:
        """Copy the parameters into a flat tensor, each in the order of its indices."""
        torch._foreach_copy_(self.shaped_parts(out), self._thetas())
        return out

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Copy a flat tensor into the parameters."""
        torch._foreach_copy_(self._thetas(), self.shaped_parts(values))

    @torch.no_grad()
    def form_drift(self) -> None:
        """Set ``drift`` to x − θ."""
        if self.anchor.device.type == "cpu":  # fewer passes over memory
            parts = (self.shaped_parts(self.anchor), self._thetas(), self.shaped_parts(self.drift))
            for x, theta, drift in zip(*parts, strict=True):
                torch.sub(x, theta, out=drift)
        else:  # fewer launches
            torch.sub(self.anchor, self.read(self.drift), out=self.drift)

    @torch.no_grad()
    def write_less(self, kept: Tensor) -> None:
        """Set the parameters to x minus a flat tensor of the same layout."""
        if self.anchor.device.type == "cpu":
            parts = (self.shaped_parts(self.anchor), self._thetas(), self.shaped_parts(kept))
            for x, theta, part in zip(*parts, strict=True):
                torch.sub(x, part, out=theta)
        else:
            self.write(torch.sub(self.anchor, kept, out=self.drift))

    def _thetas(self) -> list[Tensor]:
        return [as_real(local(parameter)) for parameter in self.parameters]


def lay_out(parameters: Mapping[str, Tensor], first_index: int = 0) -> list[AnchorBucket]:
    """Return buckets for parameters, with their current values as anchors."""
    buckets = []
    for bucket in bucketed(parameters, first_index, kept_dtype):
        first = local(bucket.parameters[0])
        size, dtype = bucket.layout.num_elements, kept_dtype(first)
        anchor, drift, kept = (torch.zeros(size, dtype=dtype, device=first.device) for _ in range(3))
        buckets.append(AnchorBucket(**vars(bucket), anchor=anchor, drift=drift, kept=kept))
        buckets[-1].read(anchor)
    return buckets


def drifting(named: Mapping[str, Tensor], *, but: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the parameters that training changes, apart from those with the given names."""
    return {
        name: parameter
        for name, parameter in named.items()
        if parameter.requires_grad and parameter.numel() and name not in but
    }


_owners = WeakTensorKeyDictionary()
"""By weight, a weak reference to its ``WeightOwnership``."""


class WeightOwnership:
    """An averager's right to step, until it is closed or another averager takes any of its weights."""

    def __init__(self) -> None:
        self._why_not: str | None = None

    def take(self, weights: Iterable[Tensor]) -> None:
        """Take weights; their previous owners must not step any more."""
        for weight in weights:
            before = _owners[weight]() if weight in _owners else None
            if before is not None and before is not self:
                before._why_not = (
                    "Another averager has been made for the same weights since, and the two would undo each other's "
                    "work. Make one averager for a model, and call step() of the newest."
                )
            _owners[weight] = weakref.ref(self)

    def close(self) -> None:
        """Give the right up for good."""
        self._why_not = "The averager was closed: what has drifted since would stay each worker's own. Make a new one."

    def require(self) -> None:
        """Raise RuntimeError if the averager must not step."""
        if self._why_not is not None:
            raise RuntimeError(self._why_not)
