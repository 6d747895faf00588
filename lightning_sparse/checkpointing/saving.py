"""Collecting the state of all workers for a checkpoint.

A worker that raised an exception or got a signal may be alone, so workers first wait for each other at a
``SaveBarrier``. Without all of them the checkpoint has no tensors of workers and says why.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sparse.checkpointing.content import (
    FOLDER,
    OPTIMIZERS,
    SHARED,
    WorkerState,
    empty_content,
    warn_of_incomplete,
)
from lightning_sparse.drift.model_averager import SparseModelAverager
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.snapshot import Tensors, copied
from lightning_sparse.exchange.sharded_tensors import full_tensors, sharded_like, write_folder
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.gradients.ddp_averager import DDPGradientAverager
from lightning_sparse.gradients.shard_averager import ShardGradientAverager

_T = TypeVar("_T")
CHUNK_BYTES = 2**23
"""Size of the chunks in which rank 0 receives tensors; rank 0 needs four times as much memory."""


def run_together(
    averager: DDPGradientAverager | SparseModelAverager,
    timeout: timedelta | None,
    function: Callable[[Workers], _T],
    action: str,
) -> tuple[_T | None, str | None]:
    """Run a collective function on all workers; return its result and None.

    If a worker does not arrive in time, or if the function raises RuntimeError on rank 0, warn and return None and the
    reason. Other errors are raised, and on other ranks every error.

    Args:
        averager: this worker's averager.
        timeout: the process group's timeout, which limits the wait for others.
        function: gets the workers in a separate group.
        action: names the function in the reason if it fails.
    """
    barrier, why_not = averager.save_barrier, "it was saved in the middle of another save"
    if not barrier.is_saving:
        obstacles = averager.obstacles()
        status = {"progress": averager.progress, "obstacles": obstacles}
        patience = barrier.patience(timeout, is_exchanging=averager.is_exchanging)
        why_not = barrier.wait(status, patience) or next(iter(obstacles), "")
    if not why_not:
        barrier.is_saving = True  # a signal may request another save during this one
        try:
            return function(barrier.saving_workers()), None
        except BaseException as error:
            barrier.saving_failed()
            if averager.workers.rank != 0 or not isinstance(error, RuntimeError):
                raise
            # A worker died or left. A file without its state is still useful, like a file of plain DDP.
            why_not = f"{action} failed: {str(error).splitlines()[0]}"
        finally:
            barrier.is_saving = False
    warn_of_incomplete(averager.kind, why_not)
    return None, why_not


def collect_together(
    averager: DDPGradientAverager | SparseModelAverager,
    worker_state: WorkerState,
    timeout: timedelta | None,
    *,
    why_not: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a checkpoint file's content, complete on rank 0.

    Every worker should call this. If one does not, or if workers are not at the same step, the content has no tensors
    of workers. Later steps do not change its tensors, so you may write them during training.

    Args:
        averager: this worker's averager.
        worker_state: whether the content holds every worker's state, or only as much as one worker has.
        timeout: see ``run_together``.
        why_not: why no tensors can be saved, if a warning has given the reason already.
        extra: further plain values of this worker.
    """
    if why_not is None and kinds_of(averager, worker_state):
        collect_in_group = partial(collect, averager, worker_state=worker_state, extra=extra)
        content, why_not = run_together(averager, timeout, collect_in_group, "gathering them")
        if content is not None:
            return content
    return collect(averager, averager.workers, worker_state, why_not=why_not)


def kinds_of(averager: Averager, worker_state: WorkerState) -> tuple[str, ...]:
    """Return the kinds of a worker's tensors that a checkpoint contains."""
    if worker_state == "full" and averager.kind == "drifts":
        return "weights", "unsent"
    if worker_state == "small" and isinstance(averager, ShardGradientAverager):  # whose residuals are not averaged
        return ()
    return ("unsent",) if averager.may_have_unsent else ()


def collect(
    averager: Averager,
    workers: Workers,
    worker_state: WorkerState,
    *,
    why_not: str | None = None,
    folder: Path | None = None,
    extra: Mapping[str, Any] | None = None,
    optimizers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a checkpoint, complete on rank 0.

    Collective for the ranks of a replica, and for all ranks if tensors of workers are kept. For one file, rank 0 needs
    memory for the content plus four times ``CHUNK_BYTES`` or the largest tensor.

    Args:
        averager: this rank's.
        workers: the group in which state is gathered.
        worker_state: whether the content holds every worker's state, or only as much as one worker has.
        why_not: why the content has no tensors of workers; None to save them.
        folder: the checkpoint's folder, if all ranks write tensors there; None gathers them into one file.
        extra: further plain values of this rank, saved only with ``worker_state="full"``.
        optimizers: this rank's optimizer states by optimizer index, of distributed tensors.
    """
    replica, num_workers = averager.replica, workers.num_workers
    content = empty_content(averager.kind, why_not, num_workers, replica.num_workers)
    if why_not is not None and averager.kind == "drifts":
        return content
    kinds = kinds_of(averager, worker_state) if why_not is None else ()
    snapshot = averager.snapshot(workers if kinds else None)
    content |= {"numbers": snapshot.numbers, "histories": replica.gather_objects_to_first(snapshot.history)}
    if not kinds:
        if why_not is None and averager.may_have_unsent:
            content["why_incomplete"] = f"{worker_state=}"  # saves do not average residuals of shards
        return content
    kept = {kind: held for kind, held in snapshot.own.items() if kind in kinds}
    extras = {**snapshot.extra, **(extra or {})} if worker_state == "full" else {}
    has_unsent = any(bool(tensor.any()) for tensor in kept.get("unsent", {}).values())
    of_workers = workers.gather_objects_to_first((has_unsent, copied(extras)))
    if workers.rank == 0:
        of_ranks = replica.gather_objects_to_first(of_workers)
        content["has_unsent"] = any(has_any for of_rank in of_ranks for has_any, _ in of_rank)
        content["extras"] = [[of_worker for _, of_worker in of_rank] for of_rank in of_ranks]
    shared, own = _sharded(averager, snapshot.shared), _sharded(averager, kept)
    own |= {OPTIMIZERS: optimizers} if optimizers else {}
    if folder is not None:
        content["shared"] = {kind: {} for kind in shared}
        content["in_folder"] = True
        write_folder({SHARED: shared, str(workers.rank): own}, folder / FOLDER)
    else:
        if workers.rank == 0:
            content["shared"] = next(iter(_gathered(shared, Workers(None, 0, 1), replica)), {})
        if own and worker_state == "small" and replica.num_workers == 1:
            content["workers"] = [
                {kind: _mean_on_first(of_kind, workers) for kind, of_kind in full_tensors(own).items()}
            ]
        elif own:
            content["workers"] = _gathered(own, workers, replica)
    return content


def _sharded(averager: Averager, tensors: Tensors) -> dict[str, Any]:
    """Return flat parts as tensors that are sharded like their parameters."""
    parameters = averager.parameters
    return {
        kind: {name: sharded_like(flat, parameters.get(name, flat)) for name, flat in of_kind.items()}
        for kind, of_kind in tensors.items()
    }


def _gathered(own: Mapping[str, Any], workers: Workers, replica: Workers) -> list[dict[str, Any]]:
    """Return every worker's whole tensors on rank 0, elsewhere []. Collective."""
    of_workers: list[dict[str, Any]] = [{} for _ in range(workers.num_workers)]
    entries = [((kind, name), entry) for kind, of_kind in own.items() for name, entry in of_kind.items()]
    ends = accumulate(getattr(entry, "nbytes", CHUNK_BYTES) for _, entry in entries)
    # Workers with equal parameters have equal chunks.
    for _, chunk in groupby(zip(ends, entries, strict=True), lambda placed: placed[0] // CHUNK_BYTES):
        full = full_tensors(dict(entry for _, entry in chunk), on_cpu=True)
        parts = workers.gather_objects_to_first(copied(full)) if replica.rank == 0 else []
        for of_worker, part in zip(of_workers, parts, strict=False):
            for (kind, name), entry in part.items():
                of_worker.setdefault(kind, {})[name] = entry.flatten() if isinstance(entry, Tensor) else entry
    return of_workers if workers.rank == replica.rank == 0 else []


def _mean_on_first(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """Return the workers' flat mean of each tensor on the CPU of rank 0. Collective."""
    # One buffer for all sums, because messages keep their tensors in memory for a while.
    largest = max(tensors.values(), key=Tensor.numel)
    buffer = torch.empty(largest.numel(), dtype=torch.float64, device=largest.device)
    means = {}
    for key, tensor in tensors.items():
        total = buffer[: tensor.numel()].copy_(tensor.flatten())
        workers.all_reduce(total).wait()
        if workers.rank == 0:
            means[key] = total.div_(workers.num_workers).to("cpu", tensor.dtype, copy=True)
    return means
