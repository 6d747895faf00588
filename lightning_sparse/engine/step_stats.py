"""The numbers of a step: what follows from the headers of all workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from lightning_sparse.selection.numbers import (
    FIXED_FIELDS,
    NON_FINITE,
    SELECTED,
    SQUARED_GRADIENT_NORM,
    SQUARED_RESIDUAL_NORM,
)
from lightning_sparse.sparsifiers import LayerLayout


@dataclass(frozen=True)
class LayerStats:
    """The numbers of one layer in one step, averaged over the workers.

    Attributes:
        num_elements: elements of the layer.
        selected: Σ_i k_i of this layer.
        density: (1/n) Σ_i k_i / num_elements, in 0…1.
        squared_error: (1/n) Σ_i ‖e_i‖² of this layer after the step, in gradient units squared.
    """

    num_elements: int
    selected: int
    density: float
    squared_error: float


@dataclass(frozen=True)
class StepStats:
    """The numbers of one exchange of all gradients, the same on every worker.

    Attributes:
        step: how many exchanges came before this one.
        num_workers: n.
        num_elements: d, the elements of all exchanged parameters.
        selected: Σ_i k_i over all workers.
        squared_error: (1/n) Σ_i ‖e_i‖² after the step, in gradient units squared.
        squared_gradient_norm: (1/n) Σ_i ‖g_i‖² of the unscaled gradients; 0 when no calibration asked for it.
        non_finite: NaN and infinite values sent by all workers together.
        payload_bytes: bytes that one worker handed to collectives in this step.
        dense_bytes: bytes of the gradient itself, which plain DDP hands to its all-reduce.
        threshold: λ in gradient units, None for a sparsifier without one.
        dense_elements: those of buckets that travelled whole, because so many were selected or while calibrating.
        is_calibration: whether everything was sent to find λ.
        layers: per parameter name, if per-layer numbers were asked for; else empty.
    """

    step: int
    num_workers: int
    num_elements: int
    selected: int
    squared_error: float
    squared_gradient_norm: float
    non_finite: int
    payload_bytes: int
    dense_bytes: int
    threshold: float | None = None
    dense_elements: int = 0
    is_calibration: bool = False
    layers: dict[str, LayerStats] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """(1/n) Σ_i k_i / d, in 0…1."""
        return self.selected / (self.num_workers * self.num_elements) if self.num_elements else 0.0

    @property
    def error_norm(self) -> float:
        """sqrt((1/n) Σ_i ‖e_i‖²) after the step, in gradient units."""
        return sqrt(self.squared_error)


def step_stats(
    step: int,
    layouts: Sequence[LayerLayout],
    headers: Sequence[Tensor],
    *,
    payload_bytes: int,
    dense_bytes: int,
    dense_elements: int,
    threshold: float | None,
    is_calibration: bool,
) -> StepStats:
    """Returns the numbers of a step from the headers of its buckets.

    Args:
        step: how many exchanges came before.
        layouts: the layout of each bucket.
        headers: for each bucket all workers' headers, on the CPU: float64, shape (n, H).
        payload_bytes: bytes that this worker handed to collectives.
        dense_bytes: bytes of the gradient.
        dense_elements: those of buckets that travelled whole.
        threshold: λ in force.
        is_calibration: whether everything was sent to find λ.
    """
    num_workers = headers[0].shape[0]
    totals = torch.stack([header[:, :FIXED_FIELDS] for header in headers]).sum(dim=(0, 1)).tolist()
    layers: dict[str, LayerStats] = {}
    for layout, header in zip(layouts, headers, strict=True):
        if header.shape[1] > FIXED_FIELDS:
            selected, errors = header[:, FIXED_FIELDS:].sum(0).view(2, len(layout.names))
            for name, size, count, error in zip(
                layout.names, layout.sizes, selected.tolist(), errors.tolist(), strict=True
            ):
                density = count / (num_workers * size) if size else 0.0
                layers[name] = LayerStats(size, int(count), density, error / num_workers)
    return StepStats(
        step=step,
        num_workers=num_workers,
        num_elements=sum(layout.num_elements for layout in layouts),
        selected=int(totals[SELECTED]),
        squared_error=totals[SQUARED_RESIDUAL_NORM] / num_workers,
        squared_gradient_norm=totals[SQUARED_GRADIENT_NORM] / num_workers,
        non_finite=int(totals[NON_FINITE]),
        payload_bytes=payload_bytes,
        dense_bytes=dense_bytes,
        threshold=threshold,
        dense_elements=dense_elements,
        is_calibration=is_calibration,
        layers=layers,
    )
