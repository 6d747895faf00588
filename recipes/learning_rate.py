"""The learning-rate schedule of the published experiments."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import ceil

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim.lr_scheduler import LambdaLR


def schedule_by_epoch(module: LightningModule, optimizer: torch.optim.Optimizer) -> OptimizerLRScheduler:
    """Return an optimizer and its schedule, for ``configure_optimizers``.

    Args:
        module: has the hyperparameters ``learning_rate``, ``warmup_from``, ``warmup_epochs`` and ``milestones``.
        optimizer: the module's optimizer.
    """
    options, epoch_length = module.hparams, steps_per_epoch(module)

    def rate(step: int) -> float:
        return relative_learning_rate(
            step / epoch_length,
            warmup_from=options["warmup_from"] / options["learning_rate"],
            warmup_epochs=options["warmup_epochs"],
            milestones=options["milestones"],
        )

    return schedule_by_step(optimizer, rate)


def schedule_by_step(optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> OptimizerLRScheduler:
    """Return an optimizer and its schedule: ``rate`` returns the relative learning rate of a step."""
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, rate), "interval": "step"}}


def steps_per_epoch(module: LightningModule) -> int:
    """Return the optimizer steps per epoch of the module's Trainer."""
    if module.trainer.train_dataloader is None:  # num_training_batches is infinite before the data are loaded
        module.trainer.fit_loop.setup_data()
    return ceil(module.trainer.num_training_batches / module.trainer.accumulate_grad_batches)


def relative_learning_rate(
    epoch: float, *, warmup_from: float, warmup_epochs: float, milestones: Sequence[float]
) -> float:
    """Return the learning rate as a multiple of the rate after the warmup.

    Args:
        epoch: epochs since the start, with fractions.
        warmup_from: the multiple at the start.
        warmup_epochs: epochs until the multiple is 1.
        milestones: epochs at which the rate drops to a tenth, in rising order.

    Example:
        >>> schedule = dict(warmup_from=1 / 16, warmup_epochs=5, milestones=(150, 250))
        >>> [round(1.6 * relative_learning_rate(epoch, **schedule), 4) for epoch in (0, 2.5, 5, 149.9, 150, 250)]
        [0.1, 0.85, 1.6, 1.6, 0.16, 0.016]
        >>> relative_learning_rate(0, warmup_from=0.5, warmup_epochs=0, milestones=())
        1.0
    """
    if epoch < warmup_epochs:
        return warmup_from + (1 - warmup_from) * epoch / warmup_epochs
    return float(0.1 ** bisect_right(milestones, epoch))
