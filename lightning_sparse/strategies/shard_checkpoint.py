"""What a checkpoint holds of replicas of shards, beside what Lightning writes of model and optimizers.

Under one key, plain containers and tensors that ``weights_only=True`` loads::

    kind, version, …       what every strategy saves, see ``lightning_sparse.strategies.content``
    ranks                  of how many ranks each replica was
    shared                 the same everywhere: settings, λ, calibration, counters
    histories              for every rank of a replica what its exchange and its sparsifier have seen of its shards
    residuals              in one file: for every replica a dict of whole tensors; else empty
    has_folder             whether they lie in a folder beside, "lightning_sparse", which all ranks have written
    why_no_residuals       None, or why they are missing though they were asked for

In the folder a residual is a distributed tensor, sharded as its parameter: any number of ranks can read it.
"""

from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.saved_state import DamagedStateError, require_seal, sealed, unsent_norm
from lightning_sparse.exchange import raised_together
from lightning_sparse.exchange.replicas import summed
from lightning_sparse.shards import ShardExchange, ShardModelAverager
from lightning_sparse.shards.whole_tensors import like_parameter, own_part, whole
from lightning_sparse.strategies.checkpoint import OnWorldSizeChange
from lightning_sparse.strategies.content import VERSION, own_content, say_changed_model

KIND = "gradients of shards"
STARTS = "Residuals start from zero and, with a density, calibration begins."
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
    return sealed(
        {
            "kind": KIND,
            "version": VERSION,
            "world_size": state.workers.num_workers,
            "ranks": state.replica.num_workers,
            "unsent_norm": unsent_norm_of_shards(state, state.residuals()) if has_residuals else None,
            "shared": shared,
            "histories": state.replica.gather_objects_to_first(history),
            "residuals": _whole_residuals(state) if has_residuals and in_one_file else [],
            "has_folder": has_residuals and not in_one_file,
            "why_no_residuals": why_not,
        }
    )


def unsent_norm_of_shards(state: ShardExchange | ShardModelAverager, unsent: Mapping[str, Tensor]) -> float:
    """Returns sqrt((1/n) Σ_i ‖e_i‖²) over all replicas from each rank's unsent values. Collective: all ranks."""
    own = unsent_norm([unsent]) or 0.0
    [of_replica] = summed([own**2], state.replica, state.device)
    [of_all] = summed([of_replica], state.workers, state.device)
    return sqrt(of_all / state.workers.num_workers)


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


def restore(state: ShardExchange, content: Any, path: Path, on_world_size_change: OnWorldSizeChange) -> None:
    """Makes an exchange what a checkpoint holds, and nothing else: what came before is forgotten. All ranks together.

    Args:
        state: this rank's, between two steps.
        content: what ``collect`` returned, or another strategy; None if the checkpoint has nothing of the kind.
        path: of the checkpoint.
        on_world_size_change: what another number of replicas makes of residuals.

    Raises:
        RuntimeError: the content is damaged, of a newer version, or of another number of replicas with ``"error"``. On
            every rank, before anything was loaded.
    """
    now = state.workers.num_workers
    with raised_together():
        saved = own_content(content, KIND, STARTS)
        if saved is not None:
            require_seal(saved)
            if saved["world_size"] != now and on_world_size_change == "error":
                raise RuntimeError(
                    f"The checkpoint is of {saved['world_size']} replicas, this run has {now}, and "
                    "on_world_size_change is 'error'. Start as many, or use on_world_size_change='mean', which keeps "
                    "the pending update."
                )
    state.reset()
    if saved is None:
        return
    old = saved["world_size"]
    is_same_layout = (old, saved["ranks"]) == (now, state.replica.num_workers)
    history = saved["histories"][state.replica.rank] if is_same_layout else NO_HISTORY
    state.load_shared_state({**saved["shared"], **history})
    if not (saved["has_folder"] or saved["residuals"]):
        why = saved["why_no_residuals"] or "residual_checkpoint='none'"
        rank_zero_warn(
            f"lightning_sparse: the checkpoint holds no residuals ({why}). Unsent values are lost, and residuals start "
            "from zero."
        )
        return
    if old != now:
        becomes = "residuals start from zero" if on_world_size_change == "reset" else "each starts from the mean"
        rank_zero_info(f"lightning_sparse: the number of replicas is {now} instead of {old}: {becomes}.")
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
        say_changed_model({}, sorted(here.keys() - fitting.keys()), "residuals")
        read_folder({str(replica): fitting}, folder, is_unsent=True)
        parts.append({name: local(one).flatten() for name, one in fitting.items()})
    return _mean(parts)


def read_folder(tree: dict[str, Any], folder: Path, *, is_unsent: bool) -> None:
    """Reads tensors in place from a folder that all ranks have written. Collective: all ranks.

    Args:
        tree: nested dicts of tensors.
        folder: where they are.
        is_unsent: whether they are unsent values, which are always finite.

    Raises:
        DamagedStateError: the folder cannot be read, or an unsent value is NaN or infinite. On every rank.
    """
    try:
        state_dict_loader.load(tree, checkpoint_id=folder)
    except CheckpointException as error:  # on all ranks, which tell each other
        reason, _ = next(iter(error.failures.values()))
        raise DamagedStateError(str(folder), f"cannot be read ({reason})") from error
    with raised_together():
        for path, tensor in _tensors_of(tree) if is_unsent else ():
            if not bool(local(tensor).isfinite().all()):
                raise DamagedStateError(f"{folder}, {path}", "has values that are NaN or infinite")


def _tensors_of(tree: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Tensor]]:
    for name, entry in tree.items():
        if isinstance(entry, Tensor):
            yield path + name, entry
        elif isinstance(entry, Mapping):
            yield from _tensors_of(entry, f"{path}{name}.")


def _cut(state: ShardExchange, saved: Mapping[str, Any], replicas: Iterable[int]) -> dict[str, Tensor]:
    """Returns the mean of some replicas' residuals from one file, this rank's part."""
    parts = []
    for replica in replicas:
        held = saved["residuals"][replica]
        wanted = {name: state.parameters[name] for name in state.residuals()}
        fitting = {name: one for name, one in wanted.items() if name in held and held[name].shape == one.shape}
        lost = {name: tensor for name, tensor in held.items() if name not in fitting}
        say_changed_model(lost, sorted(wanted.keys() - fitting.keys()), "residuals")
        parts.append({name: own_part(one, held[name]) for name, one in fitting.items()})
    return _mean(parts)


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.stack([one[name].double() for one in parts]).mean(0) for name in parts[0]}
