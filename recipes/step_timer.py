"""Logs the time of each step and the bytes of its gradient."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StepTimer(Callback):
    """Logs ``step_time`` in every step and ``gradient_bytes`` once.

    ``step_time`` is rank 0's time in seconds from the start of the previous training batch. The first batch of an epoch
    and the first after a validation log none. On a GPU the host runs ahead of the device: use the median of many steps,
    not single values.
    """

    def __init__(self) -> None:
        self._last_start: float | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        gradient_bytes = float(sum(parameter.numel() * parameter.itemsize for parameter in trained))
        for logger in trainer.loggers:
            logger.log_metrics({"gradient_bytes": gradient_bytes}, step=0)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_start = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_start = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self._last_start is not None:
            pl_module.log("step_time", now - self._last_start, on_step=True, on_epoch=False, batch_size=1)
        self._last_start = now
