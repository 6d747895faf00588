"""What strategies of local training have in common: everybody sees the same weights wherever they are looked at."""

from abc import abstractmethod
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_sparse.drift import SparseModelAverager


class LocalTraining(Strategy):
    """Shows the mean of all weights in validation and after ``fit``; while training goes on, each has its own.

    Attributes:
        averager: the `SparseModelAverager` of the running or last ``fit``, None before.
    """

    _has_ended = False

    @property
    @abstractmethod
    def averager(self) -> SparseModelAverager | None:
        """What exchanges drifts in the running or last ``fit``, None before."""

    def restart(self) -> None:
        """Returns what is exchanged to before the first step, with the weights of now. Not collective."""
        assert self.averager is not None
        self.averager.restart()
        self._has_ended = False

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

    def _share_weights(self) -> None:
        if self.averager is not None and self._is_fitting and not self._has_ended:
            self.averager.shared.take_mean()

    def _return_weights(self) -> None:
        if self.averager is not None and self._is_fitting and not self._has_ended:
            self.averager.shared.give_back()

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
