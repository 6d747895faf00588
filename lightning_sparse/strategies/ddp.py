"""Lightning strategy: DDP with a sparse exchange of gradients."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.checkpointing.saving import collect_together, content_of_launcher
from lightning_sparse.exchange import parameter_settings, require_agreement
from lightning_sparse.gradients.comm_hook import attach
from lightning_sparse.gradients.options import ErrorFeedback, ExchangeOptions
from lightning_sparse.gradients.sparse_state import SparseState
from lightning_sparse.sparsifiers import Dense, Sparsifier
from lightning_sparse.strategies.arguments import check_ddp_arguments
from lightning_sparse.strategies.options import AveragesGradients

_LIGHTNING_STARTS_STATIC_GRAPHS = "post_backward" in vars(DDPStrategy)
"""Since pull request 21251 (Lightning 2.6). Before, a static graph in manual optimization exchanged nothing."""


class SparseDDPStrategy(AveragesGradients, DDPStrategy):
    """DDP in which every worker sends only the coordinates that a sparsifier selects and keeps the rest for later.

    Logs ``sparse/density`` (k_t/d, in 0…1), ``sparse/error_norm`` and ``sparse/threshold`` (gradient units) and
    ``sparse/payload_bytes`` per optimizer step through the LightningModule. Each ``fit`` starts with residuals of
    zero and, with a density, with a calibration.

    Args:
        error_feedback: units of the residual. ``"gradient"``; ``"learning_rate"``: rescaled as learning rates change
            (the paper's Algorithm 1); ``"none"`` throws unsent values away.
        local_clip_norm: above 0, in gradient units: clips this worker's whole gradient to this norm *before* the
            exchange (Lightning's ``gradient_clip_val`` acts on the averaged gradient). The exchange then begins only
            after backward has ended. None does not clip.
        **kwargs: every argument of Lightning's ``DDPStrategy`` and, through it, of ``DistributedDataParallel``
            (``find_unused_parameters``, ``static_graph``, ``bucket_cap_mb``, ``process_group_backend``, …).
            ``gradient_as_bucket_view``, which saves two copies of the gradient per step, is True by default where no
            program can notice: in automatic optimization, if no parameter may stay unused.

    Attributes:
        state: the `SparseState` of the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option, or a DDP argument that a sparse exchange cannot honour.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    averages = "gradients"
    state: SparseState | None
    _options: ExchangeOptions
    _by_threshold = "DDPHardThresholdStrategy"

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        error_feedback: ErrorFeedback = "gradient",
        local_clip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(sparsifier, **kwargs)
        self._options = replace(self._options, error_feedback=error_feedback, local_clip_norm=local_clip_norm)

    @override
    def _lightning_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        check_ddp_arguments(arguments, type(self))
        return arguments

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
        sparsifier, options = self._what_is_sent()
        state = attach(
            self.model,
            sparsifier,
            options,
            grad_scaler=lambda: getattr(self.precision_plugin, "scaler", None),
            optimizers=lambda: self.optimizers,
            per_layer_stats=self._per_layer_stats,
        )
        self._follow(state)
        state.pending_gradients.on_step.append(self._on_any_step)

    def _what_is_sent(self) -> tuple[Sparsifier, ExchangeOptions]:
        if self.world_size > 1:
            return self.sparsifier, self._options
        return Dense(), replace(self._options, value_dtype="float32", density_control=None)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        # In manual optimization Lightning prepares DDP for each backward, without a forward of DDP's own.
        if self.state is not None:
            self.state.pending_gradients.expect_backward()
        super().pre_backward(closure_loss)
        if self.state is not None:
            self.state.pending_gradients.backward_is_prepared()

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)  # where the first buckets of a static graph are exchanged
        if not _LIGHTNING_STARTS_STATIC_GRAPHS:
            self._start_static_graph()
        if self.state is not None:
            self.state.pending_gradients.backward_has_ended()

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
        with self._nothing_counts():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._log()
        return output

    def _on_any_step(self, _: set[str]) -> None:
        # Not all come through the strategy: self.optimizers(use_pl_optimizer=False) hands out torch's own.
        if not self._is_stepping:
            self._log()

    @override
    def teardown(self) -> None:
        if self.state is not None:
            self.state.close()
        super().teardown()

    @override
    def _content(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any] | None:
        if self.state is None:
            return content_of_launcher(self, "gradients")
        return collect_together(self.state, self._checkpoint_options, self._timeout)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._restore(checkpoint)  # Lightning restores after the model was wrapped
