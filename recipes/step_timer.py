"""What a step costs, as metrics: its time, and the bytes of its gradient."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StepTimer(Callback):
    """Logs ``step_time``, the seconds from one training batch's start to the next one's, and ``gradient_bytes``, once.

    It is the first worker's time; the workers wait for each other in every step. Logged with the later of the two
    batches, and not for the first batch of an epoch, whose predecessor was followed by validation. On a GPU the host
    runs ahead of the device, so that single values mean little there and the median over many steps is right.
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
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self._last_start is not None:
            pl_module.log("step_time", now - self._last_start, on_step=True, on_epoch=False, batch_size=1)
        self._last_start = now
