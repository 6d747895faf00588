"""Torchmetrics over the numbers of a step: average density and total error of a run.

Every worker updates them with the same numbers, so they do not synchronise: ``compute`` issues no collective, and you
may call it on a single worker.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sparse.engine.step_stats import StepStats


class AverageDensity(Metric):
    """Σ_t Σ_i k_{i,t} / Σ_t n d, the number of sent coordinates over the number of all coordinates, in 0…1.

    A ratio of sums, not a mean of ratios: a step that exchanges part of the model weighs by its size.

    Example:
        >>> metric = AverageDensity()
        >>> metric.update(StepStats(0, 2, 100, 10, 0.0, 0.0, 0, 60, 400))
        >>> metric.update(StepStats(1, 2, 300, 10, 0.0, 0.0, 0, 60, 1200))
        >>> metric.compute().item()
        0.025
    """

    full_state_update = False
    higher_is_better = False
    selected: Tensor
    elements: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"sync_on_compute": False} | kwargs)
        self.add_state("selected", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")
        self.add_state("elements", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, stats: StepStats) -> None:
        """Add the numbers of a step."""
        self.selected += stats.selected
        self.elements += stats.num_workers * stats.num_elements

    def compute(self) -> Tensor:
        """Return the average density of the steps so far, float64; 0 before the first."""
        return self.selected / self.elements.clamp(min=1)


class TotalError(Metric):
    """Σ_t (1/n) Σ_i ‖e_{i,t}‖², the squared residuals summed over the run, in gradient units squared.

    The quantity that the hard threshold minimises (Sahu et al., NeurIPS 2021, arXiv:2108.00951, section 4).

    Example:
        >>> metric = TotalError()
        >>> metric.update(StepStats(0, 2, 100, 10, 1.5, 0.0, 0, 60, 400))
        >>> metric.update(StepStats(1, 2, 100, 10, 2.0, 0.0, 0, 60, 400))
        >>> metric.compute().item()
        3.5
    """

    full_state_update = False
    higher_is_better = False
    squared_error: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"sync_on_compute": False} | kwargs)
        self.add_state("squared_error", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, stats: StepStats) -> None:
        """Add the numbers of a step."""
        self.squared_error += stats.squared_error

    def compute(self) -> Tensor:
        """Return the total error of the steps so far, float64."""
        return self.squared_error
