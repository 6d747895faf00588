"""What the monitors share: they listen to the strategy and handle each exchange once, between batches."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class StepMonitor(Callback):
    """Collects the numbers of every exchange and hands them on at the end of the batch.

    The numbers are the same on every worker, so a monitor communicates nothing. With a strategy that exchanges
    densely it says so once and stays idle, so that a recipe can switch strategies and keep its callbacks.
    """

    _wants_layer_stats = False

    def __init__(self) -> None:
        self._new_steps: list[StepStats] = []
        self._unwritten: StepStats | None = None
        self._has_numbers = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._wants_layer_stats and isinstance(trainer.strategy, SparseStrategy):
            trainer.strategy.request_layer_stats()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._new_steps.clear()
        self._unwritten = None
        strategy = trainer.strategy
        if isinstance(strategy, SparseStrategy) and strategy.state is not None:
            strategy.state.subscribe(self._new_steps.append)
        else:
            rank_zero_info(
                f"{type(self).__name__} is idle: {type(strategy).__name__} exchanges whole gradients. "
                "Its numbers come with strategy='ddp_hardthreshold' and the other sparse strategies."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps, self._new_steps[:] = self._new_steps.copy(), []
        if steps:  # there are none under gradient accumulation, or where not every step exchanges
            self.take_in(steps)
            self._unwritten, self._has_numbers = steps[-1], True
        # In every batch: at the end of an epoch Lightning forgets what was logged before. Barebones, it warns of logs.
        if self._has_numbers and not trainer.barebones:
            self.log_totals(pl_module)
        if self._unwritten is not None and is_logging_step(trainer):
            self.log_layers(trainer, self._unwritten)
            self._unwritten = None

    def take_in(self, steps: list[StepStats]) -> None:
        """Called on every worker after a batch with exchanges."""

    def log_totals(self, pl_module: LightningModule) -> None:
        """Called on every worker after every batch from the first exchange on."""

    def log_layers(self, trainer: Trainer, newest: StepStats) -> None:
        """Called on every worker in each step that Lightning logs, if there was an exchange since the last one."""


def logging_step(trainer: Trainer) -> int:
    """The step under which Lightning's own metrics of the running batch are logged."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_logging_step(trainer: Trainer) -> bool:
    """Whether Lightning logs the running batch: every ``log_every_n_steps`` of the Trainer."""
    every = getattr(trainer, "log_every_n_steps", 0)
    if trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate():
        return False  # as Lightning has it: only the last batch of a step has a row
    return bool(every) and (logging_step(trainer) + 1) % every == 0


def tensorboard_loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers, none on other workers than the first."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero]


def log_scalars(trainer: Trainer, scalars: dict[str, float], *, tensorboard: bool = True) -> None:
    """Sends scalars to the Trainer's loggers, with or without TensorBoard's."""
    for logger in trainer.loggers:
        if tensorboard or not isinstance(logger, TensorBoardLogger):
            logger.log_metrics(scalars, step=logging_step(trainer))
