"""Measures how far the weights of sparse training lag behind those that contain all gradients."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse import SimulatedWorkersStrategy, SparseDDPStrategy


class Lag(Callback):
    """Logs ``lag`` in every step: the mean over all coordinates of e · sign(m), in gradient units.

    e is the residual of rank 0, and m the running mean of the averaged gradients. A residual without a preferred
    direction has a lag of 0. The lag times the learning rate is the mean distance by which a weight lags behind.
    Only ``ddp_*`` strategies and simulated workers log it.

    Args:
        window: the time constant of the running mean, in steps.
    """

    def __init__(self, window: int = 500) -> None:
        self.window = window
        self._means: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the gradients of an earlier fit."""
        self._means.clear()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Add the averaged gradients to their running mean."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and id(parameter) in own:
                self._means.setdefault(name, torch.zeros_like(parameter)).lerp_(parameter.grad, 1 / self.window)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the lag after the step."""
        strategy = trainer.strategy
        if isinstance(strategy, (SparseDDPStrategy, SimulatedWorkersStrategy)) and self._means:
            residuals = strategy.state.residuals.layers()
            known = [(residuals[name], mean) for name, mean in self._means.items() if name in residuals]
            lags = [residual * mean.sign().flatten() for residual, mean in known]
            pl_module.log("lag", torch.cat(lags).mean().double())
