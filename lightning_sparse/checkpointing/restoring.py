"""Restoring averagers from a checkpoint, with messages about lost state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lightning_sparse.checkpointing.content import FOLDER, OPTIMIZERS, SHARED, own_content, warn_of_incomplete
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.grouping import as_real, local, real_numel, residual_dtype
from lightning_sparse.engine.snapshot import Snapshot, Tensors
from lightning_sparse.exchange.sharded_tensors import own_part, read_folder, shapes_in_folder, sharded_like

LONGEST_LIST = 200
"""Characters of the names of parameters in a message."""
STARTS_OF_OTHERS = {
    "gradients": "each starts from the mean of the old residuals",
    "drifts": "all begin with the mean of the old weights as the anchor, and with the checkpoint's own optimizers",
}
"""How workers start from a checkpoint of another number of workers."""


def restore(
    averagers: Sequence[Averager],
    content: Any,
    *,
    path: Path | None = None,
    module: Any = None,
    optimizers: Sequence[Any] = (),
) -> dict[str, Any]:
    """Replace all state of this process's averagers by that of a checkpoint. Collective: all ranks.

    Args:
        averagers: this process's averagers, between two steps; several only for simulated workers.
        content: the result of ``collect``, from this strategy or another; None if the checkpoint has none.
        path: of the checkpoint.
        module: the module of sharded optimizers.
        optimizers: sharded optimizers, whose states the content holds for each replica.

    Returns:
        The ``extra`` that ``collect`` saved for this rank, without optimizer states if the model has changed; empty for
        another number of workers or ranks.

    Raises:
        RuntimeError: on every rank, the content is of a newer version, or a folder cannot be read.
    """
    first = averagers[0]
    saved = own_content(content, first.kind)
    for averager in averagers:
        averager.reset()
    if saved is None:
        return {}
    if saved["numbers"] is None:
        warn_of_incomplete(first.kind, saved["why_incomplete"])
        return {}
    is_same = saved["world_size"] == first.workers.num_workers
    saved, source = _open_tensors(saved, path, first.kind)
    if not is_same and (first.kind == "drifts" or saved["workers"] or saved["in_folder"]):
        now, start = first.workers.num_workers, STARTS_OF_OTHERS[first.kind]
        rank_zero_info(f"lightning_sparse: the number of workers is {now} instead of {saved['world_size']}: {start}.")
    is_changed = _warn_of_changed_model(source, first)
    extra: dict[str, Any] = {}
    for averager in averagers:
        history, extra = _of_rank(saved, averager, is_same=is_same)
        kinds = [kind for kind in saved["shared"] if is_same or kind != "anchor"]
        snapshot = Snapshot(saved["numbers"], history, extra=extra)
        snapshot.shared = {kind: _parts(source, SHARED, kind, averager) for kind in kinds}
        snapshot.own = _own_tensors(source, averager, is_same=is_same)
        averager.restore(snapshot)
    if is_changed:  # own optimizer states would not fit
        return {name: value for name, value in extra.items() if name != "optimizer_states"}
    for at, optimizer in enumerate(optimizers):
        worker = str(first.workers.rank)
        if is_same and any(f"{name}.".startswith(f"{at}.") for name in source.shapes(worker, OPTIMIZERS)):
            tree: dict[str, Any] = {str(at): get_optimizer_state_dict(module, optimizer)}
            source.read(worker, OPTIMIZERS, tree)
            set_optimizer_state_dict(module, optimizer, tree[str(at)])
    return extra


class SavedTensors:
    """The tensors of a checkpoint, from its content or from a folder.

    With a folder, ``read`` is collective.

    Raises:
        RuntimeError: the folder cannot be read.
    """

    def __init__(self, content: Mapping[str, Any], folder: Path | None = None) -> None:
        self.num_workers = content["world_size"] if folder is not None else len(content["workers"])
        self._folder = folder
        self._held = {SHARED: content["shared"]} | {str(rank): own for rank, own in enumerate(content["workers"])}
        self._in_folder = {} if folder is None else shapes_in_folder(folder)

    def shapes(self, worker: str, kind: str) -> dict[str, torch.Size]:
        """Return the shape of each tensor of a worker, or of ``SHARED``, by name."""
        if self._folder is None:
            held = self._held.get(worker, {}).get(kind, {})
            return {name: getattr(entry, "shape", torch.Size()) for name, entry in held.items()}
        prefix = f"{worker}.{kind}."
        return {path[len(prefix) :]: shape for path, shape in self._in_folder.items() if path.startswith(prefix)}

    def read(self, worker: str, kind: str, tree: dict[str, Any]) -> None:
        """Fill nested containers in place with saved values, and with this rank's parts of tensors."""
        if self._folder is None:
            tree |= {name: _filled(entry, self._held[worker][kind][name]) for name, entry in tree.items()}
            return
        if tree:
            read_folder({worker: {kind: tree}}, self._folder)


def _filled(target: Any, saved: Any) -> Any:
    if isinstance(target, Tensor) and isinstance(saved, Tensor):
        local(target).copy_(own_part(target, saved).view(local(target).shape))
        return target
    if isinstance(target, Mapping) and isinstance(saved, Mapping):
        return {name: _filled(entry, saved[name]) if name in saved else entry for name, entry in target.items()}
    return saved


def _open_tensors(saved: Mapping[str, Any], path: Path | None, kind: str) -> tuple[Mapping[str, Any], SavedTensors]:
    """Return the content and its tensors; warn if tensors are missing."""
    if saved["in_folder"]:
        if path is not None and (path / FOLDER).is_dir():  # a file consolidated from a folder has no folder
            return saved, SavedTensors(saved, path / FOLDER)
        warn_of_incomplete(kind, f"its folder {FOLDER} is missing")
        saved = {**saved, "shared": {}, "workers": [], "extras": []}
    elif kind == "gradients" and saved["why_incomplete"] and saved["numbers"]["last_step"]:
        warn_of_incomplete(kind, saved["why_incomplete"])
    return saved, SavedTensors(saved)


def _of_rank(saved: Mapping[str, Any], averager: Averager, *, is_same: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's history and extra values that fit the number of workers and ranks."""
    if saved["ranks"] != averager.replica.num_workers:
        if any(history["sparsifier"] for history in saved["histories"]):
            rank_zero_warn(
                f"lightning_sparse: replicas have {averager.replica.num_workers} instead of {saved['ranks']} ranks. "
                "The sparsifier's history belongs to other shards and is lost: ACCORDION starts with its high density."
            )
        return {}, {}
    history: dict[str, Any] = saved["histories"][averager.replica.rank]
    if not is_same:
        return {"sparsifier": history["sparsifier"]}, {}
    extras = saved["extras"][averager.replica.rank] if saved["extras"] else {}
    return history, extras[averager.workers.rank] if extras else {}


def _own_tensors(source: SavedTensors, averager: Averager, *, is_same: bool) -> Tensors:
    """Return this worker's tensors, or the mean of all workers' unsent ones."""
    own = str(averager.workers.rank)
    is_own = is_same and source.num_workers == averager.workers.num_workers
    workers = [own] if is_own else [str(worker) for worker in range(source.num_workers)]
    totals: dict[str, Tensor] = {}
    for worker in workers:  # one after the other, because a GPU may not hold all
        for name, part in _parts(source, worker, "unsent", averager).items():
            totals[name] = totals[name].add_(part) if name in totals else part.double()
    unsent = {
        name: (total / len(workers)).to(residual_dtype(averager.parameters[name])) for name, total in totals.items()
    }
    return {"unsent": unsent, "weights": _parts(source, own, "weights", averager) if is_same else {}}


def _parts(source: SavedTensors, worker: str, kind: str, averager: Averager) -> dict[str, Tensor]:
    """Return this rank's flat parts of saved tensors that fit their parameter."""
    shapes = source.shapes(worker, kind)
    parts = {}
    for name, parameter in averager.parameters.items():
        if name in shapes and shapes[name].numel() == real_numel(parameter):
            held = as_real(local(parameter))
            dtype = held.dtype if kind == "weights" else residual_dtype(parameter)
            parts[name] = sharded_like(torch.empty(held.numel(), dtype=dtype, device=held.device), parameter)
    source.read(worker, kind, parts)
    return {name: local(part).flatten() for name, part in parts.items()}


def _warn_of_changed_model(source: SavedTensors, averager: Averager) -> bool:
    """Return whether the model has changed, and warn if it has."""
    shapes = source.shapes("0", "unsent") or source.shapes(SHARED, "anchor")
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    held = {name: real_numel(parameter) for name, parameter in averager.parameters.items()}
    lost = [name for name, size in sizes.items() if held.get(name) != size]
    new = [name for name in averager.parameter_sizes if sizes.get(name) != held[name]]
    if not sizes or not (lost or new):
        return False
    what = {"gradients": "residuals", "drifts": "unsent drifts"}[averager.kind]
    said = ["lightning_sparse: the model is not the one of the checkpoint."]
    if lost:
        said.append(f"The model lacks or resized these parameters, so their {what} are lost:")
        said.append(shorten(", ".join(lost), LONGEST_LIST) + ".")
    if new:
        said.append(f"The checkpoint lacks these parameters, so their {what} start from zero:")
        said.append(shorten(", ".join(new), LONGEST_LIST) + ".")
    if averager.kind == "drifts":
        said.append("All workers start with the checkpoint's own optimizers.")
    rank_zero_warn(" ".join(said))
    return True
