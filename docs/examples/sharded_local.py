"""Local training with Adam of replicas that FSDP2 shards, in plain PyTorch.

Run two replicas of two ranks each on this machine. In a cluster, a replica is usually a node:

    torchrun --standalone --nproc-per-node=4 docs/examples/sharded_local.py
"""

from statistics import fmean

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager

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
        fully_shard(layer, mesh=mesh["shard"])  # inside a replica: torch's own exchange of gradients
    fully_shard(model, mesh=mesh["shard"])
    sparsifier = HardThreshold(density=0.1)
    averager = SparseModelAverager(model, sparsifier, DriftOptions(every_n_steps=1), group=mesh["replicate"])

    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)  # each replica has its own moments
    densities: list[float] = []
    averager.subscribe(lambda stats: densities.append(stats.density))
    torch.manual_seed(1 + rank)  # different samples from here on
    for step in range(201):
        inputs = torch.randn(64, 32, device=device)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averager.step()  # exchanges the replicas' drifts sparsely, after every_n_steps steps
        if rank == 0 and step % 100 == 0:
            stats = averager.last_step
            print(f"step {step}: loss {loss.item():.4f}, density {stats.density:.4f}, error {stats.error_norm:.4f}")
    with averager.averaged_weights(), torch.no_grad():  # the same weights on all ranks
        inputs = torch.randn(1024, 32, generator=torch.Generator().manual_seed(9)).to(device)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs))
    if rank == 0:
        print(f"mean of the replicas: loss {loss.item():.4f}, average density {fmean(densities):.4f}")
    averager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
