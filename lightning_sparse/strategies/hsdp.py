"""Lightning strategy for models that are sharded inside a replica, and exchanged sparsely between replicas."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_sparse.ddp.options import DensityControlMode, ExchangeOptions, require_density_control
from lightning_sparse.exchange import ExchangeMode
from lightning_sparse.exchange.replicas import replica_mesh
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.shards import ShardExchange
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategies.advice import Advice, exchanges_of
from lightning_sparse.strategies.checkpoint import CheckpointOptions, OnWorldSizeChange
from lightning_sparse.strategies.epochs import tell_epoch
from lightning_sparse.strategies.saving import KEY, WholeFiles
from lightning_sparse.strategies.shard_checkpoint import collect, restore
from lightning_sparse.strategies.step_log import StepLog

ShardResiduals = Literal["full", "none"]
MOST_BACKWARDS = 200
"""After so many without an exchange something is likely to be wrong; accumulation is over fewer."""


class SparseHSDPStrategy(WholeFiles, ModelParallelStrategy):
    """FSDP2 inside a replica, and between replicas a sparse exchange of the gradients of each shard.

    For models that are too big for DDP: a replica is a node, say, whose ranks hold a shard each, and replicas exchange
    only the coordinates that a sparsifier selects, once an optimizer step. A model is written as for Lightning's
    ``ModelParallelStrategy``: in ``configure_model`` it calls ``fully_shard`` with
    ``mesh=self.device_mesh["data_parallel"]``, which here are the ranks of one replica, and ``parallelize_module`` with
    ``self.device_mesh["tensor_parallel"]`` if it likes. All ranks of ``data_parallel`` and all replicas see data of
    their own.

    Logs what `SparseDDPStrategy` logs, of all shards together; ``sparse/payload_bytes`` are those of a replica.

    Args:
        sparsifier: what to send, such as ``HardThreshold(density=0.01)``. λ is one for the whole model; a number of
            coordinates, as of `TopK`, is each shard's own.
        replicas: how many; ``"auto"`` is one a node.
        tensor_parallel_size: ranks that share the tensors of a layer, inside a replica.
        value_dtype: what values travel in, as in `SparseDDPStrategy`; what rounding leaves is kept and sent later.
        exchange: the route between replicas, as in `SparseDDPStrategy`.
        density_control: ``"hold"``, which None stands for: a λ that was calibrated to a density is corrected slowly;
            ``"calibrate"``: it stays constant.
        link_gbit_s: the rate of a rank's link between replicas, in Gbit/s and one direction. Ranks of a node that share
            one link have a share of it each. None is that of `SparseDDPStrategy`.
        residual_checkpoint: what checkpoints hold of residuals. ``"full"``: every replica's, sharded as the parameters
            are; ``"none"``: nothing.
        on_world_size_change: what residuals become when a run resumes with another number of replicas. ``"mean"``: the
            mean of the old on each, which keeps the pending update; ``"reset"``: zero; ``"error"``: a RuntimeError.
            Another number of shards needs nothing.
        save_distributed_checkpoint: as in ``ModelParallelStrategy``: True writes a folder to which every rank
            contributes, False one file with the full model.
        process_group_backend: as there.
        timeout: as there.

    Attributes:
        state: the `ShardExchange` of the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option.
        TypeError: something that is not a sparsifier.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        replicas: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        density_control: DensityControlMode | None = None,
        link_gbit_s: float | None = None,
        residual_checkpoint: ShardResiduals = "full",
        on_world_size_change: OnWorldSizeChange = "mean",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(
                f"Expected a sparsifier such as HardThreshold(threshold=0.01), got {sparsifier!r}. "
                "For a threshold alone use HSDPHardThresholdStrategy(threshold=0.01)."
            )
        for name, value in (("replicas", replicas), ("tensor_parallel_size", tensor_parallel_size)):
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (is_count or (name == "replicas" and value == "auto")):
                word = ' or "auto"' if name == "replicas" else ""
                raise ValueError(f"Invalid {name}={value!r}. Must be a whole number of at least 1{word}.")
        if residual_checkpoint not in ("full", "none"):
            raise ValueError(f"Invalid residual_checkpoint={residual_checkpoint!r}. Must be one of 'full', 'none'.")
        self._checkpoint_options = CheckpointOptions(residual_checkpoint, on_world_size_change)
        self._options = ExchangeOptions(
            value_dtype=value_dtype, exchange=exchange, density_control=density_control, link_gbit_s=link_gbit_s
        )
        require_density_control(sparsifier, density_control)
        require_wire(sparsifier, value_dtype)
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sparsifier = sparsifier
        self.state: ShardExchange | None = None
        self.step_log = StepLog()
        self._replicas = replicas
        self._per_layer_stats = self._is_stepping = False
        self._hooks: list[Any] = []
        self._backwards = 0
        self._outer: tuple[Optimizer, int] | None = None  # that steps now, and the backwards before it
        self._advice = Advice("gradients of shards")

    def request_layer_stats(self) -> None:
        """Asks for per-layer numbers from the next ``fit`` on; on all ranks, in a callback's ``setup``."""
        self._per_layer_stats = True

    def restart(self) -> None:
        """Returns the exchange to before the first step, with the weights of now. Not collective."""
        assert self.state is not None
        self.state.reset()

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
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        self.step_log.clear()
        if self.state is not None:
            self.state.close()  # not when its fit ended: it may have been saved after that
        self.state = ShardExchange(
            self.model,
            self.device_mesh["replicate"],
            self.sparsifier,
            self._options,
            per_layer_stats=self._per_layer_stats,
        )
        self.state.subscribe(self.step_log.add)
        self._advice.follow(self.state, holds_density=self._options.holds_density)
        # Of all optimizers: those that the Trainer does not know of step, too.
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_any_step),
            register_optimizer_step_post_hook(self._after_any_step),
        ]

    # When gradients are exchanged: after backward, before they are clipped and an optimizer steps.

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._is_stepping = True
        try:
            output = super().optimizer_step(optimizer, self._exchanging(optimizer, closure), model, **kwargs)
        finally:
            self._is_stepping = False
        self.step_log.write(self.lightning_module)
        return output

    def _exchanging(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def backward_and_exchange() -> Any:
            loss = closure()
            assert self.state is not None
            self.state.average_gradients(one for group in optimizer.param_groups for one in group["params"])
            return loss

        return backward_and_exchange

    def _before_any_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not all come through the strategy: self.optimizers(use_pl_optimizer=False) hands out torch's own.
        is_inner = self._outer is not None and self._outer[1] == self._backwards  # an optimizer around another
        if self._is_stepping or is_inner or self.state is None or not self.state.holds_any_of(optimizer.param_groups):
            return None
        self._outer = optimizer, self._backwards
        given = args[1] if len(args) > 1 else kwargs.get("closure")
        if given is None:
            self._exchanging(optimizer, lambda: None)()
            return None
        return args[:1], {**kwargs, "closure": self._exchanging(optimizer, torch.enable_grad()(given))}

    def _after_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._outer is not None and self._outer[0] is optimizer:
            self._outer = None
        if not self._is_stepping:
            self.step_log.write(self.lightning_module)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        self._backwards += 1
        if self._backwards == MOST_BACKWARDS and self.state is not None and self.state.last_step is None:
            self._say_nothing_is_exchanged()

    def _say_nothing_is_exchanged(self) -> None:
        rank_zero_warn(
            f"lightning_sparse: in {self._backwards} backwards no torch.optim.Optimizer has stepped on parameters of "
            "the model, so that replicas have exchanged nothing and part. If weights are updated by other means, call "
            "strategy.state.average_gradients() before each update. See docs/big-models.md."
        )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._backwards = 0
        self._advice.begin(self.optimizers, exchanges_of(self.lightning_module))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.step_log.begin_batch(self.lightning_module)
        if self.state is not None:
            tell_epoch(self.state, self)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._advice.end()
        if self.state is not None and self.state.last_step is None and self._backwards:
            self._say_nothing_is_exchanged()

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().teardown()

    # What is saved.

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.state is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = collect(
                self.state,
                Path(self.broadcast(filepath)),
                keeps_residuals=self._checkpoint_options.residual_checkpoint == "full",
                in_one_file=not self._save_distributed_checkpoint,
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *others: Any, **options: Any) -> dict[str, Any]:
        # What can be said beside the path differs between versions of Lightning.
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *others, **options)
        assert self.lightning_module is not None
        if self.state is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            path = Path(self.broadcast(checkpoint_path))
            restore(self.state, checkpoint.get(KEY), path, self._checkpoint_options.on_world_size_change)
        return checkpoint
