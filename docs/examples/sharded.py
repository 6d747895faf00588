"""Sparse exchange between replicas of a model that FSDP2 shards, in plain PyTorch.

Run two replicas of two ranks each on this machine. In a cluster, a replica is usually a node:

    torchrun --standalone --nproc-per-node=4 docs/examples/sharded.py
"""

from statistics import fmean

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sparse import HardThreshold, ShardGradientAverager

REPLICAS = 2


def main() -> None:
    """Fit a small network to a fixed random one, each rank on its own samples."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (REPLICAS, size // REPLICAS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same teacher on every rank
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(device)

    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])  # inside a replica: torch's own exchange
    fully_shard(model, mesh=mesh["shard"])
    averager = ShardGradientAverager(model, HardThreshold(density=0.05), group=mesh["replicate"])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    densities: list[float] = []
    averager.subscribe(lambda stats: densities.append(stats.density))
    torch.manual_seed(1 + rank)  # different samples from here on
    for step in range(201):
        inputs = torch.randn(64, 32, device=device)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        averager.average_gradients()  # sparse, between replicas; before clipping and the optimizer's step
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            stats = averager.last_step
            print(f"step {step}: loss {loss.item():.4f}, density {stats.density:.4f}, error {stats.error_norm:.4f}")
    if rank == 0:
        print(f"average density {fmean(densities):.4f}")
    averager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
