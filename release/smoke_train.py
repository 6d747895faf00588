"""Trains a small network on two CPU workers with a strategy's name and prints the result as JSON.

It runs outside the project, in an environment with only the package and its dependencies.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

import lightning_sparse

STEPS = 30


class Model(LightningModule):
    """A classifier of the largest of ten input coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss and record it."""
        loss = nn.functional.cross_entropy(self.layers(batch), batch[:, :10].argmax(dim=1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        """Print the result on rank 0 before DDP is torn down."""
        strategy = self.trainer.strategy
        weights = nn.utils.parameters_to_vector(self.parameters()).detach()
        spread = (strategy.reduce(weights, reduce_op="mean") - weights).abs().max().item()
        if self.global_rank == 0:
            package = Path(lightning_sparse.__file__).parent
            result = {
                "package": str(package),
                "version": [lightning_sparse.__version__, version("lightning-sparse")],
                "typed": (package / "py.typed").exists(),
                "strategy": type(strategy).__name__,
                "hook": strategy.model._get_ddp_logging_data().get("comm_hook"),
                "workers": self.trainer.world_size,
                "steps": self.trainer.global_step,
                "density": strategy.state.last_step.density,
                "losses": [self.losses[0], self.losses[-1]],
                "spread": spread,
                "torch": torch.__version__,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)
    trainer = Trainer(
        strategy="ddp_hardthreshold",
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64 * STEPS, 64), 32))
