"""Restoring averagers from a checkpoint, with messages about lost state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.checkpointing.content import (
    FOLDER,
    UNSENT,
    UNSENT_WORDS,
    own_content,
    say_changed_model,
    say_incomplete,
)
from lightning_sparse.checkpointing.options import AnyCheckpointOptions, OnWorldSizeChange
from lightning_sparse.checkpointing.sources import SHARED, FileSource, FolderSource, Source
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.snapshot import Snapshot, require_seal, warn_of_forgotten
from lightning_sparse.exchange import raised_together


def restore(
    averagers: Sequence[Averager],
    content: Any,
    options: AnyCheckpointOptions,
    *,
    path: Path | None = None,
    module: Any = None,
    optimizers: Sequence[Any] = (),
) -> dict[str, Any]:
    """Replace all state of this process's averagers by a checkpoint's. Collective: all ranks.

    Args:
        averagers: between two steps; one but for simulated workers.
        content: the result of ``collect``, from this strategy or another; None if the checkpoint has no such content.
        options: how to treat a checkpoint of another number of workers.
        path: of the checkpoint.
        module: the module of sharded optimizers.
        optimizers: sharded optimizers, whose states the content holds for each replica.

    Returns:
        This rank's ``extra`` of ``collect``; empty if the checkpoint is of another number of workers or ranks.

    Raises:
        RuntimeError: the content is damaged, of a newer version, or of another number of workers with
            ``on_world_size_change="error"``. On every rank, before anything was loaded.
    """
    first = averagers[0]
    kind, here = first.kind, first.workers.num_workers
    with raised_together():
        saved = own_content(content, kind)
        if saved is not None:
            require_seal(saved, but=_parts_of_others(saved, averagers))
            _require_world_size(saved["world_size"], here, options.on_world_size_change)
    for averager in averagers:
        averager.reset()
    if saved is None:
        return {}
    if saved["numbers"] is None:
        say_incomplete(kind, saved["why_incomplete"])
        return {}
    is_same = saved["world_size"] == here
    source = _source(saved, path, kind)
    if not is_same:
        _say_world_size(first, saved["world_size"], options.on_world_size_change)
    extra: dict[str, Any] = {}
    for averager in averagers:
        snapshot = Snapshot(saved["numbers"], _history(saved, averager, is_same=is_same))
        if source is not None:
            tells = averager is first
            kinds = saved["shared"].keys() if is_same else [name for name in saved["shared"] if name != "anchor"]
            snapshot.shared = {name: _parts(source, (SHARED, name), averager) for name in kinds}
            if is_same or options.on_world_size_change == "mean":
                snapshot.own = _own(source, saved, averager, is_same=is_same, tells=tells)
            extra = snapshot.extra = _extra(saved, averager) if is_same else {}
        averager.restore(snapshot)
        if source is not None and is_same and optimizers:
            source.load_optimizers(averager.workers.rank, module, optimizers)
    return extra


def _parts_of_others(saved: Mapping[str, Any], averagers: Sequence[Averager]) -> tuple[str, ...]:
    """Return the paths of tensors that only other processes load: no need to check n times the model."""
    count, own = averagers[0].workers.num_workers, {averager.workers.rank for averager in averagers}
    held = saved.get("workers")
    if saved.get("world_size") != count or not isinstance(held, list) or len(held) != count:
        return ()
    ranks = range(averagers[0].replica.num_workers)
    places = ["workers", *(f"extras/{rank}" for rank in ranks)]
    return tuple(f"{place}/{rank}" for place in places for rank in range(count) if rank not in own)


def _require_world_size(saved: int, now: int, on_world_size_change: OnWorldSizeChange) -> None:
    if saved != now and on_world_size_change == "error":
        raise RuntimeError(
            f"The checkpoint is of {saved} workers, this run has {now}, and on_world_size_change is 'error'. Start as "
            "many workers, or use on_world_size_change='mean', which keeps the pending update."
        )


def _say_world_size(averager: Averager, saved: int, on_world_size_change: OnWorldSizeChange) -> None:
    now = averager.workers.num_workers
    if averager.kind == "drifts":
        rank_zero_info(
            f"lightning_sparse: the number of workers is {now} instead of {saved}: all begin with the mean of the old "
            "weights as the anchor, and with the checkpoint's own optimizers."
        )
    else:
        is_mean = on_world_size_change == "mean"
        becomes = "each starts from the mean of the old residuals" if is_mean else "residuals start from zero"
        rank_zero_info(f"lightning_sparse: the number of workers is {now} instead of {saved}: {becomes}.")


def _source(saved: Mapping[str, Any], path: Path | None, kind: str) -> Source | None:
    """Return where tensors are; None, saying so, if there are none."""
    if saved["has_folder"]:
        # A file that was consolidated from a folder has no folder beside it.
        folder = None if path is None else path / FOLDER
        try:
            if folder is not None:
                return FolderSource(folder)
        except (FileNotFoundError, NotADirectoryError):
            pass
        starts = "Residuals start from zero; unsent values are lost."
        if kind == "drifts":
            starts = "All begin with the checkpoint's weights as the anchor; each worker's own state is lost."
        rank_zero_warn(f"lightning_sparse: the checkpoint's folder {folder or FOLDER} is missing. {starts}")
        return None
    has_steps = saved["numbers"]["last_step"] is not None
    if kind == "gradients" and not saved["workers"] and has_steps:
        say_incomplete(kind, saved["why_incomplete"] or "residual_checkpoint='none'")
    return FileSource(saved)


def _history(saved: Mapping[str, Any], averager: Averager, *, is_same: bool) -> dict[str, Any]:
    """Return what is known of the exchange if there were as many workers, and of the sparsifier for the same shards."""
    if saved["ranks"] != averager.replica.num_workers:
        return {}
    history: dict[str, Any] = saved["histories"][averager.replica.rank]
    return history if is_same else {"sparsifier": history["sparsifier"]}


def _extra(saved: Mapping[str, Any], averager: Averager) -> dict[str, Any]:
    if saved["ranks"] != averager.replica.num_workers or not saved["extras"]:
        return {}
    extra: dict[str, Any] = saved["extras"][averager.replica.rank][averager.workers.rank]
    return extra


def _own(
    source: Source, saved: Mapping[str, Any], averager: Averager, *, is_same: bool, tells: bool
) -> dict[str, dict[str, Tensor]]:
    """Return a worker's own tensors, or the mean of the unsent ones over all workers of the checkpoint."""
    unsent = UNSENT[averager.kind]
    count = saved["world_size"] if saved["has_folder"] else len(saved["workers"])
    rank = averager.workers.rank
    wanted = [rank] if is_same and count == averager.workers.num_workers else list(range(count))
    if tells and (wanted or averager.kind == "drifts"):
        _say_changed_model(source, wanted[0] if wanted else 0, averager)
    if averager.forgets:
        warn_of_forgotten(saved["unsent_norm"])
    if averager.forgets or not wanted:
        return {}
    own = {unsent: _mean([_parts(source, (str(worker), unsent), averager) for worker in wanted])}
    if is_same and averager.kind == "drifts":
        own["weights"] = _parts(source, (str(rank), "weights"), averager)
    return own


def _parts(source: Source, place: tuple[str, str], averager: Averager) -> dict[str, Tensor]:
    """Return this rank's parts of the saved tensors that still have their parameter's size."""
    sizes = source.sizes(place)
    fitting = {
        name: parameter for name, parameter in averager.parameters.items() if sizes.get(name) == _size(parameter)
    }
    return source.parts(place, fitting)


def _size(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _say_changed_model(source: Source, worker: int, averager: Averager) -> None:
    unsent = (str(worker), UNSENT[averager.kind])
    sizes = source.sizes(unsent)
    known = sizes or source.sizes((SHARED, "anchor"))
    held = {name: _size(parameter) for name, parameter in averager.parameters.items()}
    lost = [name for name, size in known.items() if held.get(name) != size]
    new = [name for name in averager.parameter_sizes if known.get(name) != held[name]]
    values = source.whole(unsent, [name for name in lost if name in sizes])
    say_changed_model({name: values.get(name, torch.zeros(1)) for name in lost}, new, UNSENT_WORDS[averager.kind])


def _mean(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return dict(parts[0])
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {
        name: torch.stack([part[name].double() for part in parts]).mean(0).to(parts[0][name].dtype) for name in names
    }
