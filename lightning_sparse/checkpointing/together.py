"""Saving with all workers, if they all come: one that raised an exception or got a signal may be alone."""

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_sparse.checkpointing.collecting import collect
from lightning_sparse.checkpointing.content import warn_of_incomplete
from lightning_sparse.checkpointing.options import AnyCheckpointOptions
from lightning_sparse.engine.averager import Averager
from lightning_sparse.exchange import SaveBarrier

NO_WORKER = "it is saved by a process that was no worker, and their optimizers and number of steps are not in it either"
"""Of a file that a notebook writes after a fit."""
PATIENCE = 300.0
"""Seconds that a worker waits for all others to come and save. Validation may keep one that long."""
PATIENCE_IN_TROUBLE = 15.0
"""The same while an exception or a signal is handled: likely nobody else comes, and who stops a job soon kills it."""


def why_not_together(averager: Averager, barrier: SaveBarrier, patience: float, obstacles: Sequence[str]) -> str | None:
    """Meet all workers to save, if they come; return None, or why not. The same on all that came.

    Args:
        averager: this worker's.
        barrier: where they meet.
        patience: seconds to wait for others.
        obstacles: why this worker cannot save, beside the averager's own; workers must agree on them.
    """
    if averager.is_exchanging or is_in_trouble():
        patience = shortened(patience)
    obstacles = [*obstacles, *averager.obstacles()]
    why_not = barrier.wait({"progress": averager.progress, "obstacles": obstacles}, patience)
    return why_not or next(iter(obstacles), None)


def collect_together(
    averager: Averager,
    barrier: SaveBarrier,
    options: AnyCheckpointOptions,
    patience: float,
    *,
    obstacles: Sequence[str] = (),
    why_not: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the content of a file on rank 0, None elsewhere. Every worker should call this.

    If one does not, or if workers are not at the same step, the content has no tensors of workers and says why; nobody
    waits for longer than their patience. Later steps do not change the content's tensors, so they may be written while
    training goes on.

    Args:
        averager: this worker's.
        barrier: where workers meet.
        options: what to keep.
        patience: seconds to wait for others.
        obstacles: why this worker cannot save, beside the averager's own.
        why_not: why no tensors can be saved, if that has been said already.
        extra: further plain values of this worker.
    """
    kinds = options.kinds if averager.has_own_state else ()
    workers = averager.workers
    if why_not is None and averager.has_own_state and (kinds or extra):
        why_not = _WHILE_SAVING if barrier.is_saving else why_not_together(averager, barrier, patience, obstacles)
        if why_not is None:
            barrier.is_saving = True  # a signal may ask for another save in the middle of this one
            try:
                apart = barrier.workers_apart() if workers.num_workers > 1 else workers
                return collect(averager, apart, kinds, is_mean=options.saves_mean, extra=extra)
            except RuntimeError as error:
                if workers.rank != 0:
                    raise
                # A worker died or left. The file is worth having without residuals, as plain DDP's is.
                barrier.give_up_apart()
                why_not = f"gathering them failed: {str(error).splitlines()[0]}"
            finally:
                barrier.is_saving = False
        if workers.rank == 0:
            warn_of_incomplete(averager.kind, why_not, "mean of the workers'")
    return collect(averager, workers, (), why_not=why_not)


_WHILE_SAVING = "it was saved in the middle of another save"


def is_launcher_process(strategy: Strategy) -> bool:
    """Whether this is the process that has workers forked or spawned, as a notebook's, and none of them.

    Lightning brings it weights, metrics and the best checkpoint's path, and neither optimizers nor the number of steps.
    """
    return isinstance(strategy.launcher, _MultiProcessingLauncher) and not dist.is_initialized()


def patience_of(timeout: timedelta | None) -> float:
    """Returns the seconds to wait for others, no more than a process group's timeout."""
    return PATIENCE if timeout is None else min(PATIENCE, timeout.total_seconds())


def shortened(patience: float) -> float:
    """Returns the seconds to wait for others where they may not come, out of those usual."""
    return min(patience, PATIENCE_IN_TROUBLE)


def is_in_trouble() -> bool:
    """Whether an exception is being handled, or a signal by Lightning."""
    if sys.exc_info()[0] is not None:
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).endswith("signal_connector"):
            return True
    return False
