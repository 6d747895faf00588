"""One step of sparsified data-parallel training, as DDP's communication hook.

DDP calls :func:`sparse_hook` once per bucket, in the same order on all workers, while backward runs. For each bucket:

1. compensate    p = e + g / S, in the residual's memory
2. select        the sparsifier picks coordinates of p, none of parameters that this backward did not reach
3. keep          e' = p − out stays in the residual
4. exchange      g' = S · (1/n) Σ_i out_i replaces g in the bucket

and in the last bucket's hook:

5. account       one look at all headers: the numbers of the step, calibration, the choice of exchange for the next
6. take back     if a worker found a non-finite value and losses are scaled, the optimizer will skip this step: the
                 residuals become what they were before anything was sent
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._version import __version__
from lightning_sparse.exchange import Exchange, ExchangeMode, require_agreement
from lightning_sparse.options import ErrorFeedback, ExchangeOptions
from lightning_sparse.parameter_use import ParameterUse, without
from lightning_sparse.payload import PayloadFormat, ValueDtype, round_to_wire, wire_dtype
from lightning_sparse.residual import ResidualMemory, compensate, keep_rest, rescale, take_back
from lightning_sparse.sparsifiers import HardThreshold, LayerLayout, Selection, Sparsifier
from lightning_sparse.step_stats import SELECTED, StepStats, header_fields, local_header, squared_norm, step_stats
from lightning_sparse.threshold_rules import ThresholdCalibration

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket

LearningRates = Mapping[Tensor, float]


@dataclass
class _Bucket:
    """One bucket on its way through a step; the fields without a default are there from the start."""

    index: int
    layout: LayerLayout
    gradient: Tensor
    future: torch.futures.Future[Tensor]
    residual: Tensor
    unused: list[tuple[int, int]]
    selection: Selection | None = None
    headers: Tensor | None = None
    payload_bytes: int = 0


class SparseState:
    """Everything that one worker keeps between steps; the state of :func:`sparse_hook`.

    Args:
        sparsifier: chooses what is sent. Copied, so that calibration never changes the caller's own.
        options: how gradients are exchanged.
        parameter_names: the name of every parameter that DDP may bring.
        group: DDP's process group.
        loss_scale: returns S of the running step as a tensor of one element, or None where losses are not scaled.
        learning_rates: returns the learning rate of every optimized parameter in the running step; called only with
            ``error_feedback="learning_rate"``.
        per_layer_stats: whether :class:`StepStats` holds numbers of every layer.
        allows_unused_parameters: whether a backward may leave parameters out.

    Attributes:
        sparsifier: this state's own sparsifier; a calibrated λ is in it once calibration has ended.
        residuals: what was not sent so far.
        calibration: the running calibration, None when there is none.
        last_step: the numbers of the last exchange, None before the first.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        options: ExchangeOptions,
        parameter_names: Mapping[Tensor, str],
        *,
        group: dist.ProcessGroup | None = None,
        loss_scale: Callable[[], Tensor | None] = lambda: None,
        learning_rates: Callable[[], LearningRates] = dict,
        per_layer_stats: bool = False,
        allows_unused_parameters: bool = False,
    ) -> None:
        self.sparsifier = copy.deepcopy(sparsifier)
        self.options = options
        self.per_layer_stats = per_layer_stats
        self.residuals = ResidualMemory()
        self.calibration: ThresholdCalibration | None = None
        self.last_step: StepStats | None = None
        if isinstance(self.sparsifier, HardThreshold) and self.sparsifier.density is not None:
            self.calibration = ThresholdCalibration(self.sparsifier.density, self.sparsifier.calibration_steps)
        self._parameter_names = dict(parameter_names)
        self._exchange = Exchange(options.exchange, group)
        self._is_rank_zero = dist.get_rank(group) == 0
        self._loss_scale = loss_scale
        self._learning_rates = learning_rates
        self._last_learning_rates: dict[str, float] = {}
        self._layouts: dict[tuple[int, ...], LayerLayout] = {}
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._use = ParameterUse(parameter_names) if allows_unused_parameters else None
        # Of the running step:
        self._scale: Tensor | None = None
        self._rescaling: dict[str, float] = {}
        self._buckets: list[_Bucket] = []

    def subscribe(self, receiver: Callable[[StepStats], None]) -> None:
        """Calls the receiver with the numbers of every step from now on, at the end of its exchange.

        It runs inside backward, on every worker: it must be quick and must not communicate.
        """
        self._subscribers.append(receiver)

    def close(self) -> None:
        """Takes off the model what this state put there, apart from the hook itself, which DDP cannot remove."""
        if self._use is not None:
            self._use.close()

    def receive(self, grad_bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Takes a bucket through the step, or puts it aside where clipping must see all of them first. Collective."""
        if grad_bucket.index() == 0:
            self._begin_step()
        bucket = self._open(grad_bucket)
        self._buckets.append(bucket)
        if self.options.local_clip_norm is None:
            self._process(bucket)
        elif grad_bucket.is_last():
            clip_gradient([one.gradient for one in self._buckets], self.options.local_clip_norm, self._scale)
            for one in self._buckets:
                self._process(one)
        if grad_bucket.is_last():
            self._end_step()
        return bucket.future

    def _begin_step(self) -> None:
        self._buckets.clear()  # an exception may have broken off the last backward in its middle
        self._scale = self._loss_scale()
        if self.options.error_feedback == "learning_rate":
            self._rescaling = self._learning_rate_ratios()

    def _open(self, grad_bucket: GradBucket) -> _Bucket:
        gradient = grad_bucket.buffer()
        parameters = grad_bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            names = tuple(self._parameter_names[parameter] for parameter in parameters)
            self._layouts[key] = LayerLayout(names, tuple(parameter.numel() for parameter in parameters))
        layout = self._layouts[key]
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if gradient.device.type == "cpu" else [gradient.device]
        )
        residual = self.residuals.bucket(grad_bucket.index(), layout, gradient)
        unused = [] if self._use is None else self._use.unused_spans(layout)
        for start, end in unused:
            gradient[start:end].zero_()
        return _Bucket(grad_bucket.index(), layout, gradient, future, residual, unused)

    def _process(self, bucket: _Bucket) -> None:
        gradient, residual, layout = bucket.gradient, bucket.residual, bucket.layout
        squared_gradient_norm = None
        if self.calibration is not None:
            squared_gradient_norm = squared_norm(gradient)
            if self._scale is not None:
                squared_gradient_norm /= self._scale.double().square()

        # 1. compensate
        rescale(residual, layout, self._rescaling)
        compensated = compensate(residual, gradient, self._scale)

        # 2. select
        selected = without(self.sparsifier.select(compensated, layout), bucket.unused, layout.num_elements)
        travels_as = wire_dtype(self.options.value_dtype, compensated.dtype)
        sent = Selection(selected.indices, round_to_wire(selected.values, travels_as))

        # 3. keep the rest
        keep_rest(compensated, *sent)
        if self.options.error_feedback == "none":
            residual.zero_()

        # 4. exchange
        header = local_header(
            sent, residual, layout, squared_gradient_norm=squared_gradient_norm, per_layer=self.per_layer_stats
        )
        payload_format = PayloadFormat(layout.num_elements, header_fields(layout, self.per_layer_stats), travels_as)
        average = gradient if gradient.dtype == residual.dtype else torch.empty_like(residual)
        exchanged = self._exchange.average(bucket.index, payload_format, sent, header, average)
        if self._scale is not None:
            average.mul_(self._scale)
        if average is not gradient:
            gradient.copy_(average)
        bucket.selection, bucket.headers, bucket.payload_bytes = sent, exchanged.headers, exchanged.payload_bytes
        bucket.future.set_result(gradient)

    def _end_step(self) -> None:
        buckets, self._buckets = self._buckets, []
        if self._use is not None:
            self._use.forget()

        # 5. account, with the step's only wait for the device
        headers = _to_cpu([bucket.headers for bucket in buckets if bucket.headers is not None])
        stats = step_stats(
            0 if self.last_step is None else self.last_step.step + 1,
            [bucket.layout for bucket in buckets],
            headers,
            payload_bytes=sum(bucket.payload_bytes for bucket in buckets),
            dense_bytes=sum(bucket.gradient.numel() * bucket.gradient.itemsize for bucket in buckets),
            threshold=self.sparsifier.current_threshold,
        )
        self.last_step = stats
        for bucket, header in zip(buckets, headers, strict=True):
            self._exchange.remember(bucket.index, bucket.layout.num_elements, int(header[:, SELECTED].max()))
        if self.calibration is not None:
            self.calibration.observe(stats.squared_gradient_norm)
            if self.calibration.is_complete:
                self._fix_threshold(self.calibration, stats.num_elements)

        # 6. take back
        if self._scale is not None and stats.non_finite and self.options.error_feedback != "none":
            for bucket in buckets:
                if bucket.selection is not None:
                    take_back(bucket.residual, *bucket.selection)

        for receiver in self._subscribers:
            receiver(stats)

    def _fix_threshold(self, calibration: ThresholdCalibration, num_elements: int) -> None:
        assert isinstance(self.sparsifier, HardThreshold)
        threshold = calibration.threshold(num_elements)
        self.sparsifier.fix_threshold(threshold)
        self.calibration = None
        if self._is_rank_zero:
            rank_zero_info(
                f"lightning_sparse: calibrated the threshold to {threshold:.6g} over {calibration.measured_steps} "
                f"steps, for a density of {calibration.density:g} of {num_elements:,} elements."
            )

    def _learning_rate_ratios(self) -> dict[str, float]:
        """lr_{t-1} / lr_t by parameter name. A step with lr 0 has no ratio: it leaves residuals and lr_{t-1} alone."""
        ratios: dict[str, float] = {}
        for parameter, learning_rate in self._learning_rates().items():
            name = self._parameter_names.get(parameter)
            if name is None or learning_rate == 0:
                continue
            ratios[name] = self._last_learning_rates.get(name, learning_rate) / learning_rate
            self._last_learning_rates[name] = learning_rate
        return ratios


def sparse_hook(state: SparseState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook: exchanges one bucket sparsely. Collective; DDP calls it.

    Returns:
        A future of the bucket's buffer holding S · (1/n) Σ_i out_i, the same bits on every worker.
    """
    return state.receive(bucket)


def register_comm_hook(
    ddp_module: torch.nn.Module,
    sparsifier: Sparsifier,
    *,
    error_feedback: ErrorFeedback = "gradient",
    local_clip_norm: float | None = None,
    value_dtype: ValueDtype = "float32",
    exchange: ExchangeMode = "auto",
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    per_layer_stats: bool = False,
) -> SparseState:
    """Makes a DistributedDataParallel module exchange its gradients sparsely. Collective: every worker calls this.

    For the Lightning Trainer use a strategy instead; this is for plain PyTorch and for Fabric.

    Args:
        ddp_module: a ``DistributedDataParallel``, or what ``Fabric(strategy="ddp").setup(...)`` returns. It must not
            have a communication hook yet.
        sparsifier: chooses what is sent; copied.
        error_feedback: see :class:`ExchangeOptions`.
        local_clip_norm: see :class:`ExchangeOptions`.
        value_dtype: see :class:`ExchangeOptions`.
        exchange: see :class:`ExchangeOptions`.
        optimizer: the optimizer or optimizers, whose learning rates ``error_feedback="learning_rate"`` needs.
        grad_scaler: the scaler that scales the losses, if one does, so that thresholds and residuals are in units of
            the unscaled gradient.
        per_layer_stats: whether to report density and error of every layer; two numbers a layer travel with each step.

    Returns:
        The state, whose ``last_step`` holds the numbers of the last step.

    Raises:
        TypeError: not a DistributedDataParallel module, or not a sparsifier.
        ValueError: an invalid option, or ``error_feedback="learning_rate"`` without an optimizer.
        RuntimeError: workers disagree on the settings (on every worker), or DDP cannot hand out its buckets.
    """
    options = ExchangeOptions(error_feedback, local_clip_norm, value_dtype, exchange)
    if error_feedback == "learning_rate" and optimizer is None:
        raise ValueError('error_feedback="learning_rate" needs the learning rates. Pass optimizer=… as well.')
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or [])
    return attach(
        ddp_module,
        sparsifier,
        options,
        loss_scale=lambda: loss_scale_of(grad_scaler),
        learning_rates=lambda: learning_rates_of(optimizers),
        per_layer_stats=per_layer_stats,
    )


def attach(
    ddp_module: torch.nn.Module,
    sparsifier: Sparsifier,
    options: ExchangeOptions,
    *,
    loss_scale: Callable[[], Tensor | None],
    learning_rates: Callable[[], LearningRates],
    per_layer_stats: bool,
) -> SparseState:
    """Registers :func:`sparse_hook` with a fresh state; :func:`register_comm_hook` for callers that look up S late."""
    ddp_module = getattr(ddp_module, "_forward_module", ddp_module)  # Fabric's wrapper
    if not isinstance(ddp_module, DistributedDataParallel):
        raise TypeError(
            f"Expected a torch.nn.parallel.DistributedDataParallel module, got {type(ddp_module).__name__}. "
            "Wrap the model first: DistributedDataParallel(model)."
        )
    if not isinstance(sparsifier, Sparsifier):
        raise TypeError(f"Expected a sparsifier such as HardThreshold(), got {sparsifier!r}.")
    if getattr(ddp_module, "_use_python_reducer", False):
        raise RuntimeError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", with which DDP has no buckets to exchange. '
            'Set it to "ddp_optimizer" (the default) before the model is wrapped.'
        )
    group = ddp_module.process_group
    require_agreement(
        sparsifier.settings()
        | asdict(options)
        | {"per_layer_stats": per_layer_stats, "lightning_sparse": __version__, "torch": str(torch.__version__)},
        group,
    )
    # A compiled module adds a prefix to all names; without it residuals fit the uncompiled module too.
    names = {parameter: name.replace("_orig_mod.", "") for name, parameter in ddp_module.module.named_parameters()}
    state = SparseState(
        sparsifier,
        options,
        names,
        group=group,
        loss_scale=loss_scale,
        learning_rates=learning_rates,
        per_layer_stats=per_layer_stats,
        allows_unused_parameters=bool(ddp_module.find_unused_parameters or ddp_module.static_graph),
    )
    ddp_module.register_comm_hook(state, sparse_hook)
    return state


def learning_rates_of(optimizers: Iterable[Optimizer]) -> dict[Tensor, float]:
    """Returns the learning rate in force for every parameter of the optimizers."""
    return {
        parameter: float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def loss_scale_of(grad_scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """Returns the scaler's S as a tensor of one element, None without a scaler or with one that is disabled."""
    # The public get_scale() waits for the device. A disabled scaler has no such tensor, a new one has None.
    return getattr(grad_scaler, "_scale", None)


def clip_gradient(gradients: Sequence[Tensor], max_norm: float, loss_scale: Tensor | None = None) -> None:
    """Scales the gradients in place so that their common norm is at most max_norm, as torch's clip_grad_norm_ does.

    Args:
        gradients: the parts of one gradient.
        max_norm: in units of the unscaled gradient.
        loss_scale: S by which the gradients are still multiplied; None is 1.
    """
    norm = torch.stack([squared_norm(part) for part in gradients]).sum().sqrt()
    if loss_scale is not None:
        norm = norm / loss_scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in gradients:
        part.mul_(factor)


def _to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to the CPU in one transfer."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
