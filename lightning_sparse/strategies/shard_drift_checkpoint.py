"""What a checkpoint of local training between replicas of shards holds, beside what Lightning writes.

Lightning's own part is the mean of the replicas' weights, with the first replica's optimizers, so that whoever reads it
has one model. Under one key, plain containers and tensors that ``weights_only=True`` loads::

    kind, version, …    what every strategy saves, see ``lightning_sparse.strategies.content``
    ranks               of how many ranks each replica was
    shared              the same everywhere: λ, calibration, counters, the outer optimizer's numbers
    of_ranks            for every rank of a replica a list, of every replica: its buffers, what its exchange has seen, …
    whole               in one file: the two kinds of tensors below, whole; else None
    has_folder          whether they lie in a folder beside, "lightning_sparse", which all ranks have written
    why_no_drifts       None, or why they are missing though they were asked for

    shared tensors      the anchor, the outer optimizer's
    of a replica        its weights, what it keeps apart of its drift, its optimizers

In the folder a tensor is distributed, sharded as its parameter: any number of ranks can read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.saved_state import require_seal, sealed
from lightning_sparse.exchange import raised_together
from lightning_sparse.shards import ShardModelAverager
from lightning_sparse.shards.whole_tensors import like_parameter, own_part, whole
from lightning_sparse.strategies.content import VERSION, own_content
from lightning_sparse.strategies.shard_checkpoint import (
    FOLDER,
    NO_HISTORY,
    read_folder,
    taken_out_of,
    unsent_norm_of_shards,
)

ReplicaDrifts = Literal["full", "mean"]
ReplicaOptimizers = Literal["full", "first"]
KIND = "drifts of shards"
STARTS = "All replicas begin with its weights as the anchor and, with a density, with a calibration."


@dataclass(frozen=True)
class ReplicaCheckpointOptions:
    """What a checkpoint holds of the replicas, checked when made.

    Args:
        drift_checkpoint: ``"full"``: every replica's weights; ``"mean"``: their mean, which the file holds anyway.
        optimizer_checkpoint: ``"full"``: every replica's; ``"first"``: the first replica's, for all.
        in_one_file: whether tensors are gathered into the file.

    Raises:
        ValueError: a word that is not allowed.
    """

    drift_checkpoint: ReplicaDrifts = "full"
    optimizer_checkpoint: ReplicaOptimizers = "full"
    in_one_file: bool = False

    def __post_init__(self) -> None:
        allowed = {"drift_checkpoint": ("full", "mean"), "optimizer_checkpoint": ("full", "first")}
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                raise ValueError(
                    f"Invalid {name}={getattr(self, name)!r}. Must be one of {', '.join(map(repr, words))}."
                )


@dataclass(frozen=True)
class Parts:
    """This rank's part of a replica: what exchanges, whose weights, and what steps on them."""

    averager: ShardModelAverager
    module: nn.Module
    optimizers: Sequence[Optimizer]

    def optimizer_states(self) -> dict[str, Any]:
        """Returns the optimizers' states by parameter name, distributed; the tensors themselves."""
        return {str(at): get_optimizer_state_dict(self.module, one) for at, one in enumerate(self.optimizers)}

    def distributed(self, of_names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's parts as parts of distributed tensors, by parameter name."""
        parameters = self.averager.parameters
        return {name: like_parameter(parameters[name], one.reshape(-1)) for name, one in of_names.items()}

    def shared(self, outer: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Returns what all replicas have alike, of the shape in which it is saved."""
        return {
            "anchor": self.distributed(self.averager.anchor()),
            "outer": {key: self.distributed(one) for key, one in outer.items()},
        }


def collect(parts: Parts, path: Path, options: ReplicaCheckpointOptions, why_not: str | None) -> dict[str, Any] | None:
    """Returns what a checkpoint should hold under its key, on the first rank. Collective: all ranks.

    Args:
        parts: this rank's.
        path: of the checkpoint, in whose folder all ranks write.
        options: what to keep.
        why_not: why it is written without drifts; None writes what is asked for.
    """
    averager = parts.averager
    content = {
        "version": VERSION,
        "kind": KIND,
        "world_size": averager.workers.num_workers,
        "ranks": averager.replica.num_workers,
        "unsent_norm": None,
        "shared": None,
        "of_ranks": [],
        "whole": None,
        "has_folder": False,
        "why_no_drifts": why_not,
    }
    if why_not is not None:
        return sealed(content)
    own, buffers = averager.own_tensors()
    outer, outer_numbers = averager.outer_state()
    shared = averager.shared_numbers()
    of_rank = {"buffers": buffers, "history": taken_out_of(shared)}
    kept = averager.kept_tensors()
    content["unsent_norm"] = unsent_norm_of_shards(averager, kept) if kept else None
    of_replica: dict[str, Any] = {"kept": parts.distributed(kept)}
    if options.drift_checkpoint == "full":
        of_replica["weights"] = parts.distributed(own)
    if options.optimizer_checkpoint == "full":
        of_replica["optimizers"] = parts.optimizer_states()
    of_all = parts.shared(outer)
    of_shard = averager.workers.gather_objects_to_first(of_rank)
    content |= {
        "shared": shared | {"outer": outer_numbers, "outer_keys": list(outer)},
        "of_ranks": averager.replica.gather_objects_to_first(of_shard) if averager.workers.rank == 0 else [],
    }
    if options.in_one_file:
        content["whole"] = _gathered(averager, of_all, of_replica)
    else:
        state_dict_saver.save({"shared": of_all, str(averager.workers.rank): of_replica}, checkpoint_id=path / FOLDER)
        content["has_folder"] = True
    return sealed(content)


def _gathered(averager: ShardModelAverager, of_all: Any, of_replica: Any) -> dict[str, Any] | None:
    """Returns all tensors whole on the first rank, one after the other; None on others."""
    keeps = averager.replica.rank == 0

    def made_whole(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            full = whole(tree)
            return full.detach().cpu().clone() if keeps else None
        if isinstance(tree, Mapping):
            return {name: made_whole(one) for name, one in tree.items()}
        return tree

    shared, mine = made_whole(of_all), made_whole(of_replica)
    if not keeps:
        return None
    everyones = averager.workers.gather_objects_to_first(mine)
    return {"shared": shared, "replicas": everyones} if averager.workers.rank == 0 else None


def restore(parts: Parts, content: Any, path: Path) -> None:
    """Makes an averager what a checkpoint holds, and nothing else, with a replica's own weights kept apart. All ranks.

    Args:
        parts: this rank's, whose module has the checkpoint's weights already, and optimizers the file's own.
        content: what ``collect`` returned, or another strategy; None if the checkpoint has nothing of the kind.
        path: of the checkpoint.

    Raises:
        RuntimeError: the content is damaged or of a newer version. On every rank, before anything was loaded.
    """
    averager = parts.averager
    with raised_together():
        saved = own_content(content, KIND, STARTS)
        if saved is not None:
            require_seal(saved)
    averager.restart()
    if saved is None:
        return
    if saved["shared"] is None:
        rank_zero_warn(f"lightning_sparse: the checkpoint holds no drifts ({saved['why_no_drifts']}). {STARTS}")
        return
    now, old = averager.workers.num_workers, saved["world_size"]
    is_same_layout = (old, saved["ranks"]) == (now, averager.replica.num_workers)
    mine = saved["of_ranks"][averager.replica.rank][averager.workers.rank] if is_same_layout else {}
    averager.load_shared_numbers({**saved["shared"], **mine.get("history", NO_HISTORY)})
    if saved["whole"] is None and not (path / FOLDER).is_dir():
        rank_zero_warn(
            f"lightning_sparse: {path / FOLDER} is missing. All replicas begin with the checkpoint's weights as the "
            "anchor; what they had of their own is lost."
        )
        return
    source = _Folder(parts, path / FOLDER) if saved["whole"] is None else _File(parts, saved["whole"])
    if old != now:
        rank_zero_info(
            f"lightning_sparse: the number of replicas is {now} instead of {old}: all begin with the mean of the old "
            "weights as the anchor, and with the first replica's optimizers."
        )
        kept = [source.of_replica(one, "kept", averager.anchor()) for one in range(old)]
        averager.load_own_state({"kept": _mean(kept)})
        return
    averager.load_anchor(source.shared("anchor", averager.anchor()))
    keys = saved["shared"]["outer_keys"]
    like = averager.anchor() if keys else {}
    outer = {key: source.shared(f"outer.{key}", like) for key in keys}
    averager.load_outer_state(outer, saved["shared"]["outer"], saved["shared"].get("outer_kind"))
    rank = averager.workers.rank
    held = {name: local(one) for name, one in averager.parameters.items()}
    own = source.of_replica(rank, "weights", held)
    weights = {name: one.view(held[name].shape) for name, one in own.items()} | mine.get("buffers", {})
    kept_here = source.of_replica(rank, "kept", averager.anchor())  # also where drifts are in the weights by now
    averager.load_own_state({"weights": weights if own else {}, "kept": kept_here}, is_apart=True)
    source.load_optimizers(rank)


class _Folder:
    """Tensors that all ranks have written. All that is asked of it is collective."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self._parts, self._folder = parts, folder
        self._known = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata

    def shared(self, place: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns by name this rank's part, flat, of what is saved and as large as this; ``place`` says of what."""
        return self._read(f"shared.{place}", like)

    def of_replica(self, replica: int, place: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of what a replica has."""
        return self._read(f"{replica}.{place}", like)

    def _read(self, place: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        here = self._parts.distributed(like)
        sizes = {name: getattr(self._known.get(f"{place}.{name}"), "size", None) for name in here}
        fitting = {name: torch.empty_like(one) for name, one in here.items() if sizes[name] == one.shape}
        if fitting:
            tree: dict[str, Any] = fitting
            for one in reversed(place.split(".")):
                tree = {one: tree}
            read_folder(tree, self._folder, is_unsent=place.endswith(".kept"))
        return {name: local(one).flatten() for name, one in fitting.items()}

    def load_optimizers(self, replica: int) -> None:
        """Gives optimizers a replica's states, if they are saved."""
        for at, optimizer in enumerate(self._parts.optimizers):
            if any(name.startswith(f"{replica}.optimizers.{at}.") for name in self._known):
                state = get_optimizer_state_dict(self._parts.module, optimizer)
                tree = {str(replica): {"optimizers": {str(at): state}}}
                read_folder(tree, self._folder, is_unsent=False)
                set_optimizer_state_dict(self._parts.module, optimizer, tree[str(replica)]["optimizers"][str(at)])


class _File:
    """Whole tensors, as the first rank has gathered them; the same questions as of a folder."""

    def __init__(self, parts: Parts, held: Mapping[str, Any]) -> None:
        self._parts, self._held = parts, held

    def shared(self, place: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = self._held["shared"]
        for one in place.split("."):
            held = held[one]
        return self._cut(held, like)

    def of_replica(self, replica: int, place: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._cut(self._held["replicas"][replica].get(place, {}), like)

    def _cut(self, held: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = self._parts.averager.parameters
        return {
            name: own_part(parameters[name], held[name])
            for name in like
            if name in held and held[name].shape == parameters[name].shape
        }

    def load_optimizers(self, replica: int) -> None:
        for at, saved in self._held["replicas"][replica].get("optimizers", {}).items():
            optimizer = self._parts.optimizers[int(at)]
            state: Any = get_optimizer_state_dict(self._parts.module, optimizer)
            for name, of_name in state["state"].items():
                for key, one in of_name.items():
                    full = saved["state"].get(name, {}).get(key)
                    if isinstance(one, Tensor) and isinstance(full, Tensor):
                        local(one).copy_(own_part(one, full).view(local(one).shape))
            state["param_groups"] = saved["param_groups"]
            set_optimizer_state_dict(self._parts.module, optimizer, state)


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = set.intersection(*(set(one) for one in parts))
    return {name: torch.stack([one[name].double() for one in parts]).mean(0) for name in names}
