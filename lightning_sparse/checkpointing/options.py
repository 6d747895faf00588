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
        residual_checkpoint: ``"full"``: every worker's residuals, n times the size of the model in float32; a resume
            on as many workers equals an uninterrupted run. ``"mean"``: their mean, the size of the model once; the
            pending update (1/n) Σ e_i is kept, but not which worker holds it. ``"none"``: no residuals; a resume
            loses unsent values. Sharded replicas have no ``"mean"``.
        on_world_size_change: ``"mean"``: every worker starts from the mean of the saved residuals, which keeps the
            pending update; ``"reset"``: from zero; ``"error"``: RuntimeError.
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
        drift_checkpoint: ``"full"``: every worker's weights, n times the model; a resume on as many workers equals an
            uninterrupted run. ``"mean"``: only their mean, which the file holds anyway; a resume is then like a dense
            exchange at that moment.
        optimizer_checkpoint: ``"full"``: every worker's optimizers, n times their size; ``"mean"``: the mean of their
            tensors; ``"first"``: rank 0's, for all. Sharded replicas have no ``"mean"``.
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
