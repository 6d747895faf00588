"""What strategies have in common whose replicas are sharded: who belongs together, and which steps count."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.exchange.replicas import replica_mesh
from lightning_sparse.shards import ShardExchange, ShardModelAverager
from lightning_sparse.shards.resharded import reshard
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategies.advice import Advice
from lightning_sparse.strategies.arguments import model_parallel_arguments
from lightning_sparse.strategies.epochs import tell_epoch
from lightning_sparse.strategies.saved_together import SavedTogether, stateless_as_before
from lightning_sparse.strategies.seen_steps import SeesSteps
from lightning_sparse.strategies.step_log import StepLog


class ReplicaStrategy(SeesSteps, SavedTogether):
    """Lightning's ``ModelParallelStrategy`` with replicas as the first dimension of its mesh.

    Args:
        sparsifier: what to send.
        replicas: how many; ``"auto"`` is one a node.
        tensor_parallel_size: ranks that share the tensors of a layer, inside a replica.
        what: is exchanged, in words.
        **kwargs: of ``ModelParallelStrategy``.

    Attributes:
        state: what exchanges in the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option.
        TypeError: a misspelt argument.
    """

    state: ShardExchange | ShardModelAverager | None

    def __init__(
        self,
        sparsifier: Sparsifier,
        replicas: Literal["auto"] | int,
        tensor_parallel_size: int,
        what: str,
        **kwargs: Any,
    ) -> None:
        for name, value in (("replicas", replicas), ("tensor_parallel_size", tensor_parallel_size)):
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (is_count or (name == "replicas" and value == "auto")):
                word = ' or "auto"' if name == "replicas" else ""
                raise ValueError(f"Invalid {name}={value!r}. Must be a whole number of at least 1{word}.")
        kwargs = model_parallel_arguments(kwargs, type(self))
        super().__init__(tensor_parallel_size=tensor_parallel_size, **kwargs)
        self.sparsifier = sparsifier
        self.state = None
        self.step_log = StepLog()
        self._replicas = replicas
        self._per_layer_stats = False
        self._advice = Advice(what)

    def request_layer_stats(self) -> None:
        """Asks for per-layer numbers from the next ``fit`` on; on all ranks, in a callback's ``setup``."""
        self._per_layer_stats = True

    # What is exchanged is for those who inherit to say.

    @abstractmethod
    def _make_state(self) -> ShardExchange | ShardModelAverager:
        """Returns what exchanges, for the model that has been set up. Collective: all ranks."""

    # Who belongs together.

    @override
    def setup_environment(self) -> None:
        size = self.num_nodes * self.num_processes
        replicas = self.num_nodes if self._replicas == "auto" else self._replicas
        tensor = self._tensor_parallel_size
        assert isinstance(tensor, int)
        shards, rest = divmod(size, replicas * tensor)
        if rest or not shards:
            raise ValueError(
                f"{size} ranks cannot be {replicas} replicas of equal size with "
                f"tensor_parallel_size={tensor}. Start a multiple of {replicas * tensor}, or set another replicas=…"
            )
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self._data_parallel_size = shards
        names = ("replicate", "data_parallel", "tensor_parallel")
        self._device_mesh = replica_mesh(self.root_device.type, (replicas, shards, tensor), names)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        replicas, shards, _ = self.device_mesh.shape
        rank = self.device_mesh.get_local_rank("replicate") * shards + self.device_mesh.get_local_rank("data_parallel")
        return {"num_replicas": replicas * shards, "rank": rank}

    @override
    def setup(self, trainer: Trainer) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            raise ValueError(
                "Scaled losses (precision='16-mixed') are not supported between replicas of shards. Use "
                "precision='bf16-mixed' or 'bf16-true', or fully_shard(…, mp_policy=MixedPrecisionPolicy(…))."
            )
        assert self.model is not None
        reshard(self.model)  # after a validation optimizers would be made for what it has gathered
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self.step_log.clear()
        if self.state is not None:
            self.state.close()  # not when its fit ended: it may have been saved after that
        self.state = self._make_state()
        self._agree_where_to_meet()
        self.state.subscribe(self.step_log.add)

    # Which steps count.

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        held = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._nothing_counts(), stateless_as_before([held]):
            return super().optimizer_state(optimizer)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *others: Any, **options: Any) -> dict[str, Any]:
        # What can be said beside the path differs between versions of Lightning.
        with self._nothing_counts():
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *others, **options)
            assert self.lightning_module is not None
            if self.state is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
                self._restore(checkpoint, Path(self.broadcast(checkpoint_path)))
        return checkpoint

    @abstractmethod
    def _restore(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Makes what exchanges what a checkpoint holds. Collective: all ranks."""

    # Before and after steps.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.step_log.begin_batch(self.lightning_module)
        if self.state is not None:
            tell_epoch(self.state, self)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        assert self.model is not None
        reshard(self.model)  # optimizers made from now on must not be for what it has gathered

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._advice.end()

    @override
    def teardown(self) -> None:
        if self.state is not None:
            self.state.own_group.release()  # it may be saved after this, and steps no more
        super().teardown()
