"""The base class of the monitors, which handles every exchange once, between batches."""

from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.sparsifiers.checks import require_flag
from lightning_sparse.strategies.sparse_strategy import SparseStrategy
from lightning_sparse.strategies.step_log import NumberLog


class StepMonitor(Callback, ABC):
    """Collects the numbers of every exchange and processes them at the end of the batch.

    The numbers are the same on every worker, so a monitor does not communicate. With a dense strategy, it logs a
    message and stays idle, so you can switch strategies and keep your callbacks.

    Args:
        per_layer: whether to follow single layers.
        name: logs ``total`` under this name after every batch from the first exchange on.
    """

    def __init__(self, per_layer: bool, name: str) -> None:
        require_flag("per_layer", per_layer)
        self.per_layer = per_layer
        self._name = name
        self._totals: defaultdict[str, float] = defaultdict(int)  # of the run, which checkpoints hold
        self._has_resumed = False
        self._new_steps: list[StepStats] = []
        self._newest: StepStats | None = None
        self._has_new_layers = self._is_idle = False
        self._log = NumberLog()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._totals.clear()
        self._has_resumed = False
        if self.per_layer and isinstance(trainer.strategy, SparseStrategy):
            trainer.strategy.per_layer_stats = True

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._new_steps.clear()
        self._newest, self._has_new_layers = None, False
        strategy = trainer.strategy
        self._is_idle = not isinstance(strategy, SparseStrategy)
        if isinstance(strategy, SparseStrategy):
            strategy.state.subscribe(self._new_steps.append)
        else:
            rank_zero_info(
                f"{type(self).__name__} is idle: {type(strategy).__name__} exchanges whole gradients. "
                "Use strategy='ddp_hardthreshold' or another sparse strategy to get its metrics."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_idle:
            return
        self._add_new()
        # In every batch, because Lightning drops earlier logs at the end of an epoch. Barebones, it warns about logs.
        if self._totals and not trainer.barebones:
            self._log.log(pl_module, {self._name: self.total()})
        # Lightning logs a batch only if it is the last of a step.
        accumulates = pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()
        is_logged = trainer._logger_connector.should_update_logs and not accumulates
        if self._newest is not None and self._has_new_layers and is_logged:
            self.log_layers(trainer, self._newest)
            self._has_new_layers = False

    @override
    def state_dict(self) -> dict[str, Any]:
        self._add_new()  # earlier callbacks may save before this one's hook
        return {"totals": dict(self._totals)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._new_steps.clear()  # from a learning rate search, which ends by restoring a checkpoint
        self._totals.update(state_dict["totals"])
        self._has_resumed = bool(self._totals)

    def _add_new(self) -> None:
        for step in self._new_steps:  # empty during gradient accumulation and between rarer exchanges
            self.add_exchange(step)
            self._newest, self._has_new_layers = step, self.per_layer
        self._new_steps.clear()

    def add_exchange(self, step: StepStats) -> None:
        """Add an exchange to ``_totals``, on every worker, at the end of its batch or in a save."""

    @abstractmethod
    def total(self) -> float:
        """Return the number of the run so far that is logged after every batch."""

    def log_layers(self, trainer: Trainer, newest: StepStats) -> None:
        """Log new numbers of layers, on every worker, in a step that Lightning logs."""


def logging_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs its own metrics of the running batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def tensorboard_loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the Trainer's TensorBoard loggers on rank 0, none on other ranks."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero]


def log_scalars(trainer: Trainer, scalars: dict[str, float], *, tensorboard: bool = True) -> None:
    """Send scalars to the Trainer's loggers, with or without TensorBoard's."""
    for logger in trainer.loggers:
        if tensorboard or not isinstance(logger, TensorBoardLogger):
            logger.log_metrics(scalars, step=logging_step(trainer))
