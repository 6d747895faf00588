"""Lightning strategies for local training: every worker steps its own optimizer, drifts are exchanged sparsely."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from typing_extensions import override

from lightning_sparse.drift import DriftOptions, SparseModelAverager
from lightning_sparse.drift.options import OuterOptimizer
from lightning_sparse.engine.weak_call import weakly
from lightning_sparse.exchange import ExchangeMode, require_agreement
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.sparsifiers import Dense, Sparsifier
from lightning_sparse.strategies.advice import Advice, exchanges_of
from lightning_sparse.strategies.arguments import process_group_arguments
from lightning_sparse.strategies.content import KEY
from lightning_sparse.strategies.drift_checkpoint import (
    DriftCheckpoint,
    DriftCheckpointOptions,
    OptimizerCheckpoint,
    collect,
    meet,
    restored,
    shared_state_dict,
    warn_of_no_drifts,
)
from lightning_sparse.strategies.epochs import tell_epoch
from lightning_sparse.strategies.local_training import LocalTraining
from lightning_sparse.strategies.saving import NO_WORKER, WholeFiles, is_no_worker, patience_of
from lightning_sparse.strategies.step_log import StepLog


class SparseLocalStrategy(LocalTraining, WholeFiles, DDPStrategy):
    """Local training in which workers send only those coordinates of their drift that a sparsifier selects.

    There is no DDP module and no exchange of gradients: every worker steps its own optimizer, and every
    ``every_n_steps`` optimizer steps its weights' drift from what all share is exchanged. See
    `SparseModelAverager`. Right for Adam and its like, which need gradients as they come.

    Validation, test, predict, checkpoints and what is left after ``fit`` are the mean of the workers' weights.

    Logs ``sparse/density``, ``sparse/error_norm`` and ``sparse/threshold`` (parameter units), ``sparse/largest_drift``
    (the largest distance of a weight from the anchor before the exchange) and ``sparse/payload_bytes`` with the
    optimizer step of every exchange.

    Args:
        sparsifier: what to send, such as ``HardThreshold(density=0.01)`` or ``TopK(density=0.01)``.
        every_n_steps: optimizer steps (of all optimizers together) from one exchange to the next.
        keep_drift: True leaves each worker where it is but for what was sent. False takes every worker back to
            the anchor after each exchange and keeps apart what was not sent (SparseLoCo).
        drift_decay: by what is multiplied what was not sent before the next drift is added, in (0, 1]; below 1 only
            with ``keep_drift=False``.
        outer_optimizer: makes the optimizer that moves the anchor by the average drift, as if that were its gradient;
            None subtracts it. DiLoCo: ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
        overlap: whether what was sent travels while the next step is computed, and is applied one step late.
        value_dtype: what a value travels in, as in `SparseDDPStrategy`; what rounding leaves is kept.
        exchange: ``"gather"``, ``"reduce_scatter"``, ``"dense"``, ``"hierarchical"`` or ``"auto"``, which are those of
            `SparseDDPStrategy`.
        link_gbit_s: the rate of a worker's link between nodes, in Gbit/s and one direction; None is that of
            `SparseDDPStrategy`.
        drift_checkpoint: what checkpoints hold of drifts. ``"full"``: every worker's weights, n times the model, for a
            resume that equals a run without a stop; ``"mean"``: their mean, which is in the file anyway.
        optimizer_checkpoint: what they hold of optimizers, which differ between workers. ``"full"``: every worker's;
            ``"mean"``: the mean of their tensors; ``"first"``: the first worker's.
        **kwargs: ``process_group_backend``, ``timeout``, ``start_method``, ``parallel_devices``, … of Lightning's
            ``DDPStrategy``. What concerns DDP's own exchange is refused.

    Attributes:
        averager: the `SparseModelAverager` of the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option, or an argument that needs a DDP module.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        every_n_steps: int = 1,
        keep_drift: bool = True,
        drift_decay: float = 1.0,
        outer_optimizer: OuterOptimizer | None = None,
        overlap: bool = False,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        link_gbit_s: float | None = None,
        drift_checkpoint: DriftCheckpoint = "full",
        optimizer_checkpoint: OptimizerCheckpoint = "full",
        **kwargs: Any,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(
                f"Expected a sparsifier such as HardThreshold(threshold=0.001), got {sparsifier!r}. "
                "For a threshold alone use LocalHardThresholdStrategy(threshold=0.001)."
            )
        kwargs = process_group_arguments(kwargs, type(self))
        self._checkpoint_options = DriftCheckpointOptions(drift_checkpoint, optimizer_checkpoint)
        self._options = DriftOptions(
            every_n_steps, keep_drift, drift_decay, outer_optimizer, overlap, value_dtype, exchange, link_gbit_s
        )
        require_wire(sparsifier, value_dtype)
        super().__init__(**kwargs)
        self.sparsifier = sparsifier
        self._averager: SparseModelAverager | None = None
        self.step_log = StepLog()
        self._advice = Advice("drifts")
        self._per_layer_stats = self._is_in_a_step = False
        self._why_not: str | None = None

    def request_layer_stats(self) -> None:
        """Asks for per-layer numbers from the next ``fit`` on; call it on every worker."""
        self._per_layer_stats = True

    @property
    @override
    def averager(self) -> SparseModelAverager | None:
        return self._averager

    @property
    def state(self) -> SparseModelAverager | None:
        """The averager, by the name that other sparse strategies have for what they keep."""
        return self.averager

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        self.step_log.clear()
        self._has_ended = False
        require_agreement(asdict(self._checkpoint_options))
        sparsifier, options = self._what_is_sent()
        self._averager = SparseModelAverager(self.model, sparsifier, options, per_layer_stats=self._per_layer_stats)
        self._averager.subscribe(self.step_log.add)
        self._averager.observed_steps.on_step = weakly(self._after_observed_step)
        self._advice.follow(self._averager, holds_density=True)

    def _what_is_sent(self) -> tuple[Sparsifier, DriftOptions]:
        if self.world_size > 1:
            return self.sparsifier, self._options
        return Dense(), replace(self._options, value_dtype="float32")

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if any(isinstance(one, ZeroRedundancyOptimizer) for one in self.optimizers):
            raise ValueError(
                "ZeroRedundancyOptimizer steps each parameter on one worker only, with that worker's gradient. In "
                "local training gradients are not averaged: use the optimizer that is inside of it."
            )

    @override
    def _exchange(self) -> None:
        self._is_in_a_step = False
        super()._exchange()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._is_in_a_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            if self.lightning_module is None or not self.lightning_module.automatic_optimization:
                self._is_in_a_step = False

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._is_in_a_step = False

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._advice.begin(self.optimizers, exchanges_of(self.lightning_module, self._options.every_n_steps))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.step_log.begin_batch(self.lightning_module)
        if self.averager is not None:
            tell_epoch(self.averager, self)
        self._is_in_a_step = False
        super().on_train_batch_start(batch, batch_idx)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._advice.end()

    @override
    def teardown(self) -> None:
        if self.averager is not None:
            self.averager.close()
        super().teardown()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning asks every worker, and then calls save_checkpoint on it.
        if self.averager is None or self._has_ended:
            return super().lightning_module_state_dict()
        if self.averager.shared.is_shown:  # while validation looks at the mean
            return copy.deepcopy(super().lightning_module_state_dict())
        why_not = self._meet()
        state, self._why_not = shared_state_dict(self.averager, super().lightning_module_state_dict, why_not)
        return state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.averager is not None and "optimizer_states" in checkpoint:
            content = collect(
                self.averager,
                checkpoint,
                self._precision_key,
                self._checkpoint_options,
                self._why_not,
                self._meet,
            )
            if content is not None:
                checkpoint[KEY] = content
        elif "optimizer_states" in checkpoint and is_no_worker(self):
            warn_of_no_drifts("mean of the workers'", NO_WORKER)
        self._why_not = None
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _meet(self) -> str | None:
        assert self.averager is not None
        return meet(self.averager, patience_of(self._timeout), self._is_in_a_step)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.averager is not None  # Lightning restores after the model was set up
        own = restored(self.averager, checkpoint, self._precision_key, checkpoint.get(KEY))
        super().load_optimizer_state_dict(own)
        if self._precision_key in own:  # Lightning has loaded the first worker's
            self.precision_plugin.load_state_dict(own[self._precision_key])

    @property
    def _precision_key(self) -> str:
        return type(self.precision_plugin).__qualname__

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Does nothing: Lightning would call the inherited method, which registers names that DDP has already."""
