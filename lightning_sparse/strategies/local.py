"""Lightning strategies for local training with a sparse exchange of drifts."""

import copy
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from typing_extensions import override

from lightning_sparse.checkpointing.saving import collect_together, run_together
from lightning_sparse.drift.model_averager import SparseModelAverager
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.engine.options import DriftOptions
from lightning_sparse.exchange.agreement import require_agreement
from lightning_sparse.sparsifiers.protocol import Sparsifier
from lightning_sparse.strategies.arguments import process_group_arguments
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class LocalTraining(SparseStrategy):
    """Steps the averager after optimizer steps, and uses the mean of all workers' weights outside training.

    In manual optimization with several optimizers, as in a GAN, the averager steps once each of them has stepped, at
    the latest at the end of ``training_step``. An exchange writes all weights, and backwards that follow may need the
    weights of optimizers that have not stepped.
    """

    state: SparseModelAverager | None
    _options_class: ClassVar[type] = DriftOptions
    _options: DriftOptions
    _call_each_step = "step() after"
    _why_not: str | None = None
    """Why the checkpoint being written holds the anchor and not mean weights; else None."""

    def __init__(self, sparsifier: Sparsifier, **kwargs: Any) -> None:
        self._options = self._make_options(DriftOptions, kwargs)
        super().__init__(sparsifier, **kwargs)
        self._waits_for_all = False  # whether the averager steps only after all optimizers
        self._stepped: list[Any] = []  # the optimizers since its last step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._stepped = []
        self._waits_for_all = not self._module.automatic_optimization and len(self.optimizers) > 1
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._waits_for_all = False
        if self._stepped:
            self._after_step(self._stepped[-1])
        return output

    @override
    def _after_step(self, stepped: Any) -> None:
        assert self.state is not None
        self._stepped.append(stepped)
        if self._waits_for_all and not {*map(id, self.optimizers)} <= {*map(id, self._stepped)}:
            return
        self._stepped = []
        self.state.step()
        super()._after_step(stepped)

    @property
    def _shared(self) -> SharedWeights | None:
        """The ``SharedWeights`` of a running fit, else None."""
        if self.state is None or self.lightning_module is None:  # as in a process that only starts workers
            return None
        return self.state.shared if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else None

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._shared is not None:
            self._shared.load_mean()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._return_weights()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._return_weights()  # a resume has loaded mean weights
        trainer: Any = self._module.trainer
        # By a part of their names, because Lightning has WeightAveraging only from 2.6 on.
        kinds = [type(callback) for callback in trainer.callbacks]
        found = [kind.__name__ for kind in kinds if any("WeightAveraging" in base.__name__ for base in kind.__mro__)]
        if found:
            rank_zero_warn(
                f"lightning_sparse: {', '.join(found)} averages each worker's own weights, but checkpoints contain "
                "only rank 0's average. A resumed run differs slightly from an uninterrupted run, and with EMA a "
                "checkpoint's metrics from those of validation. See docs/guides/local-training.md."
            )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._return_weights()  # Lightning's learning rate finder also calls on_train_end

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._shared is not None:
            self._shared.load_mean()

    @override
    def teardown(self) -> None:
        shared = self._shared
        if self.state is not None and self.state.num_steps and shared is not None and not shared.is_loaded:
            # An exception ended the fit, perhaps only on this worker. All workers have the same anchor.
            shared.load(shared.anchor())
        super().teardown()

    def _return_weights(self) -> None:
        if self._shared is not None:
            self._shared.restore_own()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning calls this on every rank before save_checkpoint.
        if self.state is None:
            return super().lightning_module_state_dict()
        shared = self.state.shared
        is_loaded = shared.is_loaded  # during validation and after training
        weights, self._why_not = ({}, None) if is_loaded else self._mean_weights(self.state)
        with shared.replaced(shared.anchor() if weights is None else weights):
            state = super().lightning_module_state_dict()
            # Loaded weights and shards share the module's memory, which later steps change.
            return copy.deepcopy(state) if is_loaded or isinstance(self, ModelParallelStrategy) else state

    @abstractmethod
    def _mean_weights(self, averager: SparseModelAverager) -> tuple[dict[str, Tensor] | None, str | None]:
        """Return all workers' mean weights and None, or None and a reason.

        Every worker should call this.
        """


class SparseLocalStrategy(LocalTraining, DDPStrategy):
    """Local training in which workers send selected coordinates of their drifts.

    There is no DDP module and no exchange of gradients. Each worker runs its own optimizer. Every ``every_n_steps``
    optimizer steps, workers exchange the drifts of their weights from the shared anchor. See `SparseModelAverager`. Use
    it with optimizers that normalise gradients, such as Adam.

    Validation, test, predict, checkpoints and the module after ``fit`` have the mean of the workers' weights.

    Logs the metrics of `SparseDDPStrategy` in parameter units, and ``sparse/largest_drift`` (the largest distance of a
    weight from the anchor before the exchange), with the optimizer step of every exchange.

    Args:
        **kwargs: ``process_group_backend``, ``timeout``, ``start_method``, ``parallel_devices``, … of Lightning's
            ``DDPStrategy``. Arguments for DDP's own exchange are rejected.

    Attributes:
        state: the `SparseModelAverager` of the running or last ``fit``, None before.
    """

    _lightning_arguments = process_group_arguments

    @override
    def configure_ddp(self) -> None:
        require_agreement({"worker_state": self.worker_state})
        self._begin_fit(
            SparseModelAverager(self._module, self.sparsifier, self._options, per_layer_stats=self.per_layer_stats)
        )

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in self.optimizers):
            raise ValueError(
                "ZeroRedundancyOptimizer steps each parameter on one worker only, with that worker's gradient. Local "
                "training does not average gradients: use the optimizer inside it."
            )

    @override
    def teardown(self) -> None:
        super().teardown()
        if self.state is not None:
            self.state.close()

    # Checkpoints.

    @override
    def _mean_weights(self, averager: SparseModelAverager) -> tuple[dict[str, Tensor] | None, str | None]:
        return run_together(averager, self._timeout, averager.shared.mean, "averaging weights")

    @override
    def _content(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
        assert self.state is not None
        keys = {"optimizer_states": "optimizer_states", "precision_state": type(self.precision_plugin).__qualname__}
        extra = {name: checkpoint[key] for name, key in keys.items() if key in checkpoint}
        return collect_together(self.state, self.worker_state, self._timeout, why_not=self._why_not, extra=extra)
