"""Estimates the constants of the paper's bounds from gradients, and the threshold that follows from them."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sparse import SimulatedWorkersStrategy
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.theory import measured_noise, threshold_from_estimates


class GradientNoise(Callback):
    """Prints σ², ζ² and λ = (2/√k) √((2d/k) ζ² + σ²) from the gradients of simulated workers.

    Use it with `SimulatedWorkersStrategy`, the `Dense` sparsifier, some 20 steps and a learning rate close to 0. All
    gradients then belong to the same weights. It keeps every gradient in memory.

    Args:
        densities: k/d of each printed λ.
    """

    def __init__(self, densities: tuple[float, ...] = (0.01, 0.001)) -> None:
        self.densities = densities
        self._draws: list[list[torch.Tensor]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the gradients of an earlier fit."""
        if not isinstance(trainer.strategy, SimulatedWorkersStrategy):
            raise TypeError(f"GradientNoise needs SimulatedWorkersStrategy, got {type(trainer.strategy).__name__}.")
        self._draws = [[] for _ in trainer.strategy.averagers]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch the next exchange of each worker."""
        strategy: Any = trainer.strategy
        for draws, averager in zip(self._draws, strategy.averagers, strict=True):
            averager.watch_next(partial(_keep, draws))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the estimates."""
        noise, heterogeneity = measured_noise([torch.stack(draws) for draws in self._draws])
        num_elements = self._draws[0][0].numel()
        print(f"σ² = {noise:.4g}, ζ² = {heterogeneity:.4g} (0 or less: workers hardly differ), d = {num_elements:,}")
        for density in self.densities:
            count = max(1, round(density * num_elements))
            threshold = threshold_from_estimates(count, num_elements, noise, max(0.0, heterogeneity))
            print(f"k/d = {density:g}: λ = {threshold:.4g}")


def _keep(draws: list[torch.Tensor], bucket: FlatBucket) -> None:
    if bucket.index == 0:
        draws.append(bucket.gradient.clone())
    else:
        draws[-1] = torch.cat([draws[-1], bucket.gradient])
