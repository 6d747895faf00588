"""Lightning strategy: DDP with a sparse exchange of gradients."""

from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_sparse.engine.optimizer_steps import weak_method
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.exchange.agreement import ignored_names, parameter_settings, require_agreement
from lightning_sparse.gradients.comm_hook import register_comm_hook
from lightning_sparse.gradients.ddp_averager import DDPGradientAverager
from lightning_sparse.sparsifiers.protocol import Sparsifier
from lightning_sparse.strategies.arguments import ddp_arguments
from lightning_sparse.strategies.sparse_strategy import SparseStrategy

SINGLE_BUCKET_BYTES = 2**22
"""Gradients up to this size share a bucket. At 1 %, their payloads share a message over Gloo anyway."""


class SparseDDPStrategy(SparseStrategy, DDPStrategy):
    """DDP in which workers send selected coordinates and keep the rest for later.

    Logs numbers of every optimizer step through the LightningModule, such as ``sparse/density``, the mean share of
    coordinates that a worker sent (docs/guides/loggers.md lists them all). Each ``fit`` starts with residuals of zero
    and, with a density, with a calibration.

    Args:
        gradient_as_bucket_view: of ``DistributedDataParallel``; True avoids two copies of the gradient per step. None
            is True, unless optimization is manual or ``find_unused_parameters`` or ``static_graph`` is set.
        **kwargs: every argument of Lightning's ``DDPStrategy`` and, through it, of ``DistributedDataParallel``
            (``find_unused_parameters``, ``static_graph``, ``bucket_cap_mb``, ``process_group_backend``, …). Without
            ``bucket_cap_mb``, gradients of up to 4 MiB share one bucket.

    Attributes:
        state: the `DDPGradientAverager` of the running or last ``fit``, None before.
    """

    state: DDPGradientAverager | None
    _options_class: ClassVar[type] = GradientOptions
    _options: GradientOptions
    _lightning_arguments = ddp_arguments

    def __init__(self, sparsifier: Sparsifier, *, gradient_as_bucket_view: bool | None = None, **kwargs: Any) -> None:
        self._options = self._make_options(GradientOptions, kwargs)
        self._view = gradient_as_bucket_view  # a command line passes DDP's default as if the user had chosen it
        self._cap = kwargs.get("bucket_cap_mb")
        super().__init__(sparsifier, **kwargs)

    @override
    def configure_ddp(self) -> None:
        # Lightning flushes the first static-graph iteration once per strategy object, but a second fit has one too.
        self._pl_static_graph_delay_done = False
        # Before DDP is made: if sizes differ, DDP raises on all workers except rank 0, which hangs.
        require_agreement(parameter_settings(self._module) | {"worker_state": self.worker_state})
        super().configure_ddp()

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        view = self._view
        if view is None:
            # Views avoid copies of gradients into buckets and back. In manual optimization, they could change gradients
            # kept during another backward. They would also drop old gradients of unused parameters (ParameterUse).
            may_have_unused = self._ddp_kwargs.get("find_unused_parameters") or self._ddp_kwargs.get("static_graph")
            view = self._module.automatic_optimization and not may_have_unused
        ignored = ignored_names(model)
        trained = [p for name, p in model.named_parameters() if p.requires_grad and name not in ignored]
        is_single = self._cap is None and sum(p.nbytes for p in trained) <= SINGLE_BUCKET_BYTES
        cap = 25 if is_single else self._cap  # DDP's default, which limits the first bucket too if it is given
        self._ddp_kwargs |= {"gradient_as_bucket_view": view, "bucket_cap_mb": cap}
        return super()._setup_model(model)

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning's method registers hooks only on CUDA. On other devices, it would silently train densely.
        assert isinstance(self.model, DistributedDataParallel)
        state = register_comm_hook(
            self.model,
            self.sparsifier,
            self._options,
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
            per_layer_stats=self.per_layer_stats,
        )
        self._begin_fit(state)
        state.pending_gradients.step_receivers.append(weak_method(self._after_any_step))

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        # In manual optimization, Lightning prepares DDP for each backward without calling DDP's forward.
        if self.state is not None:
            self.state.pending_gradients.expect_backward()
        super().pre_backward(closure_loss)
        if self.state is not None:
            self.state.pending_gradients.note_gradients()

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)  # exchanges the first buckets of a static graph
        # Lightning before 2.6 (pull request 21251) omits them in manual optimization.
        if (
            isinstance(self.model, DistributedDataParallel)
            and self.model.static_graph
            and not (self._pl_static_graph_delay_done or self._module.automatic_optimization)
        ):
            self.model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
            self._pl_static_graph_delay_done = True
        if self.state is not None:
            self.state.pending_gradients.backward_has_ended()

    @override
    def on_exception(self, exception: BaseException) -> None:
        of_torch = exception.args
        super().on_exception(exception)
        if exception.args != of_torch:  # Lightning advises its own strategy, which would send all gradients
            exception.args = (
                "The loss does not depend on all parameters. If this is intended, set find_unused_parameters=True: "
                f"strategy={type(self).__name__}(find_unused_parameters=True, …), or a name such as "
                "'ddp_hardthreshold_find_unused_parameters_true'.",
            )

    @override
    def teardown(self) -> None:
        if self.state is not None:
            self.state.close()
        super().teardown()
