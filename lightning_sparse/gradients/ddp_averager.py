"""The state of DDP's communication hook, which passes DDP's buckets to the engine.

DDP passes buckets one by one, in the same order on all workers, during backward. Each bucket gets its residual and is
added to the engine. In the hook of the last bucket, the averages, times the loss scale S, replace the gradients in all
buckets. Changes of residuals are pending until an optimizer steps on the gradients, and are rolled back otherwise
(``lightning_sparse.gradients.pending_gradients``).
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.optimizer_steps import weak_method
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.engine.residuals import ResidualMemory
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.engine.warmup import warm_up_steps
from lightning_sparse.exchange.save_barrier import SaveBarrier
from lightning_sparse.gradients.buckets import AverageFuture, DDPBuckets
from lightning_sparse.gradients.parameter_use import ParameterUse
from lightning_sparse.gradients.pending_gradients import PendingGradients
from lightning_sparse.selection.bucket import FlatBucket, clip_norm
from lightning_sparse.sparsifiers.protocol import Sparsifier


class DDPGradientAverager(Averager):
    """The state of the communication hook, which a worker keeps between steps.

    Args:
        sparsifier: selects coordinates. Copied, so that calibration does not change the caller's sparsifier.
        options: the options of the exchange.
        parameter_names: the names of all parameters in DDP's buckets.
        group: DDP's process group.
        loss_scale: returns S of the running step as a tensor of one element, or None if losses are not scaled.
        per_layer_stats: whether `StepStats` holds the statistics of every layer.
        allows_unused_parameters: whether a backward may leave parameters out.
        is_static_graph: whether DDP has ``static_graph=True``.

    Attributes:
        residuals: unsent values.
        pending_gradients: commits changes of residuals or rolls them back.
        save_barrier: lets workers wait for each other before rank 0 saves a checkpoint.
    """

    kind = "gradients"
    _committed_numbers: dict[str, Any]
    _advice_for_others = "give residuals.load_state_dict the mean of all files' residuals"

    def __init__(
        self,
        sparsifier: Sparsifier,
        options: GradientOptions,
        parameter_names: Mapping[Tensor, str],
        *,
        group: dist.ProcessGroup | None = None,
        loss_scale: Callable[[], Tensor | None] = lambda: None,
        per_layer_stats: bool = False,
        allows_unused_parameters: bool = False,
        is_static_graph: bool = False,
    ) -> None:
        engine = Engine(sparsifier, options, group=group, per_layer_stats=per_layer_stats)
        super().__init__(engine, parameter_names.values())
        self.options = options
        # A layer that is frozen later stays in DDP.
        self._parameters = {name: weight for weight, name in parameter_names.items() if weight.requires_grad}
        self.residuals = ResidualMemory(self._parameters)
        self.save_barrier = SaveBarrier(self.workers)
        self._loss_scale = loss_scale
        self._has_reported_dropped = False
        self.pending_gradients = PendingGradients(parameter_names, self.residuals)
        self._ddp_buckets = DDPBuckets(parameter_names, is_static_graph=is_static_graph)
        self._use = ParameterUse(parameter_names, allows_unused=allows_unused_parameters)
        self._is_moving = self._is_closed = False
        self._scale: Tensor | None = None
        self._buckets: list[FlatBucket] = []
        self._unused: set[str] = set()
        self._bucket_names: list[tuple[str, ...]] = []
        self._note_numbers()
        self.pending_gradients.step_receivers.append(weak_method(self._count_step))
        self.pending_gradients.on_drop = weak_method(self._report_dropped)

    def warm_up(self, *, is_scaled: bool) -> None:
        """Compile the kernels of all steps; see ``lightning_sparse.engine.warmup``."""
        warm_up_steps(self._engine, self._parameters, is_scaled=is_scaled, has_unused=self._use.allows_unused)

    def close(self) -> None:
        """Detach this state from the model, which must not run another backward."""
        self._is_closed = True
        self.pending_gradients.close()
        self.save_barrier.close()
        self._use.close()

    @property
    def is_consistent(self) -> bool:
        """Whether the committed state belongs to the current weights."""
        return self.pending_gradients.is_consistent and not self._is_moving

    def commit(self) -> None:
        """Commit all exchanged gradients, as an optimizer's step does.

        Call it after each update if no ``torch.optim.Optimizer`` steps on the module's own parameters (you update
        weights by hand, or an optimizer holds copies of them). If you copy gradients, clear them and use the copies
        later, call it after each backward, before ``zero_grad``.
        """
        self.pending_gradients.commit_all()

    @property
    def may_have_unsent(self) -> bool:  # type: ignore[override]
        """Whether any residual can be nonzero on any worker; false within the first step."""
        return self.pending_gradients.progress > 0 or self.residuals.was_loaded or not self.is_consistent

    def reset(self) -> None:
        """Return to the state before the first step."""
        self.pending_gradients.roll_back_all()
        super().reset()
        self._ddp_buckets.regroup_as([])
        self._bucket_names = []
        self._note_numbers()

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from those parts of a snapshot that fit the model, after ``reset``. Not collective."""
        super().restore(snapshot)
        if snapshot.history.get("exchange"):  # missing with another number of workers, where sums differ anyway
            self._bucket_names = [tuple(names) for names in snapshot.numbers.get("layout", [])]
            self._ddp_buckets.regroup_as(self._bucket_names)
        self._note_numbers()

    @property
    def progress(self) -> object:
        """A number that is equal on workers after the same optimizer steps."""
        return self.pending_gradients.progress

    def obstacles(self) -> list[str]:
        """Return reasons why residuals cannot be saved now."""
        return [] if self.is_consistent else ["an optimizer's step or a new layout of residuals was not complete"]

    def receive(self, grad_bucket: GradBucket) -> AverageFuture:
        """Exchange a bucket of DDP; return the future of its average. Collective."""
        ddp_bucket, future = self._ddp_buckets.read(grad_bucket)
        if ddp_bucket.index == 0:
            self._begin_step()
        for bucket in self._ddp_buckets.ready(ddp_bucket):
            self._prepare(bucket)
            self._buckets.append(bucket)
            clip = self.options.local_clip_norm
            if clip is None and not self.sparsifier.needs_survey:
                self._engine.add(bucket)
            elif bucket.is_last:
                if clip is not None:
                    clip_norm(self._buckets, clip)
                self._engine.add_all(self._buckets)
        if ddp_bucket.is_last:
            self._end_step()
        return future

    def _begin_step(self) -> None:
        if self._is_closed:
            raise RuntimeError("The state was closed, so it would not see the optimizer's steps. Wrap the model anew.")
        if self.is_exchanging:  # an exception interrupted the last backward
            self.pending_gradients.roll_back_all()
        self.pending_gradients.begin_exchange()
        # Exchanges without an optimizer step do not count, as after a resume.
        self._engine.next_step = self._committed_numbers["next_step"]
        self.is_exchanging = True
        self._use.forget_old()
        self._engine.begin()
        self._buckets, self._unused, self._scale = [], set(), self._loss_scale()

    def _prepare(self, bucket: FlatBucket) -> None:
        """Give a bucket its residual, and leave unused gradients out."""
        layout, gradient = bucket.layout, bucket.gradient
        if self._bucket_names and self._bucket_names[bucket.index : bucket.index + 1] != [layout.names]:
            self._engine.exchange.buffers.forget()  # buckets have other sizes
        self._is_moving = True  # a signal may save a checkpoint while residuals are copied to a new layout
        bucket.residual = self.residuals.begin_bucket(bucket.index, layout, gradient)
        self._is_moving = False
        unused = self._use.set_aside(layout, gradient)
        self._unused.update(unused)
        bucket.left_out, bucket.loss_scale = list(unused.values()), self._scale
        bucket.notes = self._use.marks(layout, gradient.device)

    def _end_step(self) -> None:
        buckets, self._buckets = self._buckets, []
        layouts = [bucket.layout for bucket in buckets]
        used_by_any, with_old = self._use.end(layouts, self._engine.finish())
        extra_bytes = 0
        for bucket in buckets:
            if self._scale is not None:
                bucket.average.mul_(self._scale)
            extra_bytes += self._use.add_old(self.workers, with_old, bucket.layout, bucket.average)
            if bucket.average is not bucket.gradient:
                bucket.gradient.copy_(bucket.average)
            self._use.put_back(used_by_any, bucket.layout, bucket.gradient)
        self._use.forget_old()
        self._bucket_names = [layout.names for layout in layouts]
        for bucket in buckets:
            self.residuals.keep(bucket.index, self._unused)
        self.is_exchanging = False
        self.pending_gradients.end_exchange(set().union(*self._bucket_names) - self._unused, used_by_any)
        self._ddp_buckets.resolve_futures()
        is_calibration = self._engine.calibrator.is_running
        self._engine.end_step(extra_bytes=extra_bytes, counts=False)  # it counts once an optimizer steps
        if is_calibration:  # a dropped backward calibrates too
            self._committed_numbers |= self._engine.given_calibrator.state_dict()

    def _note_numbers(self) -> None:
        """Store the numbers of the committed step for checkpoints."""
        self._committed_numbers = {**self._engine.numbers(), "layout": self._bucket_names}

    def _count_step(self, names: set[str]) -> None:
        self._engine.calibrator.confirm(names)
        self._note_numbers()

    def _report_dropped(self, names: set[str]) -> None:
        has_overflowed = self._scale is not None and self.last_step is not None and self.last_step.non_finite
        is_search = self.pending_gradients.is_stepping  # LBFGS drops all gradients of a step except the last
        if not (has_overflowed or self._has_reported_dropped or self.is_exchanging or is_search):
            self._has_reported_dropped = True
            listed = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            rank_zero_info(
                f"lightning_sparse: gradients were dropped before an optimizer stepped on them ({listed}): they do not "
                "change weights, as under DDP. If you store gradients and use them later, call state.commit() after "
                "each backward. This message appears once; see docs/guides/reliability.md."
            )
