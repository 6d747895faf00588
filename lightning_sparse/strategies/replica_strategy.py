"""The base class of strategies with sharded replicas."""

import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.checkpointing.content import KEY, warn_of_incomplete
from lightning_sparse.checkpointing.files import part_of, put_in_place, require_replaceable, set_aside
from lightning_sparse.checkpointing.restoring import restore
from lightning_sparse.checkpointing.saving import collect
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.sharding import reshard
from lightning_sparse.exchange.agreement import gather_objects, require_agreement
from lightning_sparse.exchange.groups import replica_mesh
from lightning_sparse.exchange.save_barrier import SaveBarrier
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.sparsifiers.checks import require_count
from lightning_sparse.sparsifiers.protocol import Sparsifier
from lightning_sparse.strategies.arguments import model_parallel_arguments
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class ReplicaStrategy(SparseStrategy, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with replicas as the first dimension of its mesh.

    All ranks save together, and a kill leaves no partial checkpoint.

    Args:
        replicas: number of replicas; ``"auto"`` is one per node.
        tensor_parallel_size: ranks that share the tensors of a layer, inside a replica.
        **kwargs: arguments of Lightning's ``ModelParallelStrategy``: ``save_distributed_checkpoint`` (True writes a
            folder with files of all ranks; False writes one file, for which rank 0 needs enough memory),
            ``process_group_backend`` and ``timeout``.
    """

    _averager_class: ClassVar[Any]
    _lightning_arguments = model_parallel_arguments
    _save_barrier: SaveBarrier | None = None
    _awaits_step = False
    """Whether gradients were exchanged, and the optimizer's step on them has not ended."""

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        replicas: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if replicas != "auto":
            require_count("replicas", replicas, instead=' or "auto"')
        require_count("tensor_parallel_size", tensor_parallel_size)
        self._replicas = replicas
        super().__init__(sparsifier, tensor_parallel_size=tensor_parallel_size, **kwargs)

    @override
    def setup_environment(self) -> None:
        size = self.num_nodes * self.num_processes
        replicas = self.num_nodes if self._replicas == "auto" else self._replicas
        tensor = self._tensor_parallel_size
        assert isinstance(tensor, int)
        shards, rest = divmod(size, replicas * tensor)
        if rest or not shards:
            raise ValueError(
                f"Got {size} ranks, which cannot form {replicas} replicas of equal size with "
                f"tensor_parallel_size={tensor}. Start a multiple of {replicas * tensor} ranks, or change replicas=…"
            )
        self._setup_distributed()
        self._data_parallel_size = shards
        self._device_mesh = replica_mesh(self.root_device.type, replicas, shards, tensor)
        self._module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        tensor = self.device_mesh["tensor_parallel"].size()
        return {"num_replicas": self.world_size // tensor, "rank": self.global_rank // tensor}

    @override
    def setup(self, trainer: Trainer) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "Scaled losses (precision='16-mixed') are not supported between replicas of shards. Use "
                "precision='bf16-mixed' or 'bf16-true', or fully_shard(…, mp_policy=MixedPrecisionPolicy(…))."
            )
        reshard(self._module)  # after validation, optimizers would be made for gathered parameters
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.state is not None:
            self.state.close()  # not at the end of its fit, because a checkpoint may follow
        require_agreement({"worker_state": self.worker_state, "in one file": not self._save_distributed_checkpoint})
        mesh = self.device_mesh["replicate"]
        self._begin_fit(
            self._averager_class(
                self.model, self.sparsifier, self._options, group=mesh, per_layer_stats=self.per_layer_stats
            )
        )
        self._save_barrier = SaveBarrier(Workers(None, self.global_rank, self.world_size))

    # Steps that do not train.

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        is_stateless = not optimizer.state
        with self._ignoring_steps():
            state = super().optimizer_state(optimizer)
        if is_stateless:
            optimizer.state.clear()  # torch has created it, by a step with lr 0
        return state

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *others: Any, **options: Any) -> dict[str, Any]:
        # The arguments after the path differ between versions of Lightning.
        is_fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._module.zero_grad()  # with gradients, torch would not create the optimizer states that it loads
        with self._ignoring_steps():
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *others, **options)
            if is_fitting:
                path = Path(self.broadcast(checkpoint_path))
                restore(self.averagers, checkpoint.get(KEY), path=path, module=self.model, optimizers=self.optimizers)
        return checkpoint

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        reshard(self._module)  # later optimizers must not be made for gathered parameters

    @override
    def teardown(self) -> None:
        if self.state is not None:
            self.state.step_observer.close()
            self.state.own_group.release()  # a checkpoint may follow, but no step
        super().teardown()

    # Checkpoints.

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning calls this on every rank first, and then save_checkpoint.
        if (barrier := self._save_barrier) is not None:
            step = {"step": self._module.trainer.global_step}
            why_not = barrier.wait(step, barrier.patience(self._timeout))
            if why_not is not None:
                cause = " The exception above ended the training." * (barrier.handled_error is not None)
                raise RuntimeError(
                    f"No checkpoint was written: {why_not}. Saving a sharded model needs all of its ranks.{cause}"
                )
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = place = Path(self.broadcast(filepath))
        require_replaceable(path)
        self.barrier()
        if self._save_distributed_checkpoint:
            place = part_of(path)  # directly in path, a kill would leave a mixture of this save and an earlier one
        if self.global_rank == 0:
            shutil.rmtree(part_of(path), ignore_errors=True)  # a kill has left it
            if part_of(path).is_file():
                part_of(path).unlink()
            if place is path:
                set_aside(path)  # Lightning would let all ranks remove a folder at once
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, place, storage_options)
            self.barrier()
        except BaseException:
            if self.global_rank == 0:
                shutil.rmtree(part_of(path), ignore_errors=True)
            raise
        if self.global_rank == 0:
            put_in_place(path)
        self.barrier()

    @override
    def _content(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
        averager: Averager = self.state
        optimizers = self._own_optimizers(averager, checkpoint)
        why_not = self._why_not_saved(averager)
        if why_not is not None:
            warn_of_incomplete(averager.kind, why_not)
        folder = path if self._save_distributed_checkpoint else None
        return collect(
            averager, averager.workers, self.worker_state, why_not=why_not, folder=folder, optimizers=optimizers
        )

    def _own_optimizers(self, averager: Averager, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return this replica's own optimizer states by index; may empty the checkpoint's."""
        return {}

    def _why_not_saved(self, averager: Averager) -> str | None:
        """Return the reason if tensors of replicas cannot be saved, else None. Collective."""
        obstacles = averager.obstacles()
        obstacles += ["it was saved between an exchange and the optimizer's step"] * self._awaits_step
        return next((why for of_rank in gather_objects(obstacles) for why in of_rank), None)
