"""What strategies of local training have in common: everybody sees the same weights wherever they are looked at."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.drift import DriftOptions, SparseModelAverager
from lightning_sparse.engine.optimizer_steps import weak_method
from lightning_sparse.strategies.options import AveragesDrifts

_OWN_WEIGHTS = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")  # the first from Lightning 2.6 on


class LocalTraining(AveragesDrifts):
    """Shows the mean of all weights in validation and after ``fit``; while training goes on, each has its own."""

    averages = "drifts"
    state: SparseModelAverager | None
    _options: DriftOptions
    _call_each_step = "step() after"
    _has_ended = False

    @property
    def averager(self) -> SparseModelAverager | None:
        """The averager of the running or last ``fit``, None before; also called ``state``."""
        return self.state

    def _follow_drifts(self, averager: SparseModelAverager) -> None:
        self._has_ended = False
        self._follow(averager)
        averager.observed_steps.on_step = weak_method(self._after_observed_step)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._nothing_counts():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._exchange()
        return output

    def _after_observed_step(self) -> None:
        """Exchanges after a step that bypassed Lightning."""
        if not self._is_stepping:
            self._exchange()

    def _exchange(self) -> None:
        assert self.averager is not None
        self.averager.step()
        self._log()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._share_weights()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._return_weights()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._return_weights()  # that a checkpoint has brought
        self._warn_of_callbacks()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._has_ended = False  # a search for a learning rate ends as a training does
        self._return_weights()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._share_weights()
        self._has_ended = True

    @override
    def teardown(self) -> None:
        if self.averager is not None and not self._has_ended and self._is_fitting:
            # An exception has ended it, perhaps of this worker alone: what all have alike is the anchor.
            if self.averager.num_steps:
                self.averager.shared.take_anchor()
            self.averager.shared.forget_own()
        super().teardown()

    def _warn_of_callbacks(self) -> None:
        assert self.lightning_module is not None
        kinds = tuple(kind for name in _OWN_WEIGHTS if (kind := getattr(callbacks, name, None)) is not None)
        trainer: Any = self.lightning_module.trainer
        found = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, kinds)]
        if found:
            rank_zero_warn(
                f"lightning_sparse: {', '.join(found)} keeps a state that follows from each worker's own weights, and "
                "checkpoints hold rank 0's. A resumed run differs slightly from one that never stopped. See "
                "docs/local-training.md."
            )

    def _share_weights(self) -> None:
        if self.averager is not None and self._is_fitting and not self._has_ended:
            self.averager.shared.take_mean()

    def _return_weights(self) -> None:
        if self.averager is not None and self._is_fitting and not self._has_ended:
            self.averager.shared.give_back()

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
