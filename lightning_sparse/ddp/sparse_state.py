"""What a DDP module's communication hook keeps, and the way of DDP's buckets through it.

DDP brings the buckets one by one, in the same order on all workers, while backward runs. Each gets its residual and
goes to the engine; in the hook of the last one the averages, times S, replace the gradients in all of them. What this
did is open until an optimizer steps on the gradient, and undone if none does (``lightning_sparse.ddp.settlement``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from lightning_sparse.ddp.arrival import BucketLayouts
from lightning_sparse.ddp.clipping import clip_gradient
from lightning_sparse.ddp.learning_rates import LearningRates
from lightning_sparse.ddp.notices import say_dropped
from lightning_sparse.ddp.options import ExchangeOptions
from lightning_sparse.ddp.parameter_use import EveryParameterUsed, ParameterUse
from lightning_sparse.ddp.regrouping import BucketLike
from lightning_sparse.ddp.running_step import Averaged, RunningStep
from lightning_sparse.ddp.settled_state import SettledState
from lightning_sparse.ddp.settlement import Settlement
from lightning_sparse.engine import Engine, FlatBucket
from lightning_sparse.engine.memory import ResidualMemory
from lightning_sparse.engine.memory_format import real_numel
from lightning_sparse.engine.notices import warn_of_forgotten
from lightning_sparse.engine.rehearsal import rehearse_steps
from lightning_sparse.engine.saved_state import unsent_norm
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.engine.weak_call import weakly
from lightning_sparse.exchange import Meeting, Workers
from lightning_sparse.sparsifiers import Sparsifier


class SparseState(SettledState):
    """Everything that one worker keeps between steps; the state of the communication hook.

    Args:
        sparsifier: chooses what is sent. Copied, so that calibration never changes the caller's own.
        options: how gradients are exchanged.
        parameter_names: the name of every parameter that DDP may bring.
        group: DDP's process group.
        loss_scale: returns S of the running step as a tensor of one element, or None where losses are not scaled.
        learning_rates: returns the learning rate of every optimized parameter in the running step; called only with
            ``error_feedback="learning_rate"``.
        per_layer_stats: whether `StepStats` holds numbers of every layer.
        allows_unused_parameters: whether a backward may leave parameters out.
        is_static_graph: whether DDP was told so.

    Attributes:
        residuals: what was not sent so far.
        settlement: decides what of it is part of training.
        meeting: where workers meet before one of them saves a checkpoint.
    """

    kind = "gradients"
    _advice_for_others = "give residuals.load_state_dict the mean of all files' residuals"

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
        super().__init__(
            Engine(
                sparsifier,
                group=group,
                exchange=options.exchange,
                link_gbit_s=options.link_gbit_s,
                value_dtype=options.value_dtype,
                per_layer_stats=per_layer_stats,
                keeps_rest=options.error_feedback != "none",
                holds_density=options.holds_density,
            ),
            parameter_names,
            sum(one.requires_grad for one in parameter_names) if is_static_graph else None,
        )
        self.options = options
        self.settlement = Settlement(parameter_names, weakly(self._settle), weakly(self._undo))
        # As of now: a layer frozen later on stays in DDP.
        self._parameters = {name: one for one, name in parameter_names.items() if one.requires_grad}
        self.residuals = ResidualMemory(self._parameters, forgets=options.error_feedback == "none")
        self.meeting = Meeting(self.workers)
        self._loss_scale = loss_scale
        self._learning_rates = learning_rates
        self._has_said_undone = False
        self._layouts = BucketLayouts(parameter_names)
        self._use = ParameterUse(parameter_names) if allows_unused_parameters else EveryParameterUsed()
        self._is_exchanging = self._is_moving = self._is_idle = False
        self._step = RunningStep()
        self.settlement.on_step.append(weakly(self._count_step))

    def rehearse(self, *, is_scaled: bool) -> None:
        """Builds the kernels that steps will need; see ``lightning_sparse.engine.rehearse_steps``."""
        rehearse_steps(self._engine, self._parameters, is_scaled=is_scaled, has_unused=self._use.allows_unused)

    def close(self) -> None:
        """Takes off the model what this state put there, apart from the hook itself, which DDP cannot remove.

        No backward may follow.
        """
        self._engine.close()
        self.settlement.close()
        self.meeting.close()
        self._use.close()

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by name that DDP reduces."""
        return self._parameters

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """By name, how many elements the parameter's residual has; a complex parameter's has two for each."""
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
    def is_exchanging(self) -> bool:
        """Whether a backward has begun to exchange gradients and has not ended, or was broken off."""
        return self._is_exchanging

    @property
    def has_own_state(self) -> bool:
        """Whether any residual can differ from zero, as far as all workers know; within the first step none does."""
        return self.settlement.progress > 0 or self.residuals.was_loaded or not self.is_certain

    def reset(self) -> None:
        """Returns to the state before the first step: no residuals, no history, a calibration that begins anew."""
        self.settlement.undo_all()
        self.residuals.load_state_dict({})
        self._engine.reset()
        self._rates.load_state_dict({})
        self._arrival.begin_anew()
        self._bucket_names = []
        self._note_numbers()

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return the state as of the last optimizer step. Not collective."""
        snapshot = self._settled_snapshot()
        # Of all parameters for a checkpoint: in the first step workers may have laid out different buckets already.
        residuals = self.residuals.layers() if workers is None else self.residuals.all_layers()
        snapshot.own["residual"] = dict(sorted(residuals.items()))
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Replace all state by a snapshot of another run, as far as it fits the model. Not collective."""
        self.reset()
        self._restore_numbers(snapshot)
        residuals = snapshot.own.get("residual", {})
        if self.residuals.forgets:
            warn_of_forgotten(unsent_norm([residuals]))
        else:
            self.residuals.load_state_dict(residuals)

    @property
    def progress(self) -> object:
        """Where training is, as optimizer steps have it."""
        return self.settlement.progress

    def obstacles(self) -> list[str]:
        """Return why residuals cannot be saved at this moment."""
        return [] if self.is_certain else ["the workers are in the middle of an optimizer's step"]

    def receive(self, grad_bucket: BucketLike) -> Averaged:
        """Takes one of DDP's buckets through the step. Collective: every worker calls this for the same bucket."""
        return self._arrival.receive(grad_bucket, self._receive)

    def _receive(self, grad_bucket: BucketLike) -> Averaged:
        """Takes a bucket through the step, or puts it aside where something must be known of all of them first."""
        if grad_bucket.index() == 0:
            self._begin_step()
        self._is_moving = True
        bucket = self._open(grad_bucket)
        self._is_moving = False
        future = self._step.put(bucket)
        if self.options.local_clip_norm is None and not self._engine.needs_survey:
            self._rates.rescale(bucket)
            self._engine.add(bucket)
        elif bucket.is_last:
            self._send_all()
        if bucket.is_last:
            self._end_step()
        return future

    def _begin_step(self) -> None:
        if self._is_exchanging:  # an exception has broken off the last backward in its middle
            self.settlement.undo_all()
            self.residuals.abandon()
            self._rates.undo_all()
        self.settlement.begin_exchange()
        # Not counted is what no optimizer has stepped on, as in a run that resumes. What is open differs by worker.
        self._engine.next_step = self._numbers["next_step"]
        self._is_exchanging = True
        self._use.forget_old()
        self._engine.begin()
        self._step = RunningStep(self._loss_scale())
        if self.options.error_feedback == "learning_rate":
            self._rates.begin(self._learning_rates())

    def _open(self, grad_bucket: BucketLike) -> FlatBucket:
        gradient = grad_bucket.buffer()
        layout, is_new = self._layouts.of(grad_bucket)
        if is_new:
            self._engine.forget_sizes()
        residual = self.residuals.bucket(grad_bucket.index(), layout, gradient)
        if self._is_idle:  # the buffer holds zeros, and no gradients of before
            unused = {name: (start, end) for name, start, end in layout.spans()}
        else:
            unused = self._use.set_aside(layout, gradient)
        self._step.unused.update(unused)
        return FlatBucket(
            grad_bucket.index(),
            layout,
            gradient,
            residual,
            grad_bucket.is_last(),
            left_out=list(unused.values()),
            loss_scale=self._step.loss_scale,
            notes=self._use.marks(layout, gradient.device),
        )

    def _send_all(self) -> None:
        buckets = self._step.buckets
        if self.options.local_clip_norm is not None:
            clip_gradient([one.gradient for one in buckets], self.options.local_clip_norm, self._step.loss_scale)
        for bucket in buckets:
            self._rates.rescale(bucket)
        self._engine.survey(buckets)
        for bucket in buckets:
            self._engine.add(bucket)

    def _end_step(self) -> None:
        step = self._step
        layouts = [bucket.layout for bucket in step.buckets]
        used_by_any, with_old = self._use.end(layouts, self._engine.finish())
        more_bytes = 0
        for bucket in step.buckets:
            if step.loss_scale is not None:
                bucket.average.mul_(step.loss_scale)
            more_bytes += self._use.add_old(self.workers, with_old, bucket.layout, bucket.average)
            if bucket.average is not bucket.gradient:
                bucket.gradient.copy_(bucket.average)
            self._use.put_back(used_by_any, bucket.layout, bucket.gradient)
        self._use.forget_old()
        self._bucket_names = [layout.names for layout in layouts]
        for bucket in step.buckets:
            self.residuals.keep(bucket.index, step.unused)
        self._rates.settle(step.unused - self.settlement.open_names)
        self._is_exchanging = False
        self.settlement.end_exchange(set().union(*self._bucket_names) - step.unused, used_by_any)
        step.keep_promises()
        self._step = RunningStep(step.loss_scale)  # lets go of the buckets
        # It counts once an optimizer steps on it, of which an idle worker will see nothing.
        self._engine.account(more_bytes=more_bytes, counts=self._is_idle)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within it, buckets come of a worker that has no more batches; see ``lightning_sparse.ddp.join``."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    def _settle(self, names: set[str]) -> None:
        self.residuals.settle(names)
        self._rates.settle(names)

    def _undo(self, names: set[str]) -> None:
        self.residuals.undo(names)
        self._rates.undo(names)
        has_overflowed = self._step.loss_scale is not None and self.last_step is not None and self.last_step.non_finite
        is_search = self.settlement.is_stepping  # LBFGS drops all gradients of a step but the last, also without us
        if not (has_overflowed or self._has_said_undone or self._is_exchanging or is_search):
            self._has_said_undone = True
            say_dropped(names)
