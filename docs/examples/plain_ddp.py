"""Sparse gradient exchange in plain PyTorch, without Lightning's Trainer.

Run it on two workers of this machine:

    torchrun --standalone --nproc-per-node=2 docs/examples/plain_ddp.py
"""

from statistics import fmean

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import HardThreshold, register_comm_hook


def main() -> None:
    """Fit a small network to a fixed random one, each worker on its own samples."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # the same teacher and initial weights on every worker
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(device)

    ddp_model = DistributedDataParallel(model)
    state = register_comm_hook(ddp_model, HardThreshold(density=0.05))  # the one new line

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    densities: list[float] = []
    state.subscribe(lambda stats: densities.append(stats.density))
    torch.manual_seed(1 + rank)  # different samples from here on
    for step in range(201):
        inputs = torch.randn(64, 32, device=device)
        loss = torch.nn.functional.mse_loss(ddp_model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            stats = state.last_step
            print(f"step {step}: loss {loss.item():.4f}, density {stats.density:.4f}, error {stats.error_norm:.4f}")
    if rank == 0:
        print(f"average density {fmean(densities):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
