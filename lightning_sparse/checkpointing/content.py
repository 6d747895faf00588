"""The format of checkpoints, their options, and messages about state that a checkpoint lacks.

All strategies write the same fields under one key, plain containers and tensors that ``weights_only=True`` loads::

    kind            the kind of averaging: a key of ``WRITERS``
    version         of the format
    world_size      number of workers, or of replicas
    ranks           number of ranks in each replica; 1 if the model is not sharded
    unsent_norm     sqrt((1/n) Σ_i ‖e_i‖²) of the workers' unsent values; None if they have none or none are saved
    numbers         ``Snapshot.numbers``; None where no state could be saved
    histories       for every rank of a replica its ``Snapshot.history``
    shared          ``Snapshot.shared``, whole tensors
    workers         for every worker its ``Snapshot.own``, whole tensors; one entry if only their mean was asked for
    extras          for every rank of a replica a list with every worker's ``Snapshot.extra``
    has_folder      whether ``shared`` and ``workers`` are in the folder ``FOLDER`` instead, written by all ranks
    why_incomplete  None, or why tensors are missing that were asked for
    seal            see ``lightning_sparse.engine.snapshot``
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_sparse.engine.snapshot import DamagedStateError
from lightning_sparse.engine.transport_options import require_word

ResidualCheckpoint = Literal["full", "mean", "none"]
OnWorldSizeChange = Literal["mean", "reset", "error"]
DriftCheckpoint = Literal["full", "mean"]
OptimizerCheckpoint = Literal["full", "mean", "first"]

KEY = FOLDER = "lightning_sparse"
SHARED, OPTIMIZERS = "shared", "optimizers"
"""Names of the tensors that all workers share, and of a worker's optimizer states as nested dicts."""
VERSION = 1
WRITERS = {
    "gradients": "a ddp_* or hsdp_* strategy or simulated workers",
    "drifts": "a local_* or local_hsdp_* strategy",
}
STARTS = {
    "gradients": "Residuals start from zero and, with a density, calibration begins.",
    "drifts": "All workers begin with its weights as the anchor and, with a density, with a calibration.",
}
UNSENT = {"gradients": "residual", "drifts": "unsent"}
"""The kind of tensors that hold unsent values."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints; those of the other kind of averaging have no effect.

    Args:
        residual_checkpoint: residuals in checkpoints. ``"full"``: every worker's, n times the model in float32, for a
            resume that equals an uninterrupted run; ``"mean"``: their mean, the model once, which keeps the pending
            update (1/n) Σ e_i (not for sharded replicas); ``"none"``: no residuals.
        on_world_size_change: residuals after a resume with another number of workers or replicas. ``"mean"``: the
            mean of the old on each, which keeps the pending update; ``"reset"``: zero; ``"error"``: a RuntimeError.
        drift_checkpoint: weights in checkpoints. ``"full"``: every worker's, n times the model, for a resume that
            equals an uninterrupted run; ``"mean"``: their mean, which the checkpoint holds anyway.
        optimizer_checkpoint: optimizers in checkpoints. ``"full"``: every worker's; ``"mean"``: the mean of their
            tensors (not for sharded replicas); ``"first"``: rank 0's.
        is_sharded: whether replicas are sharded, for which there are no means.

    Raises:
        ValueError: a word that is not allowed.
    """

    residual_checkpoint: ResidualCheckpoint = "full"
    on_world_size_change: OnWorldSizeChange = "mean"
    drift_checkpoint: DriftCheckpoint = "full"
    optimizer_checkpoint: OptimizerCheckpoint = "full"
    is_sharded: bool = False

    def __post_init__(self) -> None:
        full = ("full",) if self.is_sharded else ("full", "mean")
        require_word("residual_checkpoint", self.residual_checkpoint, (*full, "none"))
        require_word("on_world_size_change", self.on_world_size_change, ("mean", "reset", "error"))
        require_word("drift_checkpoint", self.drift_checkpoint, ("full", "mean"))
        require_word("optimizer_checkpoint", self.optimizer_checkpoint, (*full, "first"))


def own_content(content: Any, kind: str) -> Mapping[str, Any] | None:
    """Return a checkpoint's entry under ``KEY`` if averaging of this kind saved it, else None after a message.

    Raises:
        DamagedStateError: no version of this package wrote the content.
        RuntimeError: a newer version wrote it.
    """
    if content is None:
        rank_zero_info(f"lightning_sparse: the checkpoint was written without a sparse exchange. {STARTS[kind]}")
        return None
    fields = content if isinstance(content, Mapping) else {}
    writer, version, unsent = fields.get("kind"), fields.get("version"), fields.get("unsent_norm")
    if not isinstance(writer, str) or writer not in WRITERS:
        raise DamagedStateError("kind", f"is {writer!r}, which is none of {', '.join(map(repr, WRITERS))}")
    if not isinstance(version, int) or not isinstance(unsent, (float, type(None))):
        raise DamagedStateError("version", f"is {version!r}")
    if version > VERSION:
        raise RuntimeError(
            f"The checkpoint holds {writer} in format {version}, and this version of lightning_sparse reads formats up "
            f"to {VERSION}. Update lightning_sparse."
        )
    if writer == kind:
        return fields
    who = WRITERS[writer]
    if unsent:
        rank_zero_warn(
            f"lightning_sparse: {who} wrote the checkpoint. The unsent {writer} (norm {unsent:.3g}) are lost. "
            f"{STARTS[kind]}"
        )
    else:
        rank_zero_info(f"lightning_sparse: {who} wrote the checkpoint. It holds no unsent {writer}. {STARTS[kind]}")
    return None


def say_incomplete(kind: str, why: str) -> None:
    """Warn that a checkpoint of the right kind holds no tensors of workers."""
    if kind == "gradients":
        lost = "Unsent values are lost, and residuals start from zero."
        rank_zero_warn(f"lightning_sparse: the checkpoint holds no residuals ({why}). {lost}")
    else:
        rank_zero_warn(f"lightning_sparse: the checkpoint holds no drifts ({why}). {STARTS[kind]}")


def warn_of_incomplete(kind: str, why: str, weights: str = "mean of the workers'") -> None:
    """Warn that a checkpoint is written without tensors of workers, for drifts with the weights of this owner."""
    if kind == "gradients":
        rank_zero_warn(
            f"lightning_sparse: the checkpoint is written without residuals: {why}. A run that resumes from it begins "
            "with residuals of zero; unsent values are lost."
        )
    else:
        rank_zero_warn(
            f"lightning_sparse: the checkpoint is written with the {weights} weights and without drifts: {why}. It "
            "lacks what workers did since the last exchange, and unsent values."
        )
