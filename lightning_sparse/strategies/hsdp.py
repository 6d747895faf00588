"""Lightning strategies with a sparse exchange between replicas of sharded models."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.drift.model_averager import SparseModelAverager
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.optimizer_steps import Arguments, weak_method
from lightning_sparse.engine.options import ExchangeOptions
from lightning_sparse.gradients.shard_averager import ShardGradientAverager
from lightning_sparse.sparsifiers.protocol import Sparsifier
from lightning_sparse.strategies.local import LocalTraining
from lightning_sparse.strategies.replica_strategy import ReplicaStrategy


class SparseHSDPStrategy(ReplicaStrategy):
    """FSDP2 inside replicas, and a sparse exchange of gradients between replicas.

    Use it for models that are too big for DDP. A replica is, for example, a node with one shard per rank. Replicas
    exchange only the coordinates that a sparsifier selects, once per optimizer step. Write a model as for Lightning's
    ``ModelParallelStrategy``: in ``configure_model``, call ``fully_shard`` with
    ``mesh=self.device_mesh["data_parallel"]``, the ranks of one replica, and optionally ``parallelize_module`` with
    ``self.device_mesh["tensor_parallel"]``. Each rank of ``data_parallel`` in each replica gets its own data.

    Logs the metrics of `SparseDDPStrategy`, over all shards; ``sparse/payload_bytes`` counts a whole replica. λ
    is equal in all shards, per model or layer. A number of coordinates, as in `TopK`, is per shard.

    Attributes:
        state: the `ShardGradientAverager` of the running or last ``fit``, None before.
    """

    state: ShardGradientAverager | None
    _options_class: ClassVar[type] = ExchangeOptions
    _averager_class = ShardGradientAverager
    _call_each_step = "average_gradients() before"

    def __init__(self, sparsifier: Sparsifier, **kwargs: Any) -> None:
        self._options = self._make_options(ExchangeOptions, kwargs)
        super().__init__(sparsifier, **kwargs)

    @override
    def _begin_fit(self, state: Any) -> None:
        super()._begin_fit(state)
        self._awaits_step = False
        state.step_observer.on_begin = weak_method(self._before_any_step)

    # Gradients are exchanged after backward, before clipping and the optimizer step.

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        return super().optimizer_step(optimizer, partial(self._run_and_exchange, optimizer, closure), model, **kwargs)

    def _run_and_exchange(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        loss = closure()
        assert self.state is not None
        self._awaits_step = True
        self.state.average_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])
        return loss

    @override
    def _after_step(self, stepped: Any) -> None:
        self._awaits_step = False
        super()._after_step(stepped)

    def _before_any_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments | None:
        if self._ignores_steps:
            return None
        args, kwargs = arguments
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._run_and_exchange(optimizer, lambda: None)
            return None
        whole = partial(self._run_and_exchange, optimizer, torch.enable_grad()(closure))
        return ((args[0], whole, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": whole})


class SparseLocalHSDPStrategy(ReplicaStrategy, LocalTraining):
    """FSDP2 inside replicas, and local training with a sparse exchange between replicas.

    Use it for models that are too big for DDP, with optimizers that normalise gradients, such as Adam. Each replica
    runs its own optimizer. Every ``every_n_steps`` optimizer steps, replicas exchange the drifts of their weights from
    the shared anchor. See `SparseModelAverager`; write a model as for `SparseHSDPStrategy`.

    Validation, test, predict, checkpoints and the module after ``fit`` have the mean of the replicas' weights. Logs the
    metrics of `SparseLocalStrategy`, over all shards; see `SparseHSDPStrategy` for their scope.

    Attributes:
        state: the `SparseModelAverager` of the running or last ``fit``, None before.
    """

    state: SparseModelAverager | None
    _averager_class = SparseModelAverager

    @override
    def _mean_weights(self, averager: SparseModelAverager) -> tuple[dict[str, Tensor] | None, str | None]:
        why_not = self._why_not_saved(averager)
        return (averager.shared.mean(averager.workers) if why_not is None else None), why_not

    @override
    def _own_optimizers(self, averager: Averager, checkpoint: dict[str, Any]) -> dict[str, Any]:
        states = {}
        for at, optimizer in enumerate(self.optimizers if self.worker_state == "full" else []):
            if optimizer.state:  # otherwise torch would create it by a step
                states[str(at)] = get_optimizer_state_dict(self._module, optimizer)
        if averager.workers.rank != 0 and self._save_distributed_checkpoint:
            checkpoint["optimizer_states"] = []  # rank 0's replica writes the states that any strategy reads
        return states
