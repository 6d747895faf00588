"""A small network that FSDP2 shards, in a LightningModule, and what it trains on."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.exchange.sharded_tensors import whole
from tests.integration.models import quiet_trainer

STEPS = 8


def build_network(width: int = 9) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    network = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 7, bias=False), nn.Tanh(), nn.Linear(7, 1))
    with torch.no_grad():
        for one in network.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    return network.double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Sharded(LightningModule):
    """Shards its network over the ranks of a replica, or over all in torch's own way."""

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
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        if self.native:
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        for one in self.network[:-1]:  # the outermost module keeps the last layer gathered after a forward
            if list(one.parameters()):
                fully_shard(one, mesh=mesh, mp_policy=self.policy)
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


class Stateless(Sharded):
    """Has an optimizer without a state, and no gradients left after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(24 * STEPS, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's whole, by name, the same on all ranks of a replica."""
    return {name: whole(one.detach()) for name, one in model.named_parameters()}


def fit(strategy: Any, model: LightningModule, **options: Any) -> Any:
    trainer = quiet_trainer(strategy, num_workers=num_ranks(), **({"max_steps": STEPS} | options))
    trainer.fit(model, data(), data())
    return trainer


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])
