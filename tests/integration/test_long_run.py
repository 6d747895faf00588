"""Does anything grow, drift or part company in a long training?

    python -m tests.integration.test_long_run [--steps 20000] [--workers 4]    # 800 steps in the suite

Trains a small classifier on scikit-learn's digits through a Trainer with everything that a user would have on: several
buckets, momentum, both monitors, a logger, checkpoints. Pixels get fresh noise and every fifth label is drawn anew, so
the gradient never vanishes and training has a plateau to stay on. At every twentieth part of the run each worker notes
its memory, its open files and threads, and a digest of its weights.
"""

import argparse
import gc
import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
from tests.workers import run_workers

MARKS = 20


class NoisyDigits(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of digits without end, other ones on each worker."""

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
    """Three layers under momentum, at a constant learning rate, with a weight decay that brings them to rest soon."""

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
    """What one worker noted at one step; density and error are of the steps since the last mark."""

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
    """Takes the marks."""

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
                resident_bytes(),
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


def resident_bytes() -> int:
    """Memory of this process that is its own, without pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


def digest(model: nn.Module) -> str:
    """The same for two models only if every bit is."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(steps: int, folder: str, options: dict[str, Any]) -> tuple[list[Mark], float]:
    """Runs in every worker."""
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notes = Notes(steps // MARKS)
    strategy = DDPHardThresholdStrategy(**({"density": 0.01, "bucket_cap_mb": 0.02} | options))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=num_workers,
        max_steps=steps,
        logger=CSVLogger(folder),
        callbacks=[
            notes,
            DensityMonitor(),
            ErrorMonitor(),
            ModelCheckpoint(folder, every_n_train_steps=max(steps // 10, 1), save_top_k=2, monitor="step", mode="max"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitClassifier(), DataLoader(NoisyDigits(rank), batch_size=None))
    return notes.marks, notes.total_error


def run(steps: int, num_workers: int, **options: Any) -> list[tuple[list[Mark], float]]:
    """Returns every worker's marks and the total error of its run."""
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(train, num_workers, steps, folder, options, process_group=False, timeout=60 + 0.1 * steps)


@pytest.mark.full
@pytest.mark.long
def test_nothing_grows_drifts_or_parts_company() -> None:
    results = run(800, num_workers=3)
    for marks in zip(*(marks for marks, _ in results), strict=True):
        assert len({mark.weights for mark in marks}) == 1
    for marks, total_error in results:
        assert [mark.step for mark in marks] == list(range(40, 801, 40))
        middle, last = marks[9], marks[-1]
        assert last.open_files == middle.open_files
        assert last.threads == middle.threads
        # Half of the run lies between them: one object a step would be 400, one kilobyte a step 0.4 MB, of which an
        # allocator that grows by whole pages hides some.
        assert last.objects - middle.objects < 100
        assert last.resident_bytes - middle.resident_bytes < 4_000_000
        assert 0 < total_error < math.inf
        # Calibration is over after 50 steps and the residual filled after some hundred; from there on nothing changes.
        assert 0.5 < last.density / middle.density < 1.5
        assert 0.8 < last.error_norm / middle.error_norm < 1.25


def main(arguments: list[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=4)
    chosen = parser.parse_args(arguments)
    results = run(chosen.steps, chosen.workers)
    print("   step   memory of each, MB   files   threads   objects   replicas   density   error norm   bytes")
    for marks in zip(*(marks for marks, _ in results), strict=True):
        memory = " ".join(f"{mark.resident_bytes / 1e6:7.2f}" for mark in marks)
        files, threads, objects = (
            "/".join(str(getattr(mark, name)) for mark in marks) for name in ("open_files", "threads", "objects")
        )
        equal = "equal" if len({mark.weights for mark in marks}) == 1 else "DIFFER"
        first = marks[0]
        print(
            f"{first.step:7,}  {memory}   {files}   {threads}   {objects}   {equal}   {100 * first.density:.3f} %"
            f"   {first.error_norm:.5f}   {first.payload_bytes:,.0f}"
        )
    print(f"total error: {results[0][1]:.6g}")


if __name__ == "__main__":
    main(sys.argv[1:])
