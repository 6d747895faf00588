"""Gathering the state of all workers for a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.checkpointing.content import FOLDER, UNSENT, empty_content, warn_of_incomplete
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.state.saved_state import unsent_norm
from lightning_sparse.engine.state.snapshot import Snapshot, Tensors, copied
from lightning_sparse.exchange import Workers
from lightning_sparse.exchange.sharded_tensors import like_parameter, whole, write_folder

CHUNK_BYTES = 2**24
"""Size of the chunks in which rank 0 receives tensors; rank 0 needs four times as much memory."""
OPTIMIZERS = "optimizers"
"""The kind of a worker's own tensors that holds optimizer states as nested dicts."""


def collect(
    averager: Averager,
    workers: Workers,
    kinds: Sequence[str],
    *,
    is_mean: bool = False,
    why_not: str | None = None,
    folder: Path | None = None,
    extra: Mapping[str, Any] | None = None,
    optimizers: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the content of a checkpoint, without its seal, on rank 0; None on other ranks.

    Collective, unless ``why_not`` is given or no kinds of a model that is not sharded.

    In one file rank 0 needs the memory of the content, and beside it four times ``CHUNK_BYTES`` or the largest tensor.

    Args:
        averager: this rank's.
        workers: the group in which state is gathered.
        kinds: of the workers' own tensors to keep.
        is_mean: whether to keep the workers' mean of these tensors instead of each.
        why_not: why the content has no tensors of workers; None to save them.
        folder: the checkpoint's folder, if all ranks write tensors there; None gathers them into one file.
        extra: further plain values of this rank.
        optimizers: this rank's optimizer states by their place, of distributed tensors.
    """
    replica = averager.replica
    content = empty_content(averager.kind, workers.num_workers, replica.num_workers, why_not)
    if why_not is not None and averager.kind == "drifts":
        return content if workers.rank == replica.rank == 0 else None
    snapshot = averager.snapshot(workers if why_not is None else None)
    content |= {"numbers": snapshot.numbers, "histories": replica.gather_objects_to_first(snapshot.history)}
    if why_not is None:
        extras = {**(snapshot.extra if "weights" in kinds else {}), **(extra or {})}
        if averager.kind == "drifts":
            of_workers = workers.gather_objects_to_first(copied(extras))
            content["extras"] = replica.gather_objects_to_first(of_workers) if workers.rank == 0 else []
        kept = {kind: held for kind, held in snapshot.own.items() if kind in kinds}
        own: dict[str, Any] = _laid_out(averager, kept)
        own |= {OPTIMIZERS: optimizers} if optimizers else {}
        shared = _laid_out(averager, snapshot.shared)
        if folder is not None:
            content |= {"has_folder": True, "unsent_norm": _unsent_norm_of_all(averager, workers, kept)}
            content["shared"] = {kind: {} for kind in shared}
            write_folder({"shared": shared, str(workers.rank): own}, folder / FOLDER)
        else:
            content["shared"] = _whole_on_first(shared, replica)
            content["workers"] = _gathered(own, workers, replica, is_mean=is_mean) if own else []
            content["unsent_norm"] = _unsent_norm(averager.kind, content["workers"])
    return content if workers.rank == replica.rank == 0 else None


def collect_here(averagers: Sequence[Averager]) -> dict[str, Any]:
    """Return the content of a checkpoint of workers that are all in this process."""
    snapshots: list[Snapshot] = [averager.snapshot() for averager in averagers]
    content = empty_content(averagers[0].kind, len(averagers), 1, None)
    content |= {"numbers": snapshots[0].numbers, "histories": [snapshots[0].history]}
    content["workers"] = [copied(snapshot.own) for snapshot in snapshots]
    content["unsent_norm"] = _unsent_norm(averagers[0].kind, content["workers"])
    return content


def collect_without_workers(kind: str, world_size: int, why: str) -> dict[str, Any]:
    """Return the content of a checkpoint that is saved where no worker lives any more, as after a fit by spawn."""
    warn_of_incomplete(kind, why, "mean of the workers'")
    return empty_content(kind, world_size, 1, why)


def _laid_out(averager: Averager, tensors: Tensors) -> Tensors:
    """Return flat parts as parts of tensors that are sharded like their parameters."""
    parameters = averager.parameters
    return {
        kind: {name: like_parameter(parameters.get(name, flat), flat) for name, flat in of_kind.items()}
        for kind, of_kind in tensors.items()
    }


def _whole_on_first(tensors: Tensors, replica: Workers) -> dict[str, Any]:
    """Return whole copies on a replica's first rank, one tensor at a time, and no tensors on others."""
    found: dict[str, Any] = {}
    for kind, name, entry in _entries(tensors):
        full = whole(entry)
        found.setdefault(kind, {})
        if replica.rank == 0:
            found[kind][name] = _flat(copied(full))
    return found


def _gathered(own: Mapping[str, Any], workers: Workers, replica: Workers, *, is_mean: bool) -> list[dict[str, Any]]:
    """Return every worker's tensors whole on rank 0, or one entry with their mean; an empty list on other ranks."""
    of_workers: list[dict[str, Any]] = [{} for _ in range(1 if is_mean else workers.num_workers)]
    for chunk in _chunks(own):
        full = [whole(entry) for _, _, entry in chunk]
        if replica.rank != 0:
            continue
        parts = [_mean_on_first(full, workers)] if is_mean else workers.gather_objects_to_first(copied(full))
        for of_worker, entries in zip(of_workers, parts if workers.rank == 0 else [], strict=False):
            for (kind, name, _), entry in zip(chunk, entries, strict=True):
                of_worker.setdefault(kind, {})[name] = _flat(entry)
    return of_workers if workers.rank == replica.rank == 0 else []


def _flat(entry: Any) -> Any:
    return entry.flatten() if isinstance(entry, Tensor) else entry


def _entries(tree: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for kind, of_kind in tree.items():
        for name, entry in of_kind.items():
            yield kind, name, entry


def _chunks(tree: Mapping[str, Mapping[str, Any]]) -> Iterator[list[tuple[str, str, Any]]]:
    """Yield chunks of entries. All workers yield the same chunks, as their parameters have the same sizes."""
    chunk: list[tuple[str, str, Any]] = []
    num_bytes = 0
    for kind, name, entry in _entries(tree):
        size = entry.nbytes if isinstance(entry, Tensor) else CHUNK_BYTES
        if chunk and num_bytes + size > CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append((kind, name, entry))
        num_bytes += size
    if chunk:
        yield chunk


def _mean_on_first(tensors: Sequence[Tensor], workers: Workers) -> list[Tensor]:
    """Return the workers' mean of each tensor on the CPU of the first worker; an empty list elsewhere. Collective."""
    # One tensor for all sums: messages hold on to theirs for a while.
    room = torch.empty(max(tensor.numel() for tensor in tensors), dtype=torch.float64, device=tensors[0].device)
    means = []
    for tensor in tensors:
        total = room[: tensor.numel()].copy_(tensor.flatten())
        workers.sum_on_first(total)
        if workers.rank == 0:
            means.append(total.div_(workers.num_workers).to("cpu", tensor.dtype, copy=True))
    return means


def _unsent_norm(kind: str, of_workers: Sequence[Mapping[str, Any]]) -> float | None:
    """Return sqrt((1/n) Σ_i ‖e_i‖²) of unsent values by worker, whole; None of none."""
    return unsent_norm([held[UNSENT[kind]] for held in of_workers if held.get(UNSENT[kind])])


def _unsent_norm_of_all(averager: Averager, workers: Workers, own: Tensors) -> float | None:
    """Return the same of all ranks' parts. Collective: all ranks."""
    unsent = own.get(UNSENT[averager.kind])
    device = next(iter(averager.parameters.values())).device
    square = (unsent_norm([unsent]) or 0.0) ** 2 if unsent else 0.0
    of_replica = averager.replica.gather_numbers([square, float(bool(unsent))], device).sum(0).tolist()
    square, has_unsent = workers.gather_numbers(of_replica, device).sum(0).tolist()
    return sqrt(square / workers.num_workers) if has_unsent else None


def mean_of(of_workers: Sequence[Any]) -> Any:
    """Return the mean of nested containers: of floating-point tensors over the workers that have them.

    Every other value is the first worker's that has it. A layer may have trained on some workers only.
    """
    first = of_workers[0]
    if isinstance(first, Tensor):
        if not (first.is_floating_point() or first.is_complex()):
            return first
        wide = torch.complex128 if first.is_complex() else torch.float64
        same = [tensor for tensor in of_workers if isinstance(tensor, Tensor) and tensor.shape == first.shape]
        return (torch.stack([tensor.to(wide) for tensor in same]).sum(0) / len(same)).to(first.dtype)
    if isinstance(first, Mapping):
        held = [entry for entry in of_workers if isinstance(entry, Mapping)]
        names = dict.fromkeys(name for entry in held for name in entry)
        return {name: mean_of([entry[name] for entry in held if name in entry]) for name in names}
    if isinstance(first, (list, tuple)):
        return type(first)(mean_of(list(entries)) for entries in zip(*of_workers, strict=False))
    return first
