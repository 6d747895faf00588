"""Lightning strategy for models that are sharded inside a replica, and exchanged sparsely between replicas."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.ddp.options import DensityControlMode, ExchangeOptions, require_density_control
from lightning_sparse.engine.optimizer_steps import Arguments, StepObserver
from lightning_sparse.exchange import ExchangeMode, require_agreement
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.shards import ShardExchange
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategies.advice import exchanges_of
from lightning_sparse.strategies.checkpoint import CheckpointOptions, OnWorldSizeChange
from lightning_sparse.strategies.content import KEY
from lightning_sparse.strategies.replica_strategy import ReplicaStrategy
from lightning_sparse.strategies.shard_checkpoint import collect, restore

ShardResiduals = Literal["full", "none"]


class SparseHSDPStrategy(ReplicaStrategy):
    """FSDP2 inside a replica, and between replicas a sparse exchange of the gradients of each shard.

    For models that are too big for DDP: a replica is a node, say, whose ranks hold a shard each, and replicas exchange
    only the coordinates that a sparsifier selects, once an optimizer step. A model is written as for Lightning's
    ``ModelParallelStrategy``: in ``configure_model`` it calls ``fully_shard`` with
    ``mesh=self.device_mesh["data_parallel"]``, which here are the ranks of one replica, and ``parallelize_module`` with
    ``self.device_mesh["tensor_parallel"]`` if it likes. All ranks of ``data_parallel`` and all replicas see data of
    their own.

    Logs what `SparseDDPStrategy` logs, of all shards together; ``sparse/payload_bytes`` are those of a replica.

    Args:
        sparsifier: what to send, such as ``HardThreshold(density=0.01)``. λ is one for the whole model, or for
            a whole layer; a number of coordinates, as of `TopK`, is each shard's own.
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
        **kwargs: of Lightning's ``ModelParallelStrategy``: ``save_distributed_checkpoint`` (True writes a folder to
            which every rank contributes, False one file with the full model), ``process_group_backend`` and
            ``timeout``.

    Attributes:
        state: the `ShardExchange` of the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    state: ShardExchange | None
    _call_each_step = "average_gradients() before"

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
        **kwargs: Any,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(
                f"Expected a sparsifier such as HardThreshold(threshold=0.01), got {sparsifier!r}. "
                "For a threshold alone use HSDPHardThresholdStrategy(threshold=0.01)."
            )
        if residual_checkpoint not in ("full", "none"):
            raise ValueError(f"Invalid residual_checkpoint={residual_checkpoint!r}. Must be one of 'full', 'none'.")
        self._checkpoint_options = CheckpointOptions(residual_checkpoint, on_world_size_change)
        self._options = ExchangeOptions(
            value_dtype=value_dtype, exchange=exchange, density_control=density_control, link_gbit_s=link_gbit_s
        )
        require_density_control(sparsifier, density_control)
        require_wire(sparsifier, value_dtype)
        super().__init__(
            sparsifier,
            replicas,
            tensor_parallel_size,
            "gradients of shards",
            **kwargs,
        )
        self._observer: StepObserver | None = None

    @override
    def _make_state(self) -> ShardExchange:
        assert self.model is not None
        require_agreement(asdict(self._checkpoint_options) | {"in one file": not self._save_distributed_checkpoint})
        state = ShardExchange(
            self.model,
            self.device_mesh["replicate"],
            self.sparsifier,
            self._options,
            per_layer_stats=self._per_layer_stats,
        )
        self._advice.follow(state, holds_density=self._options.holds_density)
        self._observer = StepObserver(state.holds_any_of, self._before_any_step, self._after_any_step)
        return state

    @override
    def teardown(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        super().teardown()

    @property
    @override
    def _progress(self) -> object:
        return None if self.state is None else self.state.last_step

    # When gradients are exchanged: after backward, before they are clipped and an optimizer steps.

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._nothing_counts():
            output = super().optimizer_step(optimizer, self._exchanging(optimizer, closure), model, **kwargs)
        self.step_log.write(self.lightning_module, self.state)
        return output

    def _exchanging(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def backward_and_exchange() -> Any:
            loss = closure()
            assert self.state is not None
            self.state.average_gradients(one for group in optimizer.param_groups for one in group["params"])
            return loss

        return backward_and_exchange

    def _before_any_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments | None:
        if self._is_stepping:
            return None
        args, kwargs = arguments
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._exchanging(optimizer, lambda: None)()
            return None
        return args[:1], {**kwargs, "closure": self._exchanging(optimizer, torch.enable_grad()(closure))}

    def _after_any_step(self, _: Optimizer) -> None:
        if not self._is_stepping:
            self.step_log.write(self.lightning_module, self.state)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._advice.begin(self.optimizers, exchanges_of(self.lightning_module))

    # What is saved.

    @override
    def _add_own(self, checkpoint: dict[str, Any], path: Path) -> None:
        if self.state is None:
            return
        checkpoint[KEY] = collect(
            self.state,
            path,
            keeps_residuals=self._checkpoint_options.residual_checkpoint == "full",
            in_one_file=not self._save_distributed_checkpoint,
        )

    @override
    def _restore(self, checkpoint: dict[str, Any], path: Path) -> None:
        assert self.state is not None
        restore(self.state, checkpoint.get(KEY), path, self._checkpoint_options.on_world_size_change)
