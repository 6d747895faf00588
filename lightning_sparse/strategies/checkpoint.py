"""Residuals, λ and counters into a checkpoint and back.

The content, under one key of the checkpoint, plain containers and tensors that ``weights_only=True`` loads::

    version, world_size
    shared                 the same on every worker: settings, λ, calibration, counters, the exchange's history
    residuals              "full": a dict of flat tensors for every rank; "mean": one such dict; "none": empty
    why_no_residuals       None, or why they are missing though they were asked for

Residuals are those of the last whole step, in the order of each parameter's indices (before version 2: as the parameter
lay in memory).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.ddp.simulation import SimulatedWorker
from lightning_sparse.ddp.sparse_state import SparseState
from lightning_sparse.engine.memory import Residuals
from lightning_sparse.exchange import Workers
from lightning_sparse.strategies.saving import NO_WORKER, is_in_trouble, shortened

ResidualCheckpoint = Literal["full", "mean", "none"]
RESIDUAL_CHECKPOINTS: tuple[ResidualCheckpoint, ...] = ("full", "mean", "none")
OnWorldSizeChange = Literal["mean", "reset", "error"]
ON_WORLD_SIZE_CHANGES: tuple[OnWorldSizeChange, ...] = ("mean", "reset", "error")
KIND = "residuals"
VERSION = 2


@dataclass(frozen=True)
class CheckpointOptions:
    """What of the residuals a checkpoint holds, and what another number of workers makes of them; checked when made.

    Args:
        residual_checkpoint: ``"full"``: every worker's residuals, n times the size of the model in float32; a run that
            resumes with as many workers equals one that never stopped. ``"mean"``: their mean, once the size of the
            model; what is pending of the update, (1/n) Σ e_i, is kept, on which worker it is pending is not.
            ``"none"``: no residuals; what was held back is lost at a resume.
        on_world_size_change: ``"mean"``: every worker starts from the mean of the old residuals, so the pending update
            stays what it was; ``"reset"``: from zero; ``"error"``: RuntimeError.

    Raises:
        ValueError: a word that is not allowed.
    """

    residual_checkpoint: ResidualCheckpoint = "full"
    on_world_size_change: OnWorldSizeChange = "mean"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("residual_checkpoint", RESIDUAL_CHECKPOINTS),
            ("on_world_size_change", ON_WORLD_SIZE_CHANGES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, allowed))}.")


def collect(state: SparseState, residual_checkpoint: ResidualCheckpoint, patience: float) -> dict[str, Any] | None:
    """Returns what a checkpoint should hold of all workers, on the first one; None on the others.

    Every worker should call this. Where one does not, or where they are not at the same step, the content has no
    residuals and says why; nobody waits for longer than their patience. The first worker needs the memory of the
    content, and beside it little more than the largest parameter's. Later steps do not change the tensors, so they may
    be written while training goes on.

    Args:
        state: this worker's.
        residual_checkpoint: see ``CheckpointOptions``.
        patience: seconds to wait for others.
    """
    residuals: list[Residuals] | Residuals = {}
    why_not = None
    if residual_checkpoint != "none" and state.has_residuals:
        residuals, why_not = _gathered(state, residual_checkpoint, patience)
    if state.workers.rank != 0:
        return None
    if why_not is not None:
        rank_zero_warn(
            f"lightning_sparse: the checkpoint is written without residuals: {why_not}. A run that resumes from it "
            "begins with residuals of zero; what was held back is lost."
        )
    return _content(state.workers.num_workers, state.shared_state(), residuals, why_not)


def collect_simulated(workers: Sequence[SimulatedWorker]) -> dict[str, Any]:
    """Returns what a checkpoint holds of workers in one process: the same as of real ones, with "full"."""
    residuals = [{name: one.cpu() for name, one in worker.residuals.state_dict().items()} for worker in workers]
    return _content(len(workers), workers[0].shared_state(), residuals, None)


def _content(
    world_size: int, shared: dict[str, Any] | None, residuals: list[Residuals] | Residuals, why_not: str | None
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "world_size": world_size,
        "shared": shared,
        "residuals": residuals,
        "why_no_residuals": why_not,
    }


def _gathered(
    state: SparseState, residual_checkpoint: ResidualCheckpoint, patience: float
) -> tuple[list[Residuals] | Residuals, str | None]:
    """Returns the residuals on the first worker and nothing on others, or nothing and why not."""
    if state.is_saving:  # a signal came in its middle; the others know of one save only
        return {}, "it was saved in the middle of another save"
    state.is_saving = True
    try:
        if state.is_exchanging or is_in_trouble():
            patience = shortened(patience)
        status = {"progress": state.settlement.progress, "between optimizer steps": state.is_certain}
        why_not = state.meeting.hold(status, patience).why_not
        if why_not is None and not status["between optimizer steps"]:
            why_not = "the workers are in the middle of an optimizer's step"
        if why_not is not None:
            return {}, why_not
        # All of them: in the first step workers may have laid out different buckets already.
        own = dict(sorted(state.residuals.all_layers().items()))
        try:
            return _sent_to_first(own, state, residual_checkpoint), None
        except RuntimeError as error:
            if state.workers.rank != 0:
                raise
            # A worker died or left on the way. The file is worth having without residuals, as plain DDP's is.
            state.meeting.give_up_apart()
            return {}, f"gathering them failed: {str(error).splitlines()[0]}"
    finally:
        state.is_saving = False


def _sent_to_first(
    own: Residuals, state: SparseState, residual_checkpoint: ResidualCheckpoint
) -> list[Residuals] | Residuals:
    workers = state.meeting.workers_apart() if state.workers.num_workers > 1 else state.workers
    if residual_checkpoint == "full":
        return [dict(zip(own, part, strict=True)) for part in workers.gather_to_first(list(own.values()))]
    # One tensor for all sums: a new one each time would be there beside those of which messages still hold on to.
    device = next(iter(own.values())).device if own else None
    room = torch.empty(max((one.numel() for one in own.values()), default=0), dtype=torch.float64, device=device)
    means = {}
    for name, one in own.items():
        total = room[: one.numel()].copy_(one)
        workers.sum_on_first(total)
        if workers.rank == 0:
            means[name] = total.div_(workers.num_workers).to("cpu", one.dtype, copy=True)
    return means


def content_without_state(world_size: int) -> dict[str, Any]:
    """Returns what a checkpoint holds that is saved where no worker lives any more, as after a fit by fork or spawn."""
    rank_zero_warn(
        f"lightning_sparse: the checkpoint is written without residuals: {NO_WORKER}. Have a ModelCheckpoint save "
        "while training goes on, or start workers by torchrun or strategy='ddp_hardthreshold'."
    )
    return _content(world_size, None, {}, NO_WORKER)


def restore(
    state: SparseState | SimulatedWorker, saved: Mapping[str, Any] | None, on_world_size_change: OnWorldSizeChange
) -> None:
    """Makes a state what a checkpoint holds, and nothing else: what came before is forgotten. Not collective.

    Args:
        state: this worker's, between two steps.
        saved: what ``collect`` returned; None for the checkpoint of another strategy.
        on_world_size_change: see ``CheckpointOptions``.

    Raises:
        RuntimeError: the content is of a newer version, or of another number of workers with ``"error"``.
    """
    if saved is not None and saved.get("kind", KIND) != KIND:
        saved = None
    if saved is not None and saved["version"] > VERSION:
        raise RuntimeError(
            f"The checkpoint holds residuals in format {saved['version']}, this version of lightning_sparse reads up "
            f"to {VERSION}. Update lightning_sparse."
        )
    state.reset()
    if saved is None:
        rank_zero_info(
            "lightning_sparse: the checkpoint was written without a sparse exchange of gradients. Residuals start from "
            "zero and, with a density, calibration begins."
        )
        return
    workers = state.workers
    if saved["shared"] is not None:
        state.load_shared_state(saved["shared"], same_world_size=saved["world_size"] == workers.num_workers)
        if saved["shared"]["last_step"] is None:
            return  # no step had been made: there were no residuals yet
    residuals = _residuals_for(workers, saved, on_world_size_change)
    if residuals:
        fitting = _fitting(residuals, state.parameter_sizes)
        state.residuals.load_state_dict(fitting, is_as_in_memory=saved["version"] == 1)


def _residuals_for(
    workers: Workers, saved: Mapping[str, Any], on_world_size_change: OnWorldSizeChange
) -> Mapping[str, Tensor]:
    residuals: Sequence[Residuals] | Residuals = saved["residuals"]
    if not residuals:
        why = saved.get("why_no_residuals") or "residual_checkpoint='none'"
        rank_zero_warn(
            f"lightning_sparse: the checkpoint holds no residuals ({why}). They start from zero; what was held back is "
            "lost."
        )
        return {}
    old = saved["world_size"]
    if old != workers.num_workers:
        if on_world_size_change == "error":
            raise RuntimeError(
                f"The checkpoint is of {old} workers, this run has {workers.num_workers}, and on_world_size_change is "
                "'error'. Start as many workers, or use on_world_size_change='mean', which keeps the pending update."
            )
        if on_world_size_change == "reset":
            rank_zero_info(
                f"lightning_sparse: {workers.num_workers} workers instead of {old}: residuals start from zero."
            )
            return {}
        rank_zero_info(
            f"lightning_sparse: {workers.num_workers} workers instead of {old}: each starts from the mean of the old "
            "residuals, so that the pending update stays what it was."
        )
    if isinstance(residuals, Mapping):
        return residuals
    if old == workers.num_workers:
        return residuals[workers.rank]
    return {
        name: (sum(one[name].double() for one in residuals) / old).to(first.dtype)
        for name, first in residuals[0].items()
    }


def _fitting(residuals: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Residuals:
    """The residuals of parameters that the model still has; says which it has not, and which are new."""
    fitting = {name: one for name, one in residuals.items() if sizes.get(name) == one.numel()}
    lost = {name: one for name, one in residuals.items() if name not in fitting}
    new = [name for name in sizes if name not in fitting]
    if lost or new:
        norm = float(torch.stack([one.double().square().sum() for one in lost.values()]).sum().sqrt()) if lost else 0.0
        rank_zero_warn(
            "lightning_sparse: the model is not the one of the checkpoint. "
            + (
                f"Not in the model, or of another size, and lost (norm {norm:.3g}): {_listed(list(lost))}. "
                if lost
                else ""
            )
            + (f"Not in the checkpoint, so residuals of zero: {_listed(new)}. " if new else "")
            + "All others continue."
        )
    return fitting


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
