"""Statistics of a step, computed from the headers of all workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.selection.statistics import FIXED_FIELDS, HEADER, LAYER_HEADER, STATISTICS, combined
from lightning_sparse.sparsifiers.protocol import LayerLayout


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one layer, or of the whole model, in one step.

    Attributes:
        num_workers: n.
        num_elements: d, the number of exchanged elements.
        selected: Σ_i k_i, the coordinates that all workers together sent.
        squared_error: (1/n) Σ_i ‖e_i‖² after the step, in squared units of the averaged tensors.
    """

    num_workers: int
    num_elements: int
    selected: int
    squared_error: float

    @property
    def density(self) -> float:
        """(1/n) Σ_i k_i / d, in 0…1."""
        return self.selected / (self.num_workers * self.num_elements) if self.num_elements else 0.0


@dataclass(frozen=True)
class StepStats(LayerStats):
    """Statistics of one exchange, the same on every worker.

    Of the whole model: ``num_workers`` n, ``num_elements`` d, ``selected`` Σ_i k_i and, after the step,
    ``squared_error`` (1/n) Σ_i ‖e_i‖². λ and errors have the units of the averaged tensors: gradients or drifts.

    Attributes:
        step: the number of earlier exchanges.
        squared_gradient_norm: (1/n) Σ_i ‖g_i‖² of the unscaled gradients in calibration, 0 after it.
        non_finite: the number of NaN and infinite values, summed over workers.
        payload_bytes: bytes that a worker passed to collectives in this step; of gathered payloads, the mean over all
            workers.
        dense_bytes: bytes that plain DDP passes to all-reduces in the same steps.
        threshold: λ, None for a sparsifier without λ.
        dense_elements: elements of buckets that were sent densely, at once or in a second round.
        is_calibration: whether everything was sent to find λ.
        layers: statistics by parameter name, if ``per_layer_stats`` is set or the calibration of a density needs them
            (``granularity="layer"`` or ``layer_thresholds``); else empty.
    """

    step: int
    squared_gradient_norm: float
    non_finite: int
    payload_bytes: int
    dense_bytes: int
    threshold: float | None = None
    dense_elements: int = 0
    is_calibration: bool = False
    layers: dict[str, LayerStats] = field(default_factory=dict)

    @property
    def error_norm(self) -> float:
        """sqrt((1/n) Σ_i ‖e_i‖²) after the step."""
        return sqrt(self.squared_error)


def statistics_of(layouts: Sequence[LayerLayout], headers: Sequence[Tensor]) -> dict[str, Any]:
    """Return fields of `StepStats` from headers per bucket: float64, CPU, shape (n, H)."""
    num_workers = headers[0].shape[0]
    fields = torch.cat([header[:, :FIXED_FIELDS] for header in headers])
    totals = zip(HEADER, combined(fields, HEADER, num_workers), strict=True)
    layers: dict[str, LayerStats] = {}
    for layout, header in zip(layouts, headers, strict=True):
        if header.shape[1] > FIXED_FIELDS:
            layers |= _of_layers(layout, header[:, FIXED_FIELDS:])
    return {statistic.name: total for statistic, total in totals if statistic.workers} | {
        "num_workers": num_workers,
        "num_elements": sum(layout.num_elements for layout in layouts),
        "layers": layers,
    }


def _of_layers(layout: LayerLayout, fields: Tensor) -> dict[str, LayerStats]:
    num_workers, num_layers = len(fields), len(layout.names)
    columns = [statistic for statistic in LAYER_HEADER for _ in layout.names]
    totals = combined(fields, columns, num_workers)
    names = [statistic.name for statistic in LAYER_HEADER]
    return {
        name: LayerStats(num_workers, size, **dict(zip(names, totals[place::num_layers], strict=True)))
        for place, (name, size) in enumerate(zip(layout.names, layout.sizes, strict=True))
    }


def step_metrics(steps: Sequence[StepStats]) -> dict[str, float]:
    """Return the metrics of a batch, which may have several exchanges of the same workers.

    Density refers to all exchanges together, payload bytes are summed, error norm and threshold are the last values.
    """
    stats = steps[-1]
    if len(steps) > 1:
        combining = [statistic for statistic in STATISTICS if statistic.exchanges]
        rows = [[getattr(step, statistic.name) for statistic in combining] for step in steps]
        totals = combined(torch.tensor(rows, dtype=torch.float64), combining)
        stats = replace(stats, **dict(zip((statistic.name for statistic in combining), totals, strict=True)))
    values = {
        f"sparse/{statistic.logged}": getattr(stats, statistic.logged) for statistic in STATISTICS if statistic.logged
    }
    return {name: float(value) for name, value in values.items() if value is not None}
