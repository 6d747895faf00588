"""What a checkpoint holds of replicas of shards, beside what Lightning writes of model and optimizers.

Under one key, plain containers and tensors that ``weights_only=True`` loads::

    version, kind
    replicas, ranks        how many replicas there were, and of how many ranks each
    shared                 the same everywhere: settings, λ, calibration, counters
    histories              for every rank of a replica what its exchange and its sparsifier have seen of its shards
    residuals              in one file: for every replica a dict of whole tensors; else empty
    has_folder             whether they lie in a folder beside, "lightning_sparse", which all ranks have written
    why_no_residuals       None, or why they are missing though they were asked for

In the folder a residual is a distributed tensor, sharded as its parameter: any number of ranks can read it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from lightning_sparse.engine.grouping import local
from lightning_sparse.exchange.replicas import summed
from lightning_sparse.shards import ShardExchange, ShardModelAverager
from lightning_sparse.shards.whole_tensors import like_parameter, own_part, whole
from lightning_sparse.strategies.checkpoint import OnWorldSizeChange

KIND = "shards"
VERSION = 1
FOLDER = "lightning_sparse"


def collect(state: ShardExchange, path: Path, *, keeps_residuals: bool, in_one_file: bool) -> dict[str, Any]:
    """Returns what a checkpoint should hold under its key, on the first rank. Collective: all ranks.

    Args:
        state: this rank's.
        path: of the checkpoint, in whose folder all ranks write residuals.
        keeps_residuals: whether they are saved.
        in_one_file: whether the first rank has all of them instead, whole: it needs the memory of the content.
    """
    shared = state.shared_state()
    history = taken_out_of(shared)
    why_not = why_broken(state, "without residuals") if keeps_residuals else None
    has_residuals = keeps_residuals and why_not is None
    if has_residuals and not in_one_file:
        state_dict_saver.save(_as_tensors(state, state.workers.rank), checkpoint_id=path / FOLDER)
    return {
        "version": VERSION,
        "kind": KIND,
        "replicas": state.workers.num_workers,
        "ranks": state.replica.num_workers,
        "shared": shared,
        "histories": state.replica.gather_objects_to_first(history),
        "residuals": _whole_residuals(state) if has_residuals and in_one_file else [],
        "has_folder": has_residuals and not in_one_file,
        "why_no_residuals": why_not,
    }


NO_HISTORY: dict[str, Any] = {"exchange": {}, "sparsifier": {}}


def taken_out_of(shared: dict[str, Any]) -> dict[str, Any]:
    """Returns what is a rank's own of what replicas share, as it is of its shards; it is not in that any more."""
    return {name: shared.pop(name, empty) for name, empty in NO_HISTORY.items()}


def why_broken(state: ShardExchange | ShardModelAverager, how: str) -> str | None:
    """Returns, and says, why a checkpoint holds less than was asked for; None if nothing is wrong. Collective.

    Args:
        state: this rank's.
        how: it is written then, in words.
    """
    of_shard = summed([float(state.is_exchanging)], state.workers, state.device)
    if not summed(of_shard, state.replica, state.device)[0]:
        return None
    why_not = "it was saved in the middle of an exchange, which an exception has broken off"
    rank_zero_warn(f"lightning_sparse: the checkpoint is written {how}: {why_not}.")
    return why_not


def _as_tensors(state: ShardExchange, replica: int) -> dict[str, dict[str, Tensor]]:
    residuals = state.residuals().items()
    return {str(replica): {name: like_parameter(state.parameters[name], one) for name, one in residuals}}


def _whole_residuals(state: ShardExchange) -> list[dict[str, Tensor]]:
    """Returns every replica's residuals on the first rank, one parameter after the other; empty dicts on others."""
    of_replicas: list[dict[str, Tensor]] = [{} for _ in range(state.workers.num_workers)]
    for name, flat in state.residuals().items():
        full = whole(like_parameter(state.parameters[name], flat))
        if state.replica.rank == 0:
            for replica, [one] in enumerate(state.workers.gather_to_first([full.flatten()])):
                of_replicas[replica][name] = one.view(full.shape)
    return of_replicas


def restore(
    state: ShardExchange, saved: Mapping[str, Any] | None, path: Path, on_world_size_change: OnWorldSizeChange
) -> None:
    """Makes an exchange what a checkpoint holds, and nothing else: what came before is forgotten. All ranks together.

    Args:
        state: this rank's, between two steps.
        saved: what ``collect`` returned; None for the checkpoint of another strategy.
        path: of the checkpoint.
        on_world_size_change: what another number of replicas makes of residuals.

    Raises:
        RuntimeError: the content is of a newer version, or of another number of replicas with ``"error"``.
    """
    state.reset()
    if saved is None or saved.get("kind") != KIND:
        (rank_zero_info if saved is None else rank_zero_warn)(
            "lightning_sparse: the checkpoint was written without a sparse exchange of gradients between replicas"
            f"{'' if saved is None else ': what its own strategy held back is lost'}. Residuals start from zero and, "
            "with a density, calibration begins."
        )
        return
    if saved["version"] > VERSION:
        raise RuntimeError(
            f"The checkpoint holds residuals in format {saved['version']}, this version of lightning_sparse reads up "
            f"to {VERSION}. Update lightning_sparse."
        )
    now, old = state.workers.num_workers, saved["replicas"]
    is_same_layout = (old, saved["ranks"]) == (now, state.replica.num_workers)
    history = saved["histories"][state.replica.rank] if is_same_layout else NO_HISTORY
    state.load_shared_state({**saved["shared"], **history})
    if not (saved["has_folder"] or saved["residuals"]):
        rank_zero_warn(
            f"lightning_sparse: the checkpoint holds no residuals ({saved['why_no_residuals'] or 'as asked for'}). "
            "They start from zero; what was held back is lost."
        )
        return
    if old != now and on_world_size_change == "error":
        raise RuntimeError(
            f"The checkpoint is of {old} replicas, this run has {now}, and on_world_size_change is 'error'. Start as "
            "many, or use on_world_size_change='mean', which keeps the pending update."
        )
    if old != now:
        becomes = "residuals start from zero" if on_world_size_change == "reset" else "each starts from the mean"
        rank_zero_info(f"lightning_sparse: {now} replicas instead of {old}: {becomes}.")
    if old == now or on_world_size_change == "mean":
        wanted = [state.workers.rank] if old == now else range(old)
        residuals = _read(state, path / FOLDER, wanted) if saved["has_folder"] else _cut(state, saved, wanted)
        state.load_residuals(residuals)


def _read(state: ShardExchange, folder: Path, replicas: Iterable[int]) -> dict[str, Tensor]:
    """Returns the mean of some replicas' residuals from a folder, this rank's part. Collective: all ranks."""
    try:
        known = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    except (FileNotFoundError, NotADirectoryError):
        rank_zero_warn(f"lightning_sparse: {folder} is missing. Residuals start from zero; what was held back is lost.")
        return {}
    parts: list[dict[str, Tensor]] = []
    for replica in replicas:
        here = _as_tensors(state, replica)[str(replica)]
        sizes = {name: getattr(known.get(f"{replica}.{name}"), "size", None) for name in here}
        fitting = {name: torch.empty_like(one) for name, one in here.items() if sizes[name] == one.shape}
        _say_new(here.keys() - fitting.keys())
        state_dict_loader.load({str(replica): fitting}, checkpoint_id=folder)
        parts.append({name: local(one).flatten() for name, one in fitting.items()})
    return _mean(parts)


def _cut(state: ShardExchange, saved: Mapping[str, Any], replicas: Iterable[int]) -> dict[str, Tensor]:
    """Returns the mean of some replicas' residuals from one file, this rank's part."""
    parts = []
    for replica in replicas:
        held = saved["residuals"][replica]
        wanted = {name: state.parameters[name] for name in state.residuals()}
        fitting = {name: one for name, one in wanted.items() if name in held and held[name].shape == one.shape}
        _say_new(wanted.keys() - fitting.keys())
        parts.append({name: own_part(one, held[name]) for name, one in fitting.items()})
    return _mean(parts)


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.stack([one[name].double() for one in parts]).mean(0) for name in parts[0]}


def _say_new(names: Iterable[str]) -> None:
    listed = ", ".join(sorted(names)[:8])
    if listed:
        rank_zero_warn(
            f"lightning_sparse: the model is not the one of the checkpoint, which has no residual of {listed}: these "
            "start from zero."
        )
