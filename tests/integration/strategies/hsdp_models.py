"""Small LightningModules that FSDP2 shards, their data, and functions that train them."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy
from lightning_sparse.engine.grouping import local
from lightning_sparse.exchange.sharded_tensors import full_tensors
from tests.integration.models import quiet_trainer
from tests.workers import on_workers, run_workers

STEPS = 8
GRADIENTS, DRIFTS = HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy


def build_network(width: int = 9) -> nn.Sequential:
    """Return layers with uneven shards on two ranks; the second rank has no shard of the last layer."""
    generator = torch.Generator().manual_seed(3)
    network = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 7, bias=False), nn.Tanh(), nn.Linear(7, 1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network.double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Sharded(LightningModule):
    """Shards its network over the ranks of a replica, or as torch's HSDP does; without a mesh, shards nothing."""

    policy = MixedPrecisionPolicy()

    def __init__(self, *, native: bool = False) -> None:
        super().__init__()
        self.network: Any = None
        self.native = native
        self.batches: list[tuple[Tensor, Tensor]] = []

    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.network = self.make_network()
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        if self.native:
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        for layer in self.network[:-1]:  # the outermost module keeps the last layer gathered after a forward
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh, mp_policy=self.policy)
        fully_shard(self.network, mesh=mesh, mp_policy=self.policy)

    def make_network(self) -> nn.Sequential:
        return build_network()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.parameters())


class WithAdam(Sharded):
    def configure_optimizers(self) -> Any:
        return adam(self.parameters())


class Manual(Sharded):
    """Steps in manual optimization, with Lightning's optimizer or the raw torch optimizer."""

    def __init__(self, *, native: bool = False, uses_raw: bool = False, uses_closure: bool = False) -> None:
        super().__init__(native=native)
        self.automatic_optimization = False
        self.uses_raw, self.uses_closure = uses_raw, uses_closure

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.batches.append(batch)
        optimizer: Any = self.optimizers(use_pl_optimizer=not self.uses_raw)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if self.uses_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


class Stateless(Manual):
    """Has an optimizer without state, and drops its gradients after each step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Unfreezing(Sharded):
    """Trains its first layer from the fourth step on, also after a resume."""

    first_step = 3

    def configure_model(self) -> None:
        super().configure_model()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.network[0].requires_grad_(self.trainer.global_step >= self.first_step)


class Tensors(Sharded):
    """Splits two layers by tensor parallelism, and shards all layers over the data-parallel ranks of a replica."""

    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.network = build_network(8)  # torch does not shard layers of 9, which it splits unevenly
        assert self.device_mesh is not None
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)
        for module in (self.network[0], self.network[2], self.network[4], self.network):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class TensorsWithAdam(Tensors, WithAdam):
    pass


class Numbers(Callback):
    """Records the statistics of all exchanges, and whether weights were finite after each batch."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.weights: list[bool] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.state.subscribe(self.steps.append)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(all(bool(local(weight).isfinite().all()) for weight in pl_module.parameters()))


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(24 * STEPS, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4)


def replica_batches(batches_of_ranks: list[list[Any]], ranks: int) -> list[list[Any]]:
    """Return the batch of each replica in each step, joined from the batches of its data-parallel ranks."""
    return [
        [tuple(map(torch.cat, zip(*step[i : i + ranks], strict=True))) for i in range(0, len(step), ranks)]
        for step in zip(*batches_of_ranks, strict=True)
    ]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full tensor of every parameter by name. Collective in a replica."""
    return {name: full_tensors(parameter.detach()) for name, parameter in model.named_parameters()}


def fit(strategy: Any, model: LightningModule, **options: Any) -> Any:
    trainer = quiet_trainer(strategy, **({"max_steps": STEPS} | options))
    trainer.fit(model, data(), data())
    return trainer


on_ranks = partial(on_workers, process_group=False, new=True)
"""Turns a function that every rank runs into a test, in new processes."""

run_ranks = partial(run_workers, process_group=False, new=True)
"""Runs a function on all ranks, in new processes."""
