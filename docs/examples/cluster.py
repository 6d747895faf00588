"""Trains on several nodes. torchrun or SLURM's srun starts one process per worker.

Run it on two workers of this machine:

    torchrun --standalone --nproc-per-node=2 docs/examples/cluster.py --devices=2
"""

import argparse
import os
import signal
import subprocess
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import DDPHardThresholdStrategy


class Model(LightningModule):
    """Fits a small network to a fixed random one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.global_rank == 0 and self.trainer.global_step % 100 == 0:
            print(f"step {self.trainer.global_step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class RequeueBetweenSteps(Callback):
    """Saves and requeues the job at the end of a step after SLURM's signal.

    Create it before ``fit``, so that Lightning does not install its own signal handler. That handler saves immediately,
    wherever each worker is. If one worker saves while another waits for its gradients, both wait forever.

    Args:
        path: the checkpoint's path.
        every_n_steps: steps between checks whether any worker has received the signal. A check is a small collective.
    """

    def __init__(self, path: str, every_n_steps: int = 10) -> None:
        self.path = path
        self.every_n_steps = every_n_steps
        self.has_signal = False
        signal.signal(signal.SIGUSR1, self.note_signal)

    def note_signal(self, *_: Any) -> None:
        """Record that this worker has received the signal."""
        self.has_signal = True

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save, stop and requeue the job if any worker has received the signal."""
        if trainer.global_step % self.every_n_steps:
            return
        if trainer.strategy.reduce_boolean_decision(self.has_signal, all=False):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
            if trainer.is_global_zero and "SLURM_JOB_ID" in os.environ:
                subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


def main() -> None:
    """Train with the numbers of nodes, workers and steps from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-nodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--devices", type=int, default=1, help="workers per node")
    parser.add_argument("--max-steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inputs = torch.randn(4096, 32)
    checkpoint = f"requeue-{os.environ.get('SLURM_JOB_ID', 'none')}.ckpt"
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        num_nodes=arguments.num_nodes,
        devices=arguments.devices,
        strategy=DDPHardThresholdStrategy(density=0.05),
        max_steps=arguments.max_steps,
        enable_progress_bar=False,
        callbacks=[RequeueBetweenSteps(checkpoint)],
    )
    loader = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=64, shuffle=True)
    trainer.fit(Model(), loader, ckpt_path=checkpoint if os.path.exists(checkpoint) else None)
    print(f"worker {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
