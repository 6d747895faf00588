"""Options of a Trainer: clipping, schedules, accumulation, evaluation, stopping."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.integration.models import data
from tests.integration.programs.trainer import (
    BATCHES,
    MakeTrainer,
    ManualStudent,
    ProgramRecorder,
    Student,
    fit_without_validation,
    fitting,
    train_data,
    trains,
)
from tests.integration.programs.world import Row, Run


class OwnBatches(Student):
    """Returns batches with a different size on each worker."""

    def train_dataloader(self) -> DataLoader:
        samples = (3, 5)[self.trainer.global_rank]
        return data(6 * samples, samples)


class Scheduled(Student):
    """Halves its learning rate after every third step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def evaluate_before_and_after_fit(
    make_trainer: MakeTrainer, model: LightningModule, recorder: ProgramRecorder
) -> Trainer:
    trainer = make_trainer()
    for when in ("before", "after"):
        [validated] = trainer.validate(model, data(20), verbose=False)
        [tested] = trainer.test(model, data(24), verbose=False)
        predicted = trainer.predict(model, data(28))
        recorder.seen[f"evaluation {when}"] += [validated["val_loss"], tested["test_loss"], *predicted]
        if when == "before":
            trainer.fit(model, train_data(), data(16))
    return trainer


def clipped(runs: list[Run]) -> None:
    for run in runs:
        pairs = list(zip(run.seen["gradients"], run.seen["applied gradients"], strict=False))
        assert len(pairs) == 2 * BATCHES - 1  # the last stays
        assert all(applied.norm() < 0.99 * before.norm() for before, applied in pairs)


def stopped_early(runs: list[Run]) -> None:
    for run in runs:
        assert 2 < run.epochs < 20
        assert run.epochs == runs[0].epochs


def saw(expected: dict[str, list[Any]], steps: int, runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == steps
        for what, values in expected.items():
            seen = run.seen[what]
            assert [float(value) for value in seen] == pytest.approx(values), what


def unequal(runs: list[Run]) -> None:
    assert [run.seen["samples"] for run in runs] == [[3] * 12, [5] * 12]


def evaluated(runs: list[Run]) -> None:
    for run in runs:
        before, after = run.seen["evaluation before"], run.seen["evaluation after"]
        assert len(before) == len(after) == 2 + 4
        assert before[0] != after[0]
        assert before[1] != after[1]
        assert run.global_step == 2 * BATCHES


def exchanged_every_batch(runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 2 * BATCHES
        assert run.kind == "ddp" or run.num_exchanges == 2 * BATCHES
        assert all(run.moved(name) for name in run.initial)


def static_graph_is_missing() -> str | None:
    if "post_backward" in vars(DDPStrategy):
        return None
    return "This Lightning's own DDPStrategy does not exchange here (pull request 21251, September 2025)"


_OPTIONS = (
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False},
    {"find_unused_parameters": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
)

ROWS = {
    **{
        f"{words}, {', '.join(f'{name}={value}' for name, value in options.items())}": Row(
            trains(make_model, drive=fit_without_validation, **options),
            exchanged_every_batch,
            missing=static_graph_is_missing
            if make_model is ManualStudent and "static_graph" in options
            else lambda: None,
        )
        for words, make_model in (("automatic", Student), ("manual", ManualStudent))
        for options in _OPTIONS
    },
    "clipping by norm": Row(trains(Student, lambda: {"gradient_clip_val": 0.1}, fit_without_validation), clipped),
    "clipping by value": Row(
        trains(
            Student, lambda: {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, fit_without_validation
        ),
        clipped,
    ),
    "early stopping": Row(
        trains(options=lambda: {"max_epochs": 20, "callbacks": [EarlyStopping("val_loss", patience=2)]}), stopped_early
    ),
    "stochastic weight averaging": Row(
        trains(
            Student,
            lambda: {
                "max_epochs": 4,
                "callbacks": [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)],
            },
        ),
        partial(saw, {"steps before the epoch": [epoch * BATCHES for epoch in range(4)]}, 4 * BATCHES),
    ),
    "uneven last batch": Row(
        trains(drive=fitting(partial(data, 27), partial(data, 9))),
        partial(saw, {"samples": [4, 4, 4, 2] * 2, "validation samples": [4, 1] * 2}, 2 * 4),
    ),
    "batches of unequal size": Row(trains(OwnBatches, lambda: {"use_distributed_sampler": False}, fitting()), unequal),
    "evaluation before and after": Row(trains(drive=evaluate_before_and_after_fit), evaluated),
    "schedule by steps": Row(
        trains(Scheduled),
        partial(saw, {"learning rates": [0.1 * 0.5 ** (step // 3) for step in range(2 * BATCHES)]}, 2 * BATCHES),
    ),
    "accumulation": Row(
        trains(options=lambda: {"accumulate_grad_batches": 3}), partial(saw, {"steps before the epoch": [0, 2]}, 4)
    ),
    "scheduled accumulation": Row(
        trains(options=lambda: {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]}),
        partial(saw, {"steps before the epoch": [0, 4, 6]}, 7),
    ),
}
