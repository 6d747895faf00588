"""Trains under Ray Train, which starts the workers, and resumes from a checkpoint.

Run it on two CPU workers of this machine:

    python docs/examples/ray_train.py --num-workers=2 --max-steps=100
    python docs/examples/ray_train.py --num-workers=2 --max-steps=200 --resume
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import DDPHardThresholdStrategy


class RayHardThresholdStrategy(DDPHardThresholdStrategy, RayDDPStrategy):
    """Uses Ray's devices and ranks, because ``prepare_trainer`` accepts only subclasses of Ray's strategies."""


class Model(LightningModule):
    """Fits a small network to a fixed random one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(config: dict[str, Any]) -> None:
    """Train on one worker. Ray calls this on all of them."""
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inputs = torch.randn(4096, 32)
    folder = Path(config["folder"])
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto",
        strategy=RayHardThresholdStrategy(density=0.05),
        plugins=[RayLightningEnvironment()],
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=config["max_steps"])],
        max_steps=config["max_steps"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=64, shuffle=True)
    model = Model()
    prepare_trainer(trainer).fit(model, loader, ckpt_path=folder / "last.ckpt" if config["resume"] else None)
    density = trainer.callback_metrics["sparse/density"]
    print(f"worker {get_context().get_world_rank()}: {trainer.global_step} steps, density {density:.4f}", flush=True)


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--folder", default="ray_train", help="folder for checkpoints, which all nodes must see")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).absolute()
    TorchTrainer(
        train,
        train_loop_config={**vars(arguments), "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=arguments.num_workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()


if __name__ == "__main__":
    main()
