"""Checks that memory stays constant and replicas stay equal in a long training.

    python -m tests.integration.test_long_run    # 20,000 steps on four workers; the suite runs 800 steps on three

Trains a small classifier on scikit-learn's digits with several buckets, momentum, both monitors, a logger and
checkpoints. Pixels get new noise in each batch, and a fifth of the labels is random, so the gradient never vanishes and
training reaches a plateau. At every twentieth of the run, each worker records its memory, its open files, its threads
and a digest of its weights.
"""

import gc
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sparse import DDPHardThresholdStrategy, DensityMonitor, ErrorMonitor
from tests.integration.models import memory, quiet_trainer
from tests.workers import run_workers

MARKS = 20


class NoisyDigits(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of digits that differ between workers."""

    def __init__(self, rank: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randint(0, len(self.labels), (8,), generator=self.generator)
            images, labels = self.images[chosen], self.labels[chosen]
            is_drawn = torch.rand(8, generator=self.generator) < 0.2
            labels = torch.where(is_drawn, torch.randint(0, 10, (8,), generator=self.generator), labels)
            yield images + 0.2 * torch.randn(images.shape, generator=self.generator), labels


class DigitClassifier(LightningModule):
    """Three layers with momentum, a constant learning rate, and weight decay for an early plateau."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


@dataclass
class Mark:
    """The record of a worker at a step, with means over the steps since the last mark."""

    step: int
    resident_bytes: int
    open_files: int
    threads: int
    objects: int
    weights: str
    density: float
    error_norm: float
    payload_bytes: float


class Notes(Callback):
    """Records the marks."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.marks: list[Mark] = []
        self.total_error = 0.0
        self._steps: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(self._steps.append)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every:
            return
        steps, count = self._steps, len(self._steps)
        self.total_error += sum(step.error_norm**2 for step in steps)
        gc.collect()
        self.marks.append(
            Mark(
                trainer.global_step,
                memory("RssAnon"),  # excludes pages of mapped files
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                len(gc.get_objects()),
                digest(pl_module),
                sum(step.density for step in steps) / count,
                sum(step.error_norm for step in steps) / count,
                sum(step.payload_bytes for step in steps) / count,
            )
        )
        steps.clear()


def digest(model: nn.Module) -> str:
    """Return a hash of all bits of the weights."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(steps: int, folder: str) -> tuple[list[Mark], float]:
    """Train and return the marks and the total error. Runs in every worker."""
    rank = int(os.environ["RANK"])
    notes = Notes(steps // MARKS)
    strategy = DDPHardThresholdStrategy(density=0.01, bucket_cap_mb=0.02)
    saver = ModelCheckpoint(folder, every_n_train_steps=steps // 10, save_top_k=2, monitor="step", mode="max")
    callbacks = [notes, DensityMonitor(), ErrorMonitor(), saver]
    trainer = quiet_trainer(strategy, max_steps=steps, logger=CSVLogger(folder), callbacks=callbacks)
    trainer.fit(DigitClassifier(), DataLoader(NoisyDigits(rank), batch_size=None))
    return notes.marks, notes.total_error


def run(steps: int, num_workers: int) -> list[tuple[list[Mark], float]]:
    """Return the marks and the total error of every worker."""
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(train, num_workers, steps, folder, process_group=False, timeout=60 + 0.1 * steps)


@pytest.mark.slow
def test_memory_and_replicas_stay_constant() -> None:
    results = run(800, num_workers=3)
    for marks in zip(*(marks for marks, _ in results), strict=True):
        assert len({mark.weights for mark in marks}) == 1
    for marks, total_error in results:
        assert [mark.step for mark in marks] == list(range(40, 801, 40))
        middle, last = marks[9], marks[-1]
        assert last.open_files == middle.open_files
        assert last.threads == middle.threads
        # 400 steps lie between both marks: a leak of one object per step would be 400 objects, a leak of 1 kB per step
        # 0.4 MB. The limit on bytes allows for an allocator that grows by whole pages.
        assert last.objects - middle.objects < 100
        assert last.resident_bytes - middle.resident_bytes < 4_000_000
        assert 0 < total_error < math.inf
        # Calibration takes 3 steps and filling the residual a few hundred; then the statistics stay constant.
        assert 0.5 < last.density / middle.density < 1.5
        assert 0.8 < last.error_norm / middle.error_norm < 1.25


if __name__ == "__main__":
    for marks, total_error in run(20_000, num_workers=4):
        print(*marks, f"total error: {total_error:.6g}", sep="\n")
