"""The base of strategies for local training: validation, files and the end of a fit use weights that all share."""

from typing import Any, ClassVar

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_sparse.checkpointing.options import DriftCheckpointOptions
from lightning_sparse.drift import DriftOptions, SparseModelAverager
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.engine.weak_method import weak_method
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategies.sparse_strategy import SparseStrategy

_OWN_WEIGHTS = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")  # the first from Lightning 2.6 on


class LocalTraining(SparseStrategy):
    """Gives workers the mean of their weights in validation and after ``fit``, and their own in training."""

    averages = "drifts"
    state: SparseModelAverager | None
    _takes: ClassVar[tuple[type, ...]] = (DriftOptions, DriftCheckpointOptions)
    _options: DriftOptions
    _checkpoint_options: DriftCheckpointOptions
    _call_each_step = "step() after"
    _is_sharded: ClassVar[bool] = False
    _has_ended = False

    def __init__(self, sparsifier: Sparsifier, **kwargs: Any) -> None:
        self._options = self._taken(DriftOptions, kwargs)
        self._checkpoint_options = self._taken(DriftCheckpointOptions, kwargs, is_sharded=self._is_sharded)
        super().__init__(sparsifier, **kwargs)

    @property
    def averager(self) -> SparseModelAverager | None:
        """The averager of the running or last ``fit``, None before; also called ``state``."""
        return self.state

    def _follow_drifts(self, averager: SparseModelAverager) -> None:
        self._has_ended = False
        self._follow(averager)
        averager.observed_steps.on_step = weak_method(self._after_any_step)

    @override
    def _after_step(self) -> None:
        assert self.state is not None
        self.state.step()
        super()._after_step()

    @property
    def _shared(self) -> SharedWeights | None:
        """Changes weights while a fit trains; None before and after."""
        module = self.lightning_module
        is_fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        return self.state.shared if self.state is not None and is_fitting and not self._has_ended else None

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._shared is not None:
            self._shared.take_mean()

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
        if self._shared is not None:
            self._shared.take_mean()
        self._has_ended = True

    @override
    def teardown(self) -> None:
        if self.state is not None and self._shared is not None:
            # An exception has ended the fit, perhaps on this worker alone: all workers have the same anchor.
            if self.state.num_steps:
                self._shared.take_anchor()
            self._shared.forget_own()
        super().teardown()

    def _return_weights(self) -> None:
        if self._shared is not None:
            self._shared.give_back()

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
