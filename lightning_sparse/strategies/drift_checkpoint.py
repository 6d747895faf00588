"""What a checkpoint of local training holds: weights that all share, and what each worker has beside them.

The file's own ``state_dict`` is the mean of the workers' weights, so that whoever reads it has one model. Under one
key, plain containers and tensors that ``weights_only=True`` loads::

    kind, version, …
                    what every strategy saves, see ``lightning_sparse.strategies.content``
    shared          the same on every worker: the anchor, the outer optimizer, λ, calibration, counters
    workers         for every rank its weights, what it keeps apart of its drift, its optimizers and the scale of its
                    losses, as far as asked for
    why_no_drifts   None, or why they are missing though they were asked for
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_sparse.drift import SparseModelAverager
from lightning_sparse.engine.saved_state import require_seal, sealed, unsent_norm
from lightning_sparse.exchange import raised_together
from lightning_sparse.strategies.content import VERSION, own_content, say_changed_model
from lightning_sparse.strategies.saving import is_in_trouble, shortened

DriftCheckpoint = Literal["full", "mean"]
OptimizerCheckpoint = Literal["full", "mean", "first"]
KIND = "drifts"
STARTS = "All workers begin with its weights as the anchor and, with a density, with a calibration."


@dataclass(frozen=True)
class DriftCheckpointOptions:
    """What a checkpoint holds of the workers, checked when made.

    Args:
        drift_checkpoint: ``"full"``: every worker's weights, n times the model, so that a run that resumes on as many
            workers equals one that never stopped. ``"mean"``: their mean alone, which the file holds anyway; a resume
            is then like a dense exchange at that moment.
        optimizer_checkpoint: ``"full"``: every worker's optimizers, n times their size; ``"mean"``: the mean of what is
            averaged in them; ``"first"``: the first worker's, for all.

    Raises:
        ValueError: a word that is not allowed.
    """

    drift_checkpoint: DriftCheckpoint = "full"
    optimizer_checkpoint: OptimizerCheckpoint = "full"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("drift_checkpoint", ("full", "mean")),
            ("optimizer_checkpoint", ("full", "mean", "first")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, allowed))}.")


def meet(averager: SparseModelAverager, patience: float, in_a_step: bool) -> str | None:
    """Meets all workers to save, if they come; returns None, or why not. The same on all that came.

    Args:
        averager: this worker's.
        patience: seconds to wait for others.
        in_a_step: whether there may be a forward whose backward is still to come.
    """
    has_trouble = is_in_trouble()
    if has_trouble:
        patience = shortened(patience)
    obstacles = {  # in the status, so that the verdict on them is the same everywhere
        "the weights were changed since all workers had the same": averager.shared.was_written_to,
        "the workers are in the middle of an exchange": averager.is_exchanging,
        # What lands would change weights that a backward needs.
        "an exchange is still travelling": averager.is_sent_off and (has_trouble or in_a_step),
    }
    here = [why for why, is_so in obstacles.items() if is_so]
    why_not = averager.meeting.hold({"steps": averager.num_steps, "obstacles": here}, patience).why_not
    return why_not or next(iter(here), None)


def shared_state_dict(
    averager: SparseModelAverager, state_dict: Callable[[], dict[str, Any]], why_not: str | None
) -> tuple[dict[str, Any], str | None]:
    """Returns a module's state with the weights that all share, and why it has no drifts. Collective if all came.

    Args:
        averager: this worker's.
        state_dict: returns the module's state as it is now.
        why_not: None if all came to save; else the weights are the anchor's.
    """
    shared = averager.shared
    weights = None
    if why_not is None:
        try:
            weights = shared.mean(averager.meeting.workers_apart())
        except RuntimeError as error:
            why_not = _failed("averaging weights", averager, error)
    if weights is None:
        assert why_not is not None
        weights = shared.anchor()
        _warn(averager, "anchor's", why_not)
    with shared.shown(weights):
        return state_dict(), why_not


def _warn(averager: SparseModelAverager, whose: str, why_not: str) -> None:
    if averager.workers.rank == 0:
        warn_of_no_drifts(whose, why_not)


def warn_of_no_drifts(whose: str, why_not: str) -> None:
    """Says once that a checkpoint has weights alone."""
    rank_zero_warn(
        f"lightning_sparse: the checkpoint is written with the {whose} weights and without drifts: {why_not}. "
        "What workers had done since the last exchange, and what was not sent, is not in it."
    )


def _failed(what: str, averager: SparseModelAverager, error: RuntimeError) -> str:
    """Returns why the first worker's file lacks something: a worker died or left on the way. Others raise."""
    if averager.workers.rank != 0:
        raise error
    averager.meeting.give_up_apart()
    return f"{what} failed: {str(error).splitlines()[0]}"


def collect(
    averager: SparseModelAverager,
    checkpoint: dict[str, Any],
    precision: str,
    options: DriftCheckpointOptions,
    why_not: str | None,
    meet_again: Callable[[], str | None],
) -> dict[str, Any] | None:
    """Returns what a checkpoint should hold beside the weights, on the first worker. Collective if all come.

    Args:
        averager: this worker's.
        checkpoint: of Lightning, with this worker's ``optimizer_states``, which may become the mean of all.
        precision: under which it has the precision plugin's state, if that has any.
        options: what to keep.
        why_not: of ``shared_state_dict``: None if the weights are the mean of all workers.
        meet_again: ``meet``.
    """
    own: list[dict[str, Any]] = []
    has_mean = why_not is None
    if has_mean:
        why_not = meet_again()
    if why_not is None:
        try:
            workers = averager.meeting.workers_apart()
            mine = averager.own_state(workers) if options.drift_checkpoint == "full" else averager.kept_state()
            if options.optimizer_checkpoint != "first":
                mine["optimizer_states"] = checkpoint["optimizer_states"]
            if options.optimizer_checkpoint == "full" and precision in checkpoint:
                mine["precision_state"] = checkpoint[precision]
            own = workers.gather_objects_to_first(mine)
        except RuntimeError as error:
            why_not = _failed("gathering them", averager, error)
    if has_mean and why_not is not None:
        _warn(averager, "mean of the workers'", why_not)
    if averager.workers.rank != 0:
        return None
    if own and options.optimizer_checkpoint == "mean":
        checkpoint["optimizer_states"] = _mean([one.pop("optimizer_states") for one in own])
    kept = [worker["kept"] for worker in own if "kept" in worker]
    return sealed(
        {
            "kind": KIND,
            "version": VERSION,
            "world_size": averager.workers.num_workers,
            "unsent_norm": unsent_norm(kept),
            "shared": averager.shared_state() if why_not is None else None,
            "workers": own if any(own) else [],
            "why_no_drifts": why_not,
        }
    )


def restored(
    averager: SparseModelAverager, checkpoint: Mapping[str, Any], precision: str, content: Any
) -> Mapping[str, Any]:
    """Makes an averager what a checkpoint holds; returns the checkpoint with this worker's own state. Collective.

    Args:
        averager: this worker's, whose module has the checkpoint's weights already.
        checkpoint: of Lightning.
        precision: as for ``collect``.
        content: what ``collect`` returned, or another strategy; None if the checkpoint has nothing of the kind.

    Raises:
        RuntimeError: the content is damaged or of a newer version. On every worker, before anything was loaded.
    """
    rank, here = averager.workers.rank, averager.workers.num_workers
    with raised_together(averager.workers.group):
        saved = own_content(content, KIND, STARTS)
        if saved is not None:
            is_same = saved.get("world_size") == here
            require_seal(saved, but=tuple(f"workers/{other}" for other in range(here) if is_same and other != rank))
    averager.restart()
    if saved is None:
        return checkpoint
    workers = saved["workers"]
    if saved["why_no_drifts"] is not None:
        rank_zero_warn(f"lightning_sparse: the checkpoint holds no drifts ({saved['why_no_drifts']}). {STARTS}")
    if saved["shared"] is not None:
        averager.load_shared_state(saved["shared"], same_world_size=is_same)
        _say_changed_model(averager, saved)
    if not is_same:
        rank_zero_info(
            f"lightning_sparse: the number of workers is {here} instead of {saved['world_size']}: all begin with the "
            "mean of the old weights as the anchor, and with the file's own optimizers (rank 0's, or their mean)."
        )
        if workers:
            averager.load_own_state(_mean([{"kept": worker.get("kept", {})} for worker in workers]))
        return checkpoint
    if not workers:
        return checkpoint
    mine = workers[rank]
    averager.load_own_state(mine, is_apart=True)
    places = {"optimizer_states": "optimizer_states", "precision_state": precision}
    return {**checkpoint, **{place: mine[name] for name, place in places.items() if name in mine}}


def _say_changed_model(averager: SparseModelAverager, saved: Mapping[str, Any]) -> None:
    then, now = saved["shared"]["anchor"], averager.anchor()
    unsent = [worker.get("kept", {}) for worker in saved["workers"]]
    lost = {name: tensor for name, tensor in then.items() if name not in now or now[name].numel() != tensor.numel()}
    kept = {name: unsent[0][name] if unsent and name in unsent[0] else torch.zeros(1) for name in lost}
    new = [name for name, tensor in now.items() if name not in then or then[name].numel() != tensor.numel()]
    say_changed_model(kept, new, "unsent drifts")


def _mean(of_workers: Sequence[Any]) -> Any:
    """The mean of floating-point tensors over those that have them; all else is of the first that has it."""
    first = of_workers[0]
    if isinstance(first, torch.Tensor):
        if not (first.is_floating_point() or first.is_complex()):
            return first
        wide = torch.complex128 if first.is_complex() else torch.float64
        same = [one for one in of_workers if isinstance(one, torch.Tensor) and one.shape == first.shape]
        return (sum(one.to(wide) for one in same) / len(same)).to(first.dtype)  # type: ignore[union-attr]
    if isinstance(first, Mapping):
        held = [one for one in of_workers if isinstance(one, Mapping)]
        names = dict.fromkeys(name for one in held for name in one)  # a layer may have trained on some only
        return {name: _mean([one[name] for one in held if name in one]) for name in names}
    if isinstance(first, (list, tuple)):
        return type(first)(_mean(list(ones)) for ones in zip(*of_workers, strict=False))
    return first
