"""One step of sparsified data-parallel training, and everything that a worker keeps from one step to the next.

DDP's communication hook brings the buckets one by one, in the same order on all workers, while backward runs. For each:

1. compensate    p = e + g / S, in the residual's memory
2. select        the sparsifier picks coordinates of p, none of parameters that this backward did not reach
3. keep          e' = p − out stays in the residual
4. exchange      out sets off; in the hook of the last bucket, g' = S · (1/n) Σ_i out_i replaces g in all of them

and then, still in the hook of the last bucket:

5. account       from the headers of all workers: the numbers of the step, calibration
6. take back     if a worker found a non-finite value and losses are scaled, the optimizer will skip this step: the
                 residuals become what they were before anything was sent
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from lightning_sparse.exchange import Exchange, Workers
from lightning_sparse.extraction import BucketGradient, Extracted, Extraction
from lightning_sparse.options import ExchangeOptions
from lightning_sparse.parameter_use import ParameterUse
from lightning_sparse.payload import wire_dtype
from lightning_sparse.regrouping import BucketLike, Numbering, Regrouping
from lightning_sparse.residual import ResidualMemory, rescale, take_back
from lightning_sparse.sparsifiers import HardThreshold, LayerLayout, Sparsifier
from lightning_sparse.step_stats import StepStats, header_fields, squared_norm, step_stats
from lightning_sparse.threshold_rules import ThresholdCalibration

LearningRates = Mapping[Tensor, float]


@dataclass
class _Bucket:
    """One bucket on its way through a step."""

    index: int
    layout: LayerLayout
    gradient: Tensor
    future: torch.futures.Future[Tensor]
    residual: Tensor
    unused: list[tuple[int, int]]
    is_last: bool
    average: Tensor
    extracted: Extracted | None = None


class SparseState:
    """Everything that one worker keeps between steps; the state of the communication hook.

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
        is_static_graph: whether DDP was told so.

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
        is_static_graph: bool = False,
    ) -> None:
        self.sparsifier = copy.deepcopy(sparsifier)
        self.options = options
        self.per_layer_stats = per_layer_stats
        self.residuals = ResidualMemory()
        self.calibration: ThresholdCalibration | None = None
        self.last_step: StepStats | None = None
        # As text: what a sparsifier of the user's own is set with need not be something that a checkpoint can hold.
        self._settings = {name: repr(value) for name, value in sparsifier.settings().items()}
        if isinstance(self.sparsifier, HardThreshold) and self.sparsifier.density is not None:
            self.calibration = ThresholdCalibration(self.sparsifier.density, self.sparsifier.calibration_steps)
        self._parameter_names = dict(parameter_names)
        self._exchange = Exchange(options.exchange, group)
        self._extraction = Extraction(
            self.sparsifier,
            num_slices=self._exchange.workers.num_workers if self._exchange.counts_slices else 0,
            per_layer=per_layer_stats,
            keeps_rest=options.error_feedback != "none",
        )
        self._averages: dict[int, Tensor] = {}
        self._is_rank_zero = dist.get_rank(group) == 0
        self._loss_scale = loss_scale
        self._learning_rates = learning_rates
        self._last_learning_rates: dict[str, float] = {}
        self._layouts: dict[tuple[int, ...], LayerLayout] = {}
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._use = ParameterUse(parameter_names) if allows_unused_parameters else None
        self._numbering = Numbering(len(self.parameter_sizes)) if is_static_graph else None
        self._regrouping: Regrouping | None = None
        self._bucket_names: list[tuple[str, ...]] = []
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
        """Takes off the model what this state put there, apart from the hook itself, which DDP cannot remove.

        No backward may follow.
        """
        self._exchange.close()
        if self._use is not None:
            self._use.close()

    @property
    def workers(self) -> Workers:
        """The workers of this state's exchange."""
        return self._exchange.workers

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """Elements of every parameter that has a residual, by name."""
        return {name: one.numel() for one, name in self._parameter_names.items() if one.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """Returns all that this worker needs to go on exactly, for loops without a Trainer: save one file a worker.

        Plain containers and copies, which ``torch.load(weights_only=True)`` reads. Not collective.
        """
        return {
            "world_size": self.workers.num_workers,
            "rank": self.workers.rank,
            "shared": self.shared_state(),
            "residuals": self.residuals.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state_dict` returned on the worker of the same rank, before the first step.

        Raises:
            RuntimeError: it is of another rank or of another number of workers. (For that, average the residuals of all
                files: their mean on every worker keeps the pending update.)
        """
        here = {"world_size": self.workers.num_workers, "rank": self.workers.rank}
        if {name: saved[name] for name in here} != here:
            raise RuntimeError(
                f"This state is of rank {saved['rank']} of {saved['world_size']} workers, and this is rank "
                f"{here['rank']} of {here['world_size']}. Load the file of the same rank, or give "
                "residuals.load_state_dict the mean of all files' residuals."
            )
        self.load_shared_state(saved["shared"], same_world_size=True)
        self.residuals.load_state_dict(saved["residuals"])

    def shared_state(self) -> dict[str, Any]:
        """Returns all that is the same on every worker and changes from step to step, in plain containers."""
        threshold = self.sparsifier.threshold if isinstance(self.sparsifier, HardThreshold) else None
        last_step = None if self.last_step is None else asdict(replace(self.last_step, layers={}))
        return {
            "settings": self._settings,
            "threshold": threshold,
            "calibration": None if self.calibration is None else self.calibration.state_dict(),
            "learning_rates": dict(self._last_learning_rates),
            "last_step": last_step,
            "exchange": self._exchange.state_dict(),
            "layout": [list(names) for names in self._bucket_names],
        }

    def load_shared_state(self, saved: Mapping[str, Any], *, same_world_size: bool) -> None:
        """Continues from what :meth:`shared_state` returned in another run.

        λ and its calibration continue where the sparsifier has the settings of then; with others those of now hold.

        Args:
            saved: the other run's.
            same_world_size: whether it had as many workers; if not, the history of its exchange says nothing.
        """
        if saved["settings"] != self._settings:
            rank_zero_info(
                f"lightning_sparse: the sparsifier is not the one of the checkpoint: {self._settings} instead of "
                f"{saved['settings']}. That of now is used; with a density, calibration begins anew."
            )
        elif isinstance(self.sparsifier, HardThreshold) and saved["threshold"] is not None:
            self.sparsifier.fix_threshold(saved["threshold"])
            self.calibration = None
        elif self.calibration is not None and saved["calibration"] is not None:
            self.calibration.load_state_dict(saved["calibration"])
        self._last_learning_rates = dict(saved["learning_rates"])
        if saved["last_step"] is not None:
            self.last_step = StepStats(**saved["last_step"])
        if same_world_size:
            self._exchange.load_state_dict(saved["exchange"])
            if saved["layout"]:
                self._regrouping = Regrouping(saved["layout"], self._parameter_names)

    def receive(self, grad_bucket: BucketLike) -> torch.futures.Future[Tensor]:
        """Takes one of DDP's buckets through the step. Collective: every worker calls this for the same bucket."""
        if self._numbering is not None and not self._numbering.is_over:
            grad_bucket = self._numbering.numbered(grad_bucket)
        if self._regrouping is None or self._regrouping.is_over:
            return self._receive(grad_bucket)
        return self._regrouping.receive(grad_bucket, self._receive)

    def _receive(self, grad_bucket: BucketLike) -> torch.futures.Future[Tensor]:
        """Takes a bucket through the step, or puts it aside where clipping must see all of them first."""
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
        self._exchange.begin()
        self._scale = self._loss_scale()
        if self.options.error_feedback == "learning_rate":
            self._rescaling = self._learning_rate_ratios()

    def _open(self, grad_bucket: BucketLike) -> _Bucket:
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
        return _Bucket(
            grad_bucket.index(), layout, gradient, future, residual, unused, grad_bucket.is_last(), average=gradient
        )

    def _process(self, bucket: _Bucket) -> None:
        gradient, residual, layout = bucket.gradient, bucket.residual, bucket.layout
        squared_gradient_norm = None
        if self.calibration is not None:
            squared_gradient_norm = squared_norm(gradient)
            if self._scale is not None:
                squared_gradient_norm /= self._scale.double().square()
        bucket.average = gradient if gradient.dtype == residual.dtype else self._average_buffer(bucket)
        shipment = self._exchange.open(
            bucket.index,
            layout.num_elements,
            wire_dtype(self.options.value_dtype, residual.dtype),
            header_fields(layout, self.per_layer_stats),
            bucket.average,
            is_last=bucket.is_last,
        )

        # 1. compensate, 2. select, 3. keep the rest
        rescale(residual, layout, self._rescaling)
        bucket.extracted = self._extraction.fill(
            BucketGradient(layout, gradient, residual, bucket.unused, self._scale), shipment
        )

        # 4. exchange: it begins
        header = bucket.extracted.numbers.header(squared_gradient_norm, residual.device)
        self._exchange.start(shipment, header, is_last=bucket.is_last)

    def _end_step(self) -> None:
        buckets, self._buckets = self._buckets, []
        if self._use is not None:
            self._use.forget()

        # 4. exchange: it ends, with the step's only wait for the device
        headers, payload_bytes = self._exchange.finish()
        for bucket in buckets:
            if self._scale is not None:
                bucket.average.mul_(self._scale)
            if bucket.average is not bucket.gradient:
                bucket.gradient.copy_(bucket.average)

        # 5. account
        stats = step_stats(
            0 if self.last_step is None else self.last_step.step + 1,
            [bucket.layout for bucket in buckets],
            headers,
            payload_bytes=payload_bytes,
            dense_bytes=sum(bucket.gradient.numel() * bucket.gradient.itemsize for bucket in buckets),
            threshold=self.sparsifier.current_threshold,
        )
        self.last_step = stats
        self._bucket_names = [bucket.layout.names for bucket in buckets]
        if self.calibration is not None:
            self.calibration.observe(stats.squared_gradient_norm)
            if self.calibration.is_complete:
                self._fix_threshold(self.calibration, stats.num_elements)

        # 6. take back
        if self._scale is not None and stats.non_finite and self.options.error_feedback != "none":
            for bucket in buckets:
                if bucket.extracted is not None:
                    take_back(bucket.residual, *bucket.extracted.sent())

        for bucket in buckets:
            bucket.future.set_result(bucket.gradient)
        for receiver in self._subscribers:
            receiver(stats)

    def _average_buffer(self, bucket: _Bucket) -> Tensor:
        """Memory for an average that does not fit the gradient's own dtype."""
        held = self._averages.get(bucket.index)
        if held is None or held.shape != bucket.residual.shape or held.dtype != bucket.residual.dtype:
            held = self._averages[bucket.index] = torch.empty_like(bucket.residual)
        return held

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


def clip_gradient(gradients: Sequence[Tensor], max_norm: float, loss_scale: Tensor | None = None) -> None:
    """Scales the gradients in place so that their common norm is at most max_norm, as torch's clip_grad_norm_ does.

    Of a gradient whose norm is no number or infinite nothing is left but what is no number itself. (torch makes NaN of
    all of it, which would be sent, and take with it all that was held back.)

    Args:
        gradients: the parts of one gradient.
        max_norm: in units of the unscaled gradient.
        loss_scale: S by which the gradients are still multiplied; None is 1.
    """
    norm = torch.stack([squared_norm(part) for part in gradients]).sum().sqrt()
    if loss_scale is not None:
        norm = norm / loss_scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
    for part in gradients:
        part.mul_(factor)
