"""A training that goes on with other workers than it began with.

A convex problem, so that all runs are on their way to the same loss and what was held back is missed when it is gone:
softmax regression on scikit-learn's digits, 32 images a step on however many workers.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_sparse import DDPHardThresholdStrategy
from tests.integration.models import WEIGHTS_ONLY, quiet_trainer
from tests.integration.test_checkpoint import SaveAt
from tests.workers import run_workers

CHANGE, END, GLOBAL_BATCH, THRESHOLD = 150, 200, 32, 0.3
SEEDS = 3


def digits() -> tuple[Tensor, Tensor]:
    loaded = load_digits()
    return torch.tensor(loaded.data, dtype=torch.float32) / 16, torch.tensor(loaded.target)


class GlobalBatches:
    """A step's 32 images follow from the seed and the step; each worker takes its share of them."""

    def __init__(self, seed: int, first_step: int = 0) -> None:
        self.images, self.labels = digits()
        self.seed, self.step = seed, first_step

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Any:
        rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        while True:
            generator = torch.Generator().manual_seed(100_000 * self.seed + self.step)
            chosen = torch.randint(0, len(self.labels), (GLOBAL_BATCH,), generator=generator)[rank::num_workers]
            self.step += 1
            yield self.images[chosen], self.labels[chosen]


class Softmax(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(seed: int, save: str | None, resume: str | None, options: dict[str, Any]) -> float:
    """Returns the loss over all digits at the end; runs in every worker."""
    trainer = quiet_trainer(
        DDPHardThresholdStrategy(threshold=THRESHOLD, **options),
        max_steps=END,
        callbacks=[SaveAt(CHANGE, save)] if save else [],
        use_distributed_sampler=False,
    )
    model = Softmax()
    trainer.fit(model, GlobalBatches(seed, CHANGE if resume else 0), ckpt_path=resume, **WEIGHTS_ONLY)
    images, labels = digits()
    with torch.no_grad():
        return F.cross_entropy(model.layer(images), labels).item()


def run(num_workers: int, seed: int, *, save: str | None = None, resume: str | None = None, **options: Any) -> float:
    losses = run_workers(fit, num_workers, seed, save, resume, options, process_group=False)
    assert len(set(losses)) == 1
    return losses[0]


@pytest.mark.full
@pytest.mark.long
def test_a_training_goes_on_with_half_its_workers_as_one_that_never_changed(tmp_path: Path) -> None:
    unchanged, changed = [], []
    for seed in range(SEEDS):
        path = str(tmp_path / f"{seed}.ckpt")
        unchanged += [run(4, seed, save=path), run(2, seed)]
        changed.append(run(2, seed, resume=path))
    # The noise: how far apart runs lie that differ in seed and number of workers alone.
    noise = max(unchanged) - min(unchanged)
    usual = sum(unchanged) / len(unchanged)
    assert abs(sum(changed) / SEEDS - usual) < noise
    # That the test can tell: the same change with what was held back thrown away.
    forgetful = run(2, 0, resume=str(tmp_path / "0.ckpt"), on_world_size_change="reset")
    assert forgetful > max(unchanged) + noise
