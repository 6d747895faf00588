"""Recording what a sample of coordinates brought to each step."""

from fnmatch import fnmatchcase
from math import nan
from zlib import crc32

import torch
from torch import Tensor

from lightning_sparse.engine.flat_bucket import FlatBucket
from lightning_sparse.sparsifiers import LayerLayout

MOST_COORDINATES = 16_384
"""Of a worker; at a density of 0.1 % they send 16 values a step."""


class GradientRecorder:
    """Is shown buckets, and keeps what some coordinates of them are: in each layer its share, at least one.

    Args:
        num_elements: d, of the whole model.
        rank: of this worker; every worker watches other coordinates.
    """

    def __init__(self, num_elements: int, rank: int) -> None:
        self._share = min(1.0, MOST_COORDINATES / max(num_elements, 1))
        self._rank = rank
        self._places: dict[LayerLayout, tuple[Tensor, list[int]]] = {}
        self._sizes: dict[str, int] = {}
        self._running: dict[str, Tensor] = {}
        self._steps: list[dict[str, Tensor]] = []

    def __call__(self, bucket: FlatBucket) -> None:
        """Keeps what was watched of a bucket, without waiting for its device."""
        layout, gradient = bucket.layout, bucket.gradient
        if layout not in self._places:
            self._sizes.update(zip(layout.names, layout.sizes, strict=True))
            picked = [self._picked(name, size) for name, size in zip(layout.names, layout.sizes, strict=True)]
            moved = [one + start for one, (_, start, _) in zip(picked, layout.spans(), strict=True)]
            self._places[layout] = torch.cat(moved).to(gradient.device), [len(one) for one in picked]
        places, counts = self._places[layout]
        seen = gradient.index_select(0, places).float()
        if bucket.loss_scale is not None:
            seen /= bucket.loss_scale
        for start, end in bucket.left_out:
            seen.masked_fill_((places >= start) & (places < end), 0.0)
        self._running.update(zip(layout.names, torch.split(seen, counts), strict=True))
        if bucket.is_last:
            self._steps.append(self._running)
            self._running = {}

    def _picked(self, name: str, size: int) -> Tensor:
        """Returns the places of a layer that are watched: int64, ascending, each once."""
        count = min(size, max(1, round(self._share * size)))
        generator = torch.Generator().manual_seed(crc32(f"{self._rank} {name}".encode()))
        if 2 * count >= size:
            return torch.randperm(size, generator=generator)[:count].sort().values
        drawn = torch.randint(size, (count,), generator=generator).sort().values
        return drawn[torch.cat([drawn.new_ones(1, dtype=torch.bool), drawn.diff() > 0])]

    @property
    def num_steps(self) -> int:
        """Whole steps that were seen."""
        return len(self._steps)

    def recorded(self) -> tuple[Tensor, Tensor]:
        """Returns all finite steps, and for how many elements of the model each coordinate stands; on the CPU.

        Returns:
            Float32, shapes (N, m) and (m,). In a step that a layer had no part in it is 0.
        """
        widths = {name: len(part) for step in self._steps for name, part in step.items()}
        rows = [
            torch.cat([step[name].cpu() if name in step else torch.zeros(width) for name, width in widths.items()])
            for step in self._steps
        ]
        finite = [row for row in rows if bool(row.isfinite().all())]
        weights = [torch.full((width,), self._sizes[name] / width) for name, width in widths.items() if width]
        empty = torch.zeros(0, sum(widths.values()))
        return torch.stack(finite) if finite else empty, torch.cat(weights) if weights else torch.zeros(0)

    def own_thresholds(self, patterns: dict[str, float]) -> Tensor:
        """Returns λ of the coordinates whose layer has one of its own, NaN for the others: shape (m,)."""
        widths = {name: len(part) for step in self._steps for name, part in step.items()}
        own = [
            torch.full((width,), next((value for one, value in patterns.items() if fnmatchcase(name, one)), nan))
            for name, width in widths.items()
        ]
        return torch.cat(own) if own else torch.zeros(0)
