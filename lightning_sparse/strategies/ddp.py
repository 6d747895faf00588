"""Lightning strategies: DDP with a sparse exchange of gradients."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.ddp.comm_hook import attach, learning_rates_of
from lightning_sparse.ddp.options import (
    DensityControlMode,
    ErrorFeedback,
    ExchangeOptions,
    require_density_control,
)
from lightning_sparse.ddp.sparse_state import SparseState
from lightning_sparse.exchange import ExchangeMode, parameter_settings, require_agreement
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.sparsifiers import Dense, Sparsifier
from lightning_sparse.strategies.advice import Advice, exchanges_of
from lightning_sparse.strategies.arguments import check_ddp_arguments
from lightning_sparse.strategies.checkpoint import (
    CheckpointOptions,
    OnWorldSizeChange,
    ResidualCheckpoint,
    collect,
    content_without_state,
    restore,
)
from lightning_sparse.strategies.content import KEY
from lightning_sparse.strategies.epochs import tell_epoch
from lightning_sparse.strategies.saving import WholeFiles, is_no_worker, patience_of
from lightning_sparse.strategies.step_log import StepLog

_LIGHTNING_STARTS_STATIC_GRAPHS = "post_backward" in vars(DDPStrategy)
"""Since pull request 21251 (Lightning 2.6). Before, a static graph in manual optimization exchanged nothing."""


class SparseDDPStrategy(WholeFiles, DDPStrategy):
    """DDP in which every worker sends only the coordinates that a sparsifier selects and keeps the rest for later.

    Logs ``sparse/density`` (k_t/d, in 0…1), ``sparse/error_norm`` and ``sparse/threshold`` (gradient units) and
    ``sparse/payload_bytes`` per optimizer step through the LightningModule. Each ``fit`` starts with residuals of
    zero and, with a density, with a calibration.

    Args:
        sparsifier: what to send, such as ``HardThreshold(density=0.001)`` or ``TopK(density=0.001)``.
        error_feedback: what a residual is kept in: ``"gradient"`` units; ``"learning_rate"``, rescaled as learning
            rates change (the paper's Algorithm 1); ``"none"`` throws away what is not sent.
        local_clip_norm: clips this worker's whole gradient to this norm *before* anything is sent (Lightning's
            ``gradient_clip_val`` acts on the averaged gradient). It needs the whole gradient, so that the exchange
            cannot begin before backward has ended.
        value_dtype: what values travel in; what rounding leaves is kept and sent later. ``"float32"`` sends them as the
            residual holds them, ``"bfloat16"`` and ``"float16"`` are for all sparsifiers, ``"float8"`` is for a
            threshold above 0 or a sparsifier that rounds, ``"int8"`` for the latter.
        exchange: the route that selected values take. ``"gather"``: every worker's to all others;
            ``"reduce_scatter"``: each to the worker that sums its part of the bucket, and the sums to all;
            ``"dense"``: a masked whole gradient in an all-reduce; ``"hierarchical"``: dense inside a node, sparse
            between nodes; ``"auto"``: for each bucket the cheapest of the first three, judged by the step before.
        density_control: what becomes of a λ that was asked for by a density, in ``calibration_steps`` steps at most.
            ``"hold"``, which None stands for: corrected slowly, so that the average volume after that meets the
            density; ``"calibrate"``: constant once it has been calibrated in as many steps.
        link_gbit_s: the rate of a worker's link between nodes, in Gbit/s and one direction, by which
            ``exchange="auto"`` judges what is cheapest. None takes it for 10 Gbit/s on CPUs; on GPUs for NVLink
            inside a node, and for 100 Gbit/s between nodes. Over Gloo small payloads of several buckets wait for each
            other until as many bytes are together as the link carries in 1 ms, which is what a message costs, or
            64 kB where None is said.
        residual_checkpoint: what checkpoints hold of residuals. ``"full"``: every worker's, n times the model in
            float32, for a resume that equals a run without a stop; ``"mean"``: their mean, the model once, which keeps
            the pending update; ``"none"``: nothing.
        on_world_size_change: what residuals become when a run resumes with another number of workers. ``"mean"``: the
            mean of the old on each, which keeps the pending update; ``"reset"``: zero; ``"error"``: a RuntimeError.
        **kwargs: every argument of Lightning's ``DDPStrategy`` and, through it, of ``DistributedDataParallel``
            (``find_unused_parameters``, ``static_graph``, ``bucket_cap_mb``, ``process_group_backend``, …).
            ``gradient_as_bucket_view``, which saves two copies of the gradient a step, is True unless you say otherwise
            where nothing can notice: in automatic optimization, and if no parameter may stay unused.

    Attributes:
        state: the `SparseState` of the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option, or a DDP argument that a sparse exchange cannot honour.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        error_feedback: ErrorFeedback = "gradient",
        local_clip_norm: float | None = None,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        density_control: DensityControlMode | None = None,
        link_gbit_s: float | None = None,
        residual_checkpoint: ResidualCheckpoint = "full",
        on_world_size_change: OnWorldSizeChange = "mean",
        **kwargs: Any,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(
                f"Expected a sparsifier such as HardThreshold(threshold=0.01), got {sparsifier!r}. "
                "For a threshold alone use DDPHardThresholdStrategy(threshold=0.01)."
            )
        check_ddp_arguments(kwargs, type(self))
        self._checkpoint_options = CheckpointOptions(residual_checkpoint, on_world_size_change)
        self._options = ExchangeOptions(
            error_feedback, local_clip_norm, value_dtype, exchange, density_control, link_gbit_s
        )
        require_density_control(sparsifier, density_control)
        require_wire(sparsifier, value_dtype)
        super().__init__(**kwargs)
        self.sparsifier = sparsifier
        self.state: SparseState | None = None
        self._per_layer_stats = False
        self.step_log = StepLog()
        self._advice = Advice("gradients")
        self._is_stepping = False

    def request_layer_stats(self) -> None:
        """Asks for per-layer numbers from the next ``fit`` on; on all workers, in a callback's ``setup``."""
        self._per_layer_stats = True

    @override
    def configure_ddp(self) -> None:
        # Lightning flushes the first static-graph iteration once per strategy object, but a second fit has one too.
        self._pl_static_graph_delay_done = False
        # Before DDP is made: it tells all workers but the first that sizes differ, and the first waits.
        assert self.model is not None
        require_agreement(parameter_settings(self.model) | asdict(self._checkpoint_options))
        super().configure_ddp()

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        given = self._ddp_kwargs
        # Saves copying every gradient into its bucket and back. A program that keeps gradients over a further backward
        # would find them changed, which only manual optimization lets it do; and where parameters may stay unused it
        # would cost them what earlier backwards left (see ParameterUse).
        if (
            self.lightning_module is not None
            and self.lightning_module.automatic_optimization
            and not (given.get("find_unused_parameters") or given.get("static_graph"))
        ):
            self._ddp_kwargs = {"gradient_as_bucket_view": True} | given
        try:
            return super()._setup_model(model)
        finally:
            self._ddp_kwargs = given

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning's own method registers hooks on CUDA only; elsewhere it would silently train densely.
        assert isinstance(self.model, DistributedDataParallel)
        self.step_log.clear()
        sparsifier, options = self._what_is_sent()
        self.state = attach(
            self.model,
            sparsifier,
            options,
            grad_scaler=lambda: getattr(self.precision_plugin, "scaler", None),
            learning_rates=lambda: learning_rates_of(self.optimizers),
            per_layer_stats=self._per_layer_stats,
        )
        self.state.subscribe(self.step_log.add)
        self._advice.follow(self.state, holds_density=options.holds_density)
        self.state.settlement.on_step.append(self._on_any_step)

    def _what_is_sent(self) -> tuple[Sparsifier, ExchangeOptions]:
        if self.world_size > 1:
            return self.sparsifier, self._options
        return Dense(), replace(self._options, value_dtype="float32", density_control=None)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._advice.begin(self.optimizers, exchanges_of(self.lightning_module))

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._advice.end()

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        # In manual optimization Lightning prepares DDP for each backward, without a forward of DDP's own.
        if self.state is not None:
            self.state.settlement.expect_backward()
        super().pre_backward(closure_loss)
        if self.state is not None:
            self.state.settlement.backward_is_prepared()

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)  # where the first buckets of a static graph are exchanged
        if not _LIGHTNING_STARTS_STATIC_GRAPHS:
            self._start_static_graph()
        if self.state is not None:
            self.state.settlement.backward_has_ended()

    def _start_static_graph(self) -> None:
        if self.lightning_module is None or self.lightning_module.automatic_optimization:
            return
        assert isinstance(self.model, DistributedDataParallel)
        if self.model.static_graph and not self._pl_static_graph_delay_done:
            reducer: Any = self.model.reducer
            reducer._delay_all_reduce()
            self._pl_static_graph_delay_done = True

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        self._is_stepping = True
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_stepping = False
        self.step_log.write(self.lightning_module, self.state)
        return output

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.step_log.begin_batch(self.lightning_module)
        if self.state is not None:
            tell_epoch(self.state, self)

    def _on_any_step(self, _: set[str]) -> None:
        # Not all come through the strategy: self.optimizers(use_pl_optimizer=False) hands out torch's own.
        if not self._is_stepping:
            self.step_log.write(self.lightning_module, self.state)

    @override
    def teardown(self) -> None:
        if self.state is not None:
            self.state.close()
        super().teardown()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # Lightning calls this on every worker; a checkpoint of weights only has no state to resume from.
        if "optimizer_states" in checkpoint:
            content = self._residual_content()
            if content is not None:
                checkpoint[KEY] = content
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _residual_content(self) -> dict[str, Any] | None:
        if self.state is not None:
            return collect(self.state, self._checkpoint_options.residual_checkpoint, patience_of(self._timeout))
        return content_without_state(self.world_size) if is_no_worker(self) else None

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.state is not None  # Lightning restores after the model was wrapped
        on_world_size_change = self._checkpoint_options.on_world_size_change
        restore([self.state], checkpoint.get(KEY), on_world_size_change)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Does nothing: Lightning would call the inherited method, which registers names that DDP has already."""
