"""Residuals, λ and counters into a checkpoint and back.

The content, under one key of the checkpoint, plain containers and tensors that ``weights_only=True`` loads::

    kind, version, …       what every strategy saves, see ``lightning_sparse.strategies.content``
    shared                 the same on every worker: settings, λ, calibration, counters, the exchange's history
    residuals              "full": a dict of flat tensors for every rank; "mean": a list of one; "none": empty
    why_no_residuals       None, or why they are missing though they were asked for

Residuals are those of the last whole step, in the order of each parameter's indices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_sparse.ddp.simulation import SimulatedWorker
from lightning_sparse.ddp.sparse_state import SparseState
from lightning_sparse.engine.memory import Residuals
from lightning_sparse.engine.notices import warn_of_forgotten
from lightning_sparse.engine.saved_state import require_seal, sealed, unsent_norm
from lightning_sparse.exchange import raised_together
from lightning_sparse.strategies.content import VERSION, own_content, say_changed_model
from lightning_sparse.strategies.saving import NO_WORKER, is_in_trouble, shortened

ResidualCheckpoint = Literal["full", "mean", "none"]
RESIDUAL_CHECKPOINTS: tuple[ResidualCheckpoint, ...] = ("full", "mean", "none")
OnWorldSizeChange = Literal["mean", "reset", "error"]
ON_WORLD_SIZE_CHANGES: tuple[OnWorldSizeChange, ...] = ("mean", "reset", "error")
KIND = "gradients"
STARTS = "Residuals start from zero and, with a density, calibration begins."


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
    residuals: list[Residuals] = []
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
    world_size: int, shared: dict[str, Any] | None, residuals: list[Residuals], why_not: str | None
) -> dict[str, Any]:
    return sealed(
        {
            "kind": KIND,
            "version": VERSION,
            "world_size": world_size,
            "unsent_norm": unsent_norm(residuals),
            "shared": shared,
            "residuals": residuals,
            "why_no_residuals": why_not,
        }
    )


def _gathered(
    state: SparseState, residual_checkpoint: ResidualCheckpoint, patience: float
) -> tuple[list[Residuals], str | None]:
    """Returns the residuals on the first worker and nothing on others, or nothing and why not."""
    if state.is_saving:  # a signal came in its middle; the others know of one save only
        return [], "it was saved in the middle of another save"
    state.is_saving = True
    try:
        if state.is_exchanging or is_in_trouble():
            patience = shortened(patience)
        status = {"progress": state.settlement.progress, "between optimizer steps": state.is_certain}
        why_not = state.meeting.hold(status, patience).why_not
        if why_not is None and not status["between optimizer steps"]:
            why_not = "the workers are in the middle of an optimizer's step"
        if why_not is not None:
            return [], why_not
        # All of them: in the first step workers may have laid out different buckets already.
        own = dict(sorted(state.residuals.all_layers().items()))
        try:
            return _sent_to_first(own, state, residual_checkpoint), None
        except RuntimeError as error:
            if state.workers.rank != 0:
                raise
            # A worker died or left on the way. The file is worth having without residuals, as plain DDP's is.
            state.meeting.give_up_apart()
            return [], f"gathering them failed: {str(error).splitlines()[0]}"
    finally:
        state.is_saving = False


def _sent_to_first(own: Residuals, state: SparseState, residual_checkpoint: ResidualCheckpoint) -> list[Residuals]:
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
    return [means]


def content_without_state(world_size: int) -> dict[str, Any]:
    """Returns what a checkpoint holds that is saved where no worker lives any more, as after a fit by fork or spawn."""
    rank_zero_warn(
        f"lightning_sparse: the checkpoint is written without residuals: {NO_WORKER}. Have a ModelCheckpoint save "
        "while training goes on, or start workers by torchrun or strategy='ddp_hardthreshold'."
    )
    return _content(world_size, None, [], NO_WORKER)


def restore(
    states: Sequence[SparseState | SimulatedWorker], content: Any, on_world_size_change: OnWorldSizeChange
) -> None:
    """Makes the workers of this process what a checkpoint holds, and nothing else. Collective: every process.

    Args:
        states: of the workers, between two steps.
        content: what ``collect`` returned, or another strategy; None if the checkpoint has nothing of the kind.
        on_world_size_change: see ``CheckpointOptions``.

    Raises:
        RuntimeError: the content is damaged, of a newer version, or of another number of workers with ``"error"``. On
            every worker, before anything was loaded.
    """
    workers = states[0].workers
    with raised_together(workers.group):
        saved = own_content(content, KIND, STARTS)
        if saved is not None:
            require_seal(saved, but=_parts_of_others(saved, states))
            _require_world_size(saved["world_size"], workers.num_workers, on_world_size_change)
    for state in states:
        state.reset()
    if saved is None:
        return
    if saved["shared"] is not None:
        for state in states:
            state.load_shared_state(saved["shared"], same_world_size=saved["world_size"] == workers.num_workers)
        if saved["shared"]["last_step"] is None:
            return  # no step had been made: there were no residuals yet
    for state, residuals in zip(states, _residuals_for(states, saved, on_world_size_change), strict=True):
        sizes = state.parameter_sizes
        fitting = {name: tensor for name, tensor in residuals.items() if sizes.get(name) == tensor.numel()}
        if state is states[0] and residuals:
            lost = {name: tensor for name, tensor in residuals.items() if name not in fitting}
            say_changed_model(lost, [name for name in sizes if name not in fitting], "residuals")
        state.residuals.load_state_dict(fitting)


def _parts_of_others(saved: Mapping[str, Any], states: Sequence[SparseState | SimulatedWorker]) -> tuple[str, ...]:
    """Returns the paths of residuals that only other processes load: no need to look at n times the model."""
    count, residuals = states[0].workers.num_workers, saved.get("residuals")
    if saved.get("world_size") != count or not isinstance(residuals, list) or len(residuals) != count:
        return ()
    own = {state.workers.rank for state in states}
    return tuple(f"residuals/{rank}" for rank in range(count) if rank not in own)


def _require_world_size(saved: int, now: int, on_world_size_change: OnWorldSizeChange) -> None:
    if saved != now and on_world_size_change == "error":
        raise RuntimeError(
            f"The checkpoint is of {saved} workers, this run has {now}, and on_world_size_change is 'error'. Start as "
            "many workers, or use on_world_size_change='mean', which keeps the pending update."
        )


def _residuals_for(
    states: Sequence[SparseState | SimulatedWorker], saved: Mapping[str, Any], on_world_size_change: OnWorldSizeChange
) -> list[Residuals]:
    residuals, old, now = saved["residuals"], saved["world_size"], states[0].workers.num_workers
    nothing: list[Residuals] = [{} for _ in states]
    if not residuals:
        why = saved["why_no_residuals"] or "residual_checkpoint='none'"
        rank_zero_warn(
            f"lightning_sparse: the checkpoint holds no residuals ({why}). Unsent values are lost, and residuals start "
            "from zero."
        )
        return nothing
    if states[0].residuals.forgets:
        warn_of_forgotten(saved["unsent_norm"])
        return nothing
    if old != now:
        mean = on_world_size_change == "mean"
        becomes = "each starts from the mean of the old residuals" if mean else "residuals start from zero"
        rank_zero_info(f"lightning_sparse: the number of workers is {now} instead of {old}: {becomes}.")
        if not mean:
            return nothing
    if old == now == len(residuals):
        return [residuals[state.workers.rank] for state in states]
    mean_residuals = {
        name: (sum(worker[name].double() for worker in residuals) / len(residuals)).to(first.dtype)
        for name, first in residuals[0].items()
    }
    return [mean_residuals for _ in states]
