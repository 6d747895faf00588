"""What checkpoints hold of each worker, and what a resume makes of it; checked early."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_sparse.engine.transport_options import require_word

ResidualCheckpoint = Literal["full", "mean", "none"]
OnWorldSizeChange = Literal["mean", "reset", "error"]
DriftCheckpoint = Literal["full", "mean"]
OptimizerCheckpoint = Literal["full", "mean", "first"]


@dataclass(frozen=True)
class CheckpointOptions:
    """What a checkpoint of gradient averaging holds, and what another number of workers does with it.

    Args:
        residual_checkpoint: residuals in checkpoints. ``"full"``: every worker's, n times the model in float32, for a
            resume that equals an uninterrupted run; ``"mean"``: their mean, the model once, which keeps the pending
            update (1/n) Σ e_i (not for sharded replicas); ``"none"``: no residuals.
        on_world_size_change: residuals after a resume with another number of workers or replicas. ``"mean"``: the
            mean of the old on each, which keeps the pending update; ``"reset"``: zero; ``"error"``: a RuntimeError.
        is_sharded: whether replicas are sharded.

    Raises:
        ValueError: a word that is not allowed.
    """

    residual_checkpoint: ResidualCheckpoint = "full"
    on_world_size_change: OnWorldSizeChange = "mean"
    is_sharded: bool = False

    def __post_init__(self) -> None:
        allowed = ("full", "none") if self.is_sharded else ("full", "mean", "none")
        require_word("residual_checkpoint", self.residual_checkpoint, allowed)
        require_word("on_world_size_change", self.on_world_size_change, ("mean", "reset", "error"))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of a worker's own tensors that are saved."""
        return () if self.residual_checkpoint == "none" else ("residual",)

    @property
    def saves_mean(self) -> bool:
        """Whether the mean of the workers' tensors is saved instead of each."""
        return self.residual_checkpoint == "mean"


@dataclass(frozen=True)
class DriftCheckpointOptions:
    """What a checkpoint of local training holds.

    Args:
        drift_checkpoint: weights in checkpoints. ``"full"``: every worker's, n times the model, for a resume that
            equals an uninterrupted run; ``"mean"``: their mean, which the checkpoint holds anyway.
        optimizer_checkpoint: optimizers in checkpoints. ``"full"``: every worker's; ``"mean"``: the mean of their
            tensors (not for sharded replicas); ``"first"``: rank 0's.
        is_sharded: whether replicas are sharded.

    Raises:
        ValueError: a word that is not allowed.
    """

    drift_checkpoint: DriftCheckpoint = "full"
    optimizer_checkpoint: OptimizerCheckpoint = "full"
    is_sharded: bool = False

    on_world_size_change: ClassVar[OnWorldSizeChange] = "mean"
    saves_mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_word("drift_checkpoint", self.drift_checkpoint, ("full", "mean"))
        allowed = ("full", "first") if self.is_sharded else ("full", "mean", "first")
        require_word("optimizer_checkpoint", self.optimizer_checkpoint, allowed)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of a worker's own tensors that are saved."""
        return ("weights", "unsent") if self.drift_checkpoint == "full" else ("unsent",)


AnyCheckpointOptions = CheckpointOptions | DriftCheckpointOptions
