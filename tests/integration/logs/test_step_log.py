"""Rows of a logger: each exchange is in at most one row, so that sums over rows are correct."""

import csv
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_sparse import (
    DDPHardThresholdStrategy,
    DensityMonitor,
    ErrorMonitor,
    LocalHardThresholdStrategy,
    StepStats,
)
from tests.integration.checkpoints.test_checkpoint import ResumableData
from tests.integration.models import Classifier, ManualClassifier, TwoPlayers, quiet_trainer
from tests.workers import on_workers, run_workers

STEPS = 13


class EveryThird(ManualClassifier):
    """Steps in every third batch only; the batches before it add to the gradient."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class LogsAfterwards(ManualClassifier):
    """Logs a metric after the optimizer's step."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.log("batch", float(batch_idx))


class Exchanges(Callback):
    """Collects the exchanges of each batch in which an optimizer stepped."""

    def __init__(self) -> None:
        self.new: list[StepStats] = []
        self.of_batches: list[tuple[int, list[StepStats]]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(self.new.append)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.of_batches.append((trainer.fit_loop.epoch_loop._batches_that_stepped, self.new.copy()))
            self.new.clear()


def local(every_n_steps: int) -> Any:
    return LocalHardThresholdStrategy(threshold=0.01, every_n_steps=every_n_steps)


def gradients(**options: Any) -> Any:
    return DDPHardThresholdStrategy(threshold=0.01, **(options or {"find_unused_parameters": True}))


@dataclass(frozen=True)
class Program:
    """A training.

    Attributes:
        waits: whether gradients are exchanged before the batch whose step logs them.
    """

    make_model: Callable[[], LightningModule]
    make_strategy: Callable[[], Any]
    accumulate: int = 1
    waits: bool = False
    batches_per_epoch: int = 1000


PROGRAMS = {
    "gradients": Program(Classifier, gradients),
    "gradients, accumulated": Program(Classifier, gradients, accumulate=3),
    "gradients, two optimizers": Program(TwoPlayers, gradients),
    "gradients, static graph, by hand": Program(ManualClassifier, partial(gradients, static_graph=True)),
    "gradients, a step in every third batch": Program(EveryThird, gradients, waits=True),
    "drift": Program(Classifier, lambda: local(1)),
    "drift, every third step": Program(Classifier, lambda: local(3)),
    "drift, every fifth step, accumulated": Program(Classifier, lambda: local(5), accumulate=2),
    "drift, two optimizers, every fourth step": Program(TwoPlayers, lambda: local(4)),
    "drift, two optimizers, every step": Program(TwoPlayers, lambda: local(1)),
    "drift, every fifth step, epochs that end between rows": Program(Classifier, lambda: local(5), batches_per_epoch=6),
    "gradients, epochs that end between rows": Program(Classifier, gradients, batches_per_epoch=7),
    "gradients, by hand, logs afterwards": Program(LogsAfterwards, gradients, batches_per_epoch=4),
}


Batches = list[tuple[int, list[StepStats]]]


def fit(model: LightningModule, strategy: Any, batches_per_epoch: int, logger: Logger, **options: Any) -> Exchanges:
    """Train with both monitors and return the exchanges."""
    exchanges = Exchanges()
    monitors = [DensityMonitor(), ErrorMonitor(per_layer=True)]
    trainer = quiet_trainer(strategy, num_workers=2, logger=logger, callbacks=[exchanges, *monitors], **options)
    with redirect_stdout(io.StringIO()):
        trainer.fit(model, ResumableData(batches_per_epoch))
    return exchanges


def run(name: str, log_every: int, folder: str) -> Batches:
    program = PROGRAMS[name]
    options = {"max_steps": STEPS, "log_every_n_steps": log_every, "accumulate_grad_batches": program.accumulate}
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    return fit(program.make_model(), program.make_strategy(), program.batches_per_epoch, logger, **options).of_batches


def read_rows(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def columns(steps: list[StepStats], so_far: list[StepStats]) -> dict[str, float]:
    """Return the values of a row from the exchanges of its batch and all exchanges so far."""
    newest = steps[-1]
    of_layers = {f"sparse/layer_density/{name}": layer.density for name, layer in newest.layers.items()}
    of_layers |= {f"sparse/layer_error_norm/{name}": sqrt(layer.squared_error) for name, layer in newest.layers.items()}
    return {
        "sparse/density": density_of(steps),
        "sparse/payload_bytes": sum(step.payload_bytes for step in steps),
        "sparse/error_norm": newest.error_norm,
        "sparse/threshold": newest.threshold,
        "sparse/average_density": density_of(so_far),
        "sparse/total_error": sum(step.squared_error for step in so_far),
        **of_layers,
    }


def density_of(steps: list[StepStats]) -> float:
    return sum(step.selected for step in steps) / sum(step.num_workers * step.num_elements for step in steps)


def expected_rows(of_batches: Batches, log_every: int, waits: bool) -> dict[int, dict[str, float]]:
    """Return the columns of each row by step; a row shows the last batch whose exchanges no earlier row shows."""
    rows: dict[int, dict[str, float]] = {}
    row, waiting, so_far = None, [], []
    for batch, steps in of_batches:
        waiting += steps
        if waiting and (not waits or batch % 3 == 2):
            so_far += waiting
            row = columns(waiting, so_far)
            waiting = []
        if (batch + 1) % log_every == 0 and row is not None:
            rows[batch], row = row, None
    return rows


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_exchange_is_in_at_most_one_row(name: str, log_every: int, tmp_path: Path) -> None:
    of_batches = run_workers(run, 2, name, log_every, str(tmp_path), process_group=False)[0]
    expected = expected_rows(of_batches, log_every, PROGRAMS[name].waits)
    rows = read_rows(tmp_path)
    assert expected
    names = next(iter(expected.values())).keys()
    if PROGRAMS[name].waits:  # monitors show a late exchange when it completes
        names = ("sparse/density", "sparse/payload_bytes")
    # All rows from the first exchange on have averages; only one row has the numbers of an exchange.
    for column in names:
        found = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        is_average = column in ("sparse/average_density", "sparse/total_error")
        assert found.keys() >= expected.keys() if is_average else found.keys() == expected.keys(), column
        for step, row in expected.items():
            assert found[step] == pytest.approx(row[column], rel=1e-5, abs=1e-7), (column, step)
    if log_every == 1:
        logged = sum(step.payload_bytes for batch, steps in of_batches for step in steps if batch <= max(expected))
        assert sum(row["sparse/payload_bytes"] for row in expected.values()) == pytest.approx(logged)


class Subclass(Classifier):
    """A class whose ``log`` a test can replace."""


LOGGED = ("density", "error_norm", "payload_bytes", "threshold", "exchange_wait_ms")


@pytest.mark.parametrize(
    "where", ["subclass", pytest.param("lightning", marks=pytest.mark.representative), "class", "instance"]
)
@on_workers(2, process_group=False)
def test_an_overridden_log_gets_every_number_and_lightning_computes_each_once(where: str) -> None:
    densities: list[float] = []
    seen: list[tuple[str, float]] = []
    watch = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: densities.append(float(trainer.callback_metrics["sparse/density"]))
    )
    model = Subclass() if where == "subclass" else Classifier()
    # The object with the replaced log, and the number of arguments before the name of the metric.
    owners = {"lightning": (_ResultCollection, 2), "class": (LightningModule, 1), "subclass": (Subclass, 1)}
    owner, at = owners.get(where, (model, 0))
    log = owner.log

    def record(*args: Any, **kwargs: Any) -> None:
        seen.append((args[at], float(args[at + 1])))
        log(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "log", record)
        strategy = DDPHardThresholdStrategy(threshold=0.01)
        quiet_trainer(strategy, num_workers=2, max_steps=10, callbacks=[watch]).fit(model, ResumableData(5))
    assert len(densities) == 10
    if where == "lightning":  # each call takes a quarter of a millisecond: see NumberLog
        # Five calls in the first batch, and one in the first batch of the second epoch.
        assert [name for name, _ in seen] == [f"sparse/{name}" for name in (*LOGGED, LOGGED[0])]
        assert len(set(densities)) > 2
    else:
        assert [value for name, value in seen if name == "sparse/density"] == pytest.approx(densities)


class NamesakeByHand(ManualClassifier):
    """Logs a metric with a name of the package in manual optimization."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("sparse/density", 100.0 + batch_idx, **self.how)
        super().training_step(batch, batch_idx)


class Namesake(Classifier):
    """Logs a metric of an epoch with a name of the package."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("sparse/density", 100.0 + batch_idx, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def metrics_with_a_namesake(model: Classifier) -> dict[str, float]:
    trainer = quiet_trainer(DDPHardThresholdStrategy(threshold=0.01), num_workers=2, max_steps=3)
    trainer.fit(model, ResumableData(3))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_user_metric_of_the_same_name_keeps_its_values_or_raises() -> None:
    for metrics in run_workers(metrics_with_a_namesake, 2, Namesake(), process_group=False):
        assert metrics["sparse/density_epoch" if "sparse/density_epoch" in metrics else "sparse/density"] == 101.0
    for how in ({"on_step": True}, {"on_step": False, "on_epoch": True}):
        with pytest.raises(AssertionError, match="twice in `training_step` with different arguments"):
            run_workers(metrics_with_a_namesake, 2, NamesakeByHand(**how), process_group=False)


class DoubleStepper(ManualClassifier):
    """Steps in ``training_step`` except for the first batch, and again when the batch ends."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if batch_idx:
            super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


def exchanges_in_rows(model: LightningModule, folder: str, precision: str, batches: int) -> list[StepStats]:
    """Train an epoch with a row for each step and return the exchanges."""
    options = {"max_steps": -1, "max_epochs": 1, "log_every_n_steps": 1, "precision": precision}
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    exchanges = fit(model, DDPHardThresholdStrategy(threshold=0.01), batches, logger, **options)
    return [step for _, steps in exchanges.of_batches for step in steps] + exchanges.new


def rows_with_an_exchange(folder: Path) -> list[dict[str, str]]:
    return [row for row in read_rows(folder) if row["sparse/payload_bytes"]]


def test_a_row_has_all_exchanges_of_its_batch(tmp_path: Path) -> None:
    given = (DoubleStepper(), str(tmp_path), "32-true", 3)
    steps = run_workers(exchanges_in_rows, 2, *given, process_group=False)[0]
    assert len(steps) == 5
    sent = [float(row["sparse/payload_bytes"]) for row in rows_with_an_exchange(tmp_path)]
    assert sent == [sum(step.payload_bytes for step in some) for some in (steps[:1], steps[1:3], steps[3:])]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_logged_numbers_have_full_precision(precision: str, tmp_path: Path) -> None:
    given = (ManualClassifier(), str(tmp_path), precision, 2)
    steps = run_workers(exchanges_in_rows, 2, *given, process_group=False)[0]
    for row, step in zip(rows_with_an_exchange(tmp_path), steps, strict=True):
        assert float(row["sparse/density"]) == step.density
        assert float(row["sparse/threshold"]) == 0.01
        assert float(row["sparse/payload_bytes"]) == step.payload_bytes


@pytest.mark.parametrize("make_strategy", [gradients, partial(local, 1)])
@on_workers(2, process_group=False)
def test_the_progress_bar_shows_no_exchange_statistics(make_strategy: Callable[[], Any]) -> None:
    trainer = quiet_trainer(make_strategy(), num_workers=2, max_steps=3)
    trainer.fit(Classifier(), ResumableData(3))
    assert "sparse/density" in trainer.callback_metrics
    assert not [name for name in trainer.progress_bar_metrics if name.startswith("sparse/")]
