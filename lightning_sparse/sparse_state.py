"""One step of sparsified data-parallel training, and everything that a worker keeps from one step to the next.

DDP's communication hook brings the buckets one by one, in the same order on all workers, while backward runs. For each:

1. compensate    p = e + g / S, in the residual's memory
2. select        the sparsifier picks coordinates of p, none of parameters that this backward did not reach
3. keep          e' = p − out stays in the residual
4. exchange      out sets off; in the hook of the last bucket, g' = S · (1/n) Σ_i out_i replaces g in all of them

and then, still in the hook of the last bucket:

5. account       from the headers of all workers: the numbers of the step, calibration

What this did is open until an optimizer steps on the gradient, and undone if none does (settlement.py).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from lightning_sparse.calibrator import Calibrator
from lightning_sparse.clipping import clip_gradient
from lightning_sparse.exchange import Buffers, Exchange, Meeting, Workers
from lightning_sparse.extraction import BucketGradient, Extraction
from lightning_sparse.learning_rates import LastLearningRates
from lightning_sparse.options import ExchangeOptions
from lightning_sparse.parameter_use import ParameterUse
from lightning_sparse.payload import wire_dtype
from lightning_sparse.regrouping import BucketLike, Numbering, Regrouping
from lightning_sparse.residual import Residual, ResidualMemory, real_numel, require_strides, rescale
from lightning_sparse.settlement import Settlement
from lightning_sparse.sparsifiers import LayerLayout, Sparsifier
from lightning_sparse.step_stats import StepStats, header_fields, squared_norm, step_stats

LearningRates = Mapping[Tensor, float]


@dataclass
class _Bucket:
    """One bucket on its way through a step."""

    index: int
    layout: LayerLayout
    gradient: Tensor
    future: torch.futures.Future[Tensor]
    residual: Residual
    unused: dict[str, tuple[int, int]]
    is_last: bool
    average: Tensor


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
        settlement: decides what of it is part of training.
        meeting: where workers meet before one of them saves a checkpoint.
        last_step: the numbers of the last exchange, None before the first.
        is_exchanging: whether a backward has begun to exchange gradients and has not ended, or was broken off.
        is_saving: whether a checkpoint is collected.
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
        self.settlement = Settlement(parameter_names, self._settle, self._undo)
        self.last_step: StepStats | None = None
        # As text: what a sparsifier of the user's own is set with need not be something that a checkpoint can hold.
        self._settings = {name: repr(value) for name, value in sparsifier.settings().items()}
        self._calibrator = Calibrator(self.sparsifier, speaks=dist.get_rank(group) == 0)
        self._parameter_names = dict(parameter_names)
        # As of now: a layer frozen later on stays in DDP.
        self._parameters = {name: one for one, name in parameter_names.items() if one.requires_grad}
        self._strides = {name: one.stride() for name, one in self._parameters.items()}
        self.residuals = ResidualMemory(self._parameters, forgets=options.error_feedback == "none")
        self._exchange = Exchange(options.exchange, group)
        self.meeting = Meeting(self._exchange.workers)
        self._extraction = Extraction(
            self.sparsifier,
            num_slices=self._exchange.workers.num_workers if self._exchange.counts_slices else 0,
            per_layer=per_layer_stats,
            keeps_rest=options.error_feedback != "none",
        )
        self._averages = Buffers()
        self._loss_scale = loss_scale
        self._learning_rates = learning_rates
        self._rates = LastLearningRates()
        self._has_said_undone = False
        self._layouts: dict[tuple[int, ...], LayerLayout] = {}
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._use = ParameterUse(parameter_names) if allows_unused_parameters else None
        self._numbering = Numbering(len(self.parameter_sizes)) if is_static_graph else None
        self._regrouping: Regrouping | None = None
        self._bucket_names: list[tuple[str, ...]] = []
        # Of the running step:
        self.is_exchanging = self.is_saving = self._is_moving = False
        self._scale: Tensor | None = None
        self._rescaling: dict[str, float] = {}
        self._buckets: list[_Bucket] = []
        self._note_shared_state()
        self.settlement.on_step.append(self._note_shared_state)

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
        self.settlement.close()
        self.meeting.close()
        if self._use is not None:
            self._use.close()

    @property
    def workers(self) -> Workers:
        """The workers of this state's exchange."""
        return self._exchange.workers

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """Elements of every parameter's residual, by name: two for each of a complex parameter."""
        return {name: real_numel(one) for name, one in self._parameters.items()}

    @property
    def is_certain(self) -> bool:
        """Whether what is settled belongs to the weights as they are now.

        Not in the middle of an optimizer's step. In the middle of a backward it does: that of the last whole step.
        """
        return self.settlement.is_certain and not self._is_moving

    def commit(self) -> None:
        """Makes all that backwards have exchanged so far part of training, as an optimizer's step does.

        For loops in which no ``torch.optim.Optimizer`` steps on the module's own parameters (weights updated by hand,
        an optimizer with copies of them): call it after each update. And for those that keep gradients aside, drop
        them and use them all the same: call it after each backward, before ``zero_grad``.
        """
        self.settlement.settle_all()

    @property
    def has_residuals(self) -> bool:
        """Whether any can be other than zero, as far as all workers know alike."""
        return self.settlement.progress > 0 or self.residuals.was_loaded

    def reset(self) -> None:
        """Returns to the state before the first step: no residuals, no history, a calibration that begins anew."""
        self.settlement.undo_all()
        self.residuals.load_state_dict({})
        self._calibrator.begin()
        self._exchange.load_state_dict({"selected": [], "slices": []})
        self._rates.load_state_dict({})
        self._regrouping = None
        self._bucket_names = []
        self.last_step = None
        self._note_shared_state()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that this worker needs to go on exactly, for loops without a Trainer: save one file a worker.

        Plain containers and copies, which ``torch.load(weights_only=True)`` reads. Not collective.
        """
        return {
            "version": 2,
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
        self.reset()
        self.load_shared_state(saved["shared"], same_world_size=True)
        self.residuals.load_state_dict(saved["residuals"])

    def shared_state(self) -> dict[str, Any]:
        """Returns what was the same on every worker when an optimizer stepped last, in plain containers."""
        return self._shared | {"learning_rates": self._rates.state_dict()}

    def _note_shared_state(self) -> None:
        last_step = None if self.last_step is None else asdict(replace(self.last_step, layers={}))
        self._shared = {
            "settings": self._settings,
            **self._calibrator.state_dict(),
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
        else:
            self._calibrator.load_state_dict(saved)
        self._rates.load_state_dict(saved["learning_rates"])
        if saved["last_step"] is not None:
            self.last_step = StepStats(**saved["last_step"])
        if same_world_size:
            self._exchange.load_state_dict(saved["exchange"])
            if saved["layout"]:
                most_steps = 1 if self._numbering is None else 2  # a static graph has one step more
                self._regrouping = Regrouping(saved["layout"], self._parameter_names, most_steps)
        self._note_shared_state()

    def receive(self, grad_bucket: BucketLike) -> torch.futures.Future[Tensor]:
        """Takes one of DDP's buckets through the step. Collective: every worker calls this for the same bucket."""
        if self._numbering is not None and not self._numbering.is_over:
            grad_bucket = self._numbering.numbered(grad_bucket)
        if self._regrouping is None or self._regrouping.is_over:
            return self._receive(grad_bucket)
        return self._regrouping.receive(grad_bucket, self._receive)

    def _receive(self, grad_bucket: BucketLike) -> torch.futures.Future[Tensor]:
        """Takes a bucket through the step, or puts it aside where something must be known of all of them first."""
        if grad_bucket.index() == 0:
            self._begin_step()
        self._is_moving = True
        bucket = self._open(grad_bucket)
        self._is_moving = False
        self._buckets.append(bucket)
        if self._use is not None:
            bucket.unused = self._use.set_aside(bucket.layout, bucket.gradient)
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
        if self.is_exchanging:  # an exception has broken off the last backward in its middle
            self._buckets.clear()
            self.settlement.undo_all()
            self.residuals.abandon()
            self._rates.undo_all()
        self.settlement.begin_exchange()
        self.is_exchanging = True
        if self._use is not None:
            self._use.begin()
        self._exchange.begin()
        self._scale = self._loss_scale()
        if self.options.error_feedback == "learning_rate":
            named = ((self._parameter_names.get(one), rate) for one, rate in self._learning_rates().items())
            self._rescaling = self._rates.ratios({name: rate for name, rate in named if name is not None})

    def _open(self, grad_bucket: BucketLike) -> _Bucket:
        gradient = grad_bucket.buffer()
        parameters = grad_bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            names = tuple(self._parameter_names[parameter] for parameter in parameters)
            self._layouts[key] = LayerLayout(names, tuple(map(real_numel, parameters)))
        layout = self._layouts[key]
        require_strides(layout.names, parameters, self._strides)
        assert gradient.numel() == layout.num_elements, f"{gradient.numel()=} of {layout}"
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if gradient.device.type == "cpu" else [gradient.device]
        )
        residual = self.residuals.bucket(grad_bucket.index(), layout, gradient)
        return _Bucket(
            grad_bucket.index(), layout, gradient, future, residual, {}, grad_bucket.is_last(), average=gradient
        )

    def _process(self, bucket: _Bucket) -> None:
        gradient, residual, layout = bucket.gradient, bucket.residual, bucket.layout
        dtype = residual.after.dtype
        squared_gradient_norm = None
        if self._calibrator.is_running:
            squared_gradient_norm = squared_norm(gradient)
            if self._scale is not None:
                squared_gradient_norm /= self._scale.double().square()
        if gradient.dtype != dtype:  # the average does not fit it
            bucket.average = self._averages.take(bucket.index, gradient.numel(), dtype, gradient.device)
        shipment = self._exchange.open(
            bucket.index,
            layout.num_elements,
            wire_dtype(self.options.value_dtype, dtype),
            header_fields(layout, self.per_layer_stats) + (0 if self._use is None else 2 * len(layout.names)),
            bucket.average,
            is_last=bucket.is_last,
        )

        # 1. compensate, 2. select, 3. keep the rest
        if any(factor != 1.0 for factor in self._rescaling.values()):
            residual = Residual(
                rescaled := rescale(residual.after.copy_(residual.before), layout, self._rescaling), rescaled
            )
        numbers = self._extraction.fill(
            BucketGradient(layout, gradient, residual, list(bucket.unused.values()), self._scale), shipment
        )

        # 4. exchange: it begins
        header = numbers.header(squared_gradient_norm, gradient.device)
        if self._use is not None:
            header = torch.cat([header, self._use.marks(layout, gradient.device)])
        self._exchange.start(shipment, header, is_last=bucket.is_last)

    def _end_step(self) -> None:
        buckets, self._buckets = self._buckets, []

        # 4. exchange: it ends, with the step's only wait for the device
        headers, payload_bytes = self._exchange.finish()
        layouts = [bucket.layout for bucket in buckets]
        used_by_any, with_old = {name for layout in layouts for name in layout.names}, set[str]()
        if self._use is not None:
            headers, used_by_any, with_old = self._use.end(layouts, headers)
        for bucket in buckets:
            if self._scale is not None:
                bucket.average.mul_(self._scale)
            if self._use is not None:
                payload_bytes += self._use.add_old(self.workers, with_old, bucket.layout, bucket.average)
            if bucket.average is not bucket.gradient:
                bucket.gradient.copy_(bucket.average)
            if self._use is not None:
                self._use.put_back(used_by_any, bucket.layout, bucket.gradient)

        # 5. account
        stats = step_stats(
            0 if self.last_step is None else self.last_step.step + 1,
            layouts,
            headers,
            payload_bytes=payload_bytes,
            dense_bytes=sum(bucket.gradient.numel() * bucket.gradient.itemsize for bucket in buckets),
            threshold=self.sparsifier.current_threshold,
        )
        self.last_step = stats
        self._bucket_names = [bucket.layout.names for bucket in buckets]
        self._calibrator.observe(stats)

        for bucket in buckets:
            self.residuals.keep(bucket.index, bucket.unused)
        unused = {name for bucket in buckets for name in bucket.unused}
        self._rates.settle(unused - self.settlement.open_names)
        self.is_exchanging = False
        names = {name for layout in layouts for name in layout.names}
        self.settlement.end_exchange(names - unused, used_by_any)

        for bucket in buckets:
            bucket.future.set_result(bucket.gradient)
        for receiver in self._subscribers:
            receiver(stats)

    def _settle(self, names: set[str]) -> None:
        self.residuals.settle(names)
        self._rates.settle(names)

    def _undo(self, names: set[str]) -> None:
        self.residuals.undo(names)
        self._rates.undo(names)
        has_overflowed = self._scale is not None and self.last_step is not None and self.last_step.non_finite
        if not (has_overflowed or self._has_said_undone or self.is_exchanging):
            self._has_said_undone = True
            listed = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            rank_zero_info(
                f"lightning_sparse: gradients were dropped before an optimizer stepped on them ({listed}): they do not "
                "train, as under DDP. If you keep gradients aside and use them later, call state.commit() after each "
                "backward. Said once; see docs/reliability.md."
            )
