"""Local training with Adam in plain PyTorch: each worker steps alone, and workers exchange drifts sparsely.

Run it on two workers of this machine:

    torchrun --standalone --nproc-per-node=2 docs/examples/local_training.py
"""

from statistics import fmean

import torch
import torch.distributed as dist

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager


def main() -> None:
    """Fit a small network to a fixed random one, each worker on its own samples."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(device)

    # Do not wrap the model in DistributedDataParallel. The averager broadcasts rank 0's weights to all workers.
    averager = SparseModelAverager(model, HardThreshold(density=0.05), DriftOptions())

    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    densities: list[float] = []
    averager.subscribe(lambda stats: densities.append(stats.density))
    torch.manual_seed(1 + rank)  # different samples from here on
    for step in range(201):
        inputs = torch.randn(64, 32, device=device)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averager.step()  # on every worker, after each step of its optimizer
        if rank == 0 and step % 100 == 0:
            stats = averager.last_step
            print(f"step {step}: loss {loss.item():.4f}, density {stats.density:.4f}, error {stats.error_norm:.4f}")
    with averager.averaged_weights():  # equal on all workers; use them to validate and to save
        inputs = torch.randn(1024, 32, device=device)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs))
    if rank == 0:
        print(f"loss {loss.item():.4f}, average density {fmean(densities):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
