"""The anchor: the weights that all workers share, beside which each worker's own have drifted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import as_real, grouped, kept_dtype, local
from lightning_sparse.sparsifiers import LayerLayout


@dataclass
class AnchorBucket:
    """Some parameters, and the flat tensors that belong to them; all of shape (layout.num_elements,).

    Attributes:
        index: its place in the order that all workers keep to.
        layout: the parameters' names and sizes; a complex number is two coordinates.
        parameters: this worker's θ, of which what it holds counts where they are sharded.
        anchor: x, the same bits on all workers: float32, or float64 where parameters are.
        drift: where x − θ is formed, and after it the average.
        kept: what was not sent.
        zeros: as many, or more.
    """

    index: int
    layout: LayerLayout
    parameters: list[Tensor]
    anchor: Tensor
    drift: Tensor
    kept: Tensor
    zeros: Tensor

    def read(self, out: Tensor) -> Tensor:
        """Copies the parameters into a flat tensor, each in the order of its indices."""
        torch._foreach_copy_(self._parts(out), self._thetas())
        return out

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Copies a flat tensor into the parameters."""
        torch._foreach_copy_(self._thetas(), self._parts(values))

    @torch.no_grad()
    def form_drift(self) -> None:
        """Makes ``drift`` x − θ."""
        if self.anchor.device.type == "cpu":  # what counts is how often memory is passed
            for x, theta, drift in zip(self._parts(self.anchor), self._thetas(), self._parts(self.drift), strict=True):
                torch.sub(x, theta, out=drift)
        else:  # the number of launches
            torch.sub(self.anchor, self.read(self.drift), out=self.drift)

    @torch.no_grad()
    def write_less(self, kept: Tensor) -> None:
        """Makes the parameters x less a flat tensor of the same layout."""
        if self.anchor.device.type == "cpu":
            for x, theta, part in zip(self._parts(self.anchor), self._thetas(), self._parts(kept), strict=True):
                torch.sub(x, part, out=theta)
        else:
            self.write(torch.sub(self.anchor, kept, out=self.drift))

    def by_name(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields name and part of a flat tensor, each a view."""
        for name, start, end in self.layout.spans():
            yield name, values[start:end]

    def _thetas(self) -> list[Tensor]:
        return [as_real(local(one)) for one in self.parameters]

    def _parts(self, values: Tensor) -> list[Tensor]:
        shapes = (as_real(local(one)).shape for one in self.parameters)
        return [
            part.view(shape) for part, shape in zip(torch.split(values, list(self.layout.sizes)), shapes, strict=True)
        ]


def lay_out(parameters: Mapping[str, Tensor], first_index: int = 0) -> list[AnchorBucket]:
    """Returns buckets for parameters, with anchors that are what they are now.

    Args:
        parameters: by name, in the same order on all workers.
        first_index: of the first bucket.
    """
    buckets: list[AnchorBucket] = []
    held = {name: local(one) for name, one in parameters.items()}
    for (dtype, device), runs in grouped(held, kept_dtype).items():
        sizes = [sum(as_real(held[name]).numel() for name in names) for names in runs]
        zeros = torch.zeros(max(sizes), dtype=dtype, device=device)
        for names, size in zip(runs, sizes, strict=True):
            layout = LayerLayout(tuple(names), tuple(as_real(held[name]).numel() for name in names))
            anchor, drift, kept = (torch.zeros(size, dtype=dtype, device=device) for _ in range(3))
            bucket = AnchorBucket(
                first_index + len(buckets), layout, [parameters[name] for name in names], anchor, drift, kept, zeros
            )
            bucket.read(anchor)
            buckets.append(bucket)
    return buckets


def drifting(named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the parameters that training moves, each once."""
    return {name: one for name, one in named if one.requires_grad and one.numel()}
