"""The anchor: the weights that all workers share, beside which each worker's own have drifted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import ParameterBucket, as_real, bucketed, kept_dtype, local


@dataclass
class AnchorBucket(ParameterBucket):
    """Parameters, and the flat tensors that belong to them; all of shape (layout.num_elements,).

    Attributes:
        anchor: x, the same bits on all workers: float32, or float64 where parameters are.
        drift: where x − θ is formed, and after it the average.
        kept: unsent values.
        zeros: as many, or more.
    """

    anchor: Tensor
    drift: Tensor
    kept: Tensor
    zeros: Tensor

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
        """Make ``drift`` x − θ."""
        if self.anchor.device.type == "cpu":  # what counts is how often memory is passed
            parts = (self.shaped_parts(self.anchor), self._thetas(), self.shaped_parts(self.drift))
            for x, theta, drift in zip(*parts, strict=True):
                torch.sub(x, theta, out=drift)
        else:  # the number of launches
            torch.sub(self.anchor, self.read(self.drift), out=self.drift)

    @torch.no_grad()
    def write_less(self, kept: Tensor) -> None:
        """Make the parameters x less a flat tensor of the same layout."""
        if self.anchor.device.type == "cpu":
            parts = (self.shaped_parts(self.anchor), self._thetas(), self.shaped_parts(kept))
            for x, theta, part in zip(*parts, strict=True):
                torch.sub(x, part, out=theta)
        else:
            self.write(torch.sub(self.anchor, kept, out=self.drift))

    def _thetas(self) -> list[Tensor]:
        return [as_real(local(parameter)) for parameter in self.parameters]


def lay_out(parameters: Mapping[str, Tensor], first_index: int = 0) -> list[AnchorBucket]:
    """Return buckets for parameters, with anchors that are what they are now.

    Args:
        parameters: by name, in the same order on all workers.
        first_index: of the first bucket.
    """
    buckets: list[AnchorBucket] = []
    zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for bucket in bucketed(parameters, first_index, kept_dtype):
        first = local(bucket.parameters[0])
        size, dtype, device = bucket.layout.num_elements, kept_dtype(first), first.device
        if zeros.get((dtype, device), torch.empty(0)).numel() < size:
            zeros[dtype, device] = torch.zeros(size, dtype=dtype, device=device)
        anchor, drift, kept = (torch.zeros(size, dtype=dtype, device=device) for _ in range(3))
        buckets.append(AnchorBucket(**vars(bucket), anchor=anchor, drift=drift, kept=kept, zeros=anchor))
        buckets[-1].read(anchor)
    for bucket in buckets:
        bucket.zeros = zeros[bucket.anchor.dtype, bucket.anchor.device]
    return buckets


def drifting(named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parameters that training moves, each once."""
    return {name: parameter for name, parameter in named if parameter.requires_grad and parameter.numel()}
