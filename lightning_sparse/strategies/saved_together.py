"""A strategy whose checkpoints all ranks write together: a file or a folder that is whole, or none."""

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.exchange import Meeting, Workers
from lightning_sparse.strategies.saving import (
    WholeFiles,
    is_in_trouble,
    part_of,
    patience_of,
    put_in_place,
    shortened,
)


@contextmanager
def stateless_as_before(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Within it states can be asked for. To have one torch steps on zeros, with a learning rate of 0, which counts."""
    without = [one for one in optimizers if not one.state]
    try:
        yield
    finally:
        for one in without:
            one.state.clear()


class SavedTogether(WholeFiles, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` where no rank saves alone, and a kill leaves no half of a checkpoint."""

    _reads_folders = True
    _meeting: Meeting | None = None

    def _agree_where_to_meet(self) -> None:
        """Collective: all ranks, when a fit begins."""
        self._meeting = Meeting(Workers(None, self.global_rank, self.world_size))

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning asks every rank first of all, and then calls save_checkpoint on it.
        if self._meeting is not None and self.lightning_module is not None:
            why_not = self._why_not_together(self._meeting, self.lightning_module.trainer.global_step)
            if why_not is not None:
                raise RuntimeError(
                    f"No checkpoint was written: {why_not}. What is sharded can be saved by all its ranks only."
                )
        return self._module_state()

    def _why_not_together(self, meeting: Meeting, step: int) -> str | None:
        patience = patience_of(self._timeout)
        try:
            return meeting.hold({"step": step}, shortened(patience) if is_in_trouble() else patience).why_not
        except dist.DistNetworkError:  # of the store, which ends with the first worker
            return "the first worker is gone"

    def _module_state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the module. Collective: all ranks."""
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = place = Path(self.broadcast(filepath))
        if self._save_distributed_checkpoint:
            # Where all ranks write, a kill would leave what is in part of this save and in part of the one before.
            place = part_of(path)
            if self.local_rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            self.barrier()
        if "optimizer_states" in checkpoint:
            self._add_own(checkpoint, place)
        super().save_checkpoint(checkpoint, place, storage_options)
        if self._save_distributed_checkpoint:
            self.barrier()
            if self.is_global_zero:
                put_in_place(path)
            self.barrier()
            if self.local_rank == 0 and not self.is_global_zero:
                put_in_place(path)  # where a node has a disk of its own

    @abstractmethod
    def _add_own(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Adds to a checkpoint what a sparse exchange wants to have kept. Collective: all ranks.

        Args:
            checkpoint: what Lightning is about to write.
            path: the file, or the folder in which all ranks write.
        """
