"""Sparse gradient exchange in your own training loop, with Lightning Fabric.

Run it on two workers of this machine:

    python docs/examples/with_fabric.py
"""

import torch
from lightning.fabric import Fabric

from lightning_sparse import HardThreshold, register_comm_hook


def main() -> None:
    """Fit a small network to a fixed random one, each worker on its own samples."""
    fabric = Fabric(accelerator="auto", devices=2 if not torch.cuda.is_available() else "auto", strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    teacher = fabric.to_device(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = fabric.setup(model, optimizer)
    state = register_comm_hook(model, HardThreshold(threshold=0.02))  # the one new line

    torch.manual_seed(1 + fabric.global_rank)
    for step in range(201):
        inputs = torch.randn(64, 32, device=fabric.device)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        if step % 100 == 0:
            stats = state.last_step
            fabric.print(
                f"step {step}: loss {loss.item():.4f}, density {stats.density:.4f}, error {stats.error_norm:.4f}"
            )


if __name__ == "__main__":
    main()
