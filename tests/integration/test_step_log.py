"""Rows of a logger: each exchange is in one of them at most, and who adds up bytes counts none twice."""

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
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_sparse import (
    DDPHardThresholdStrategy,
    DensityMonitor,
    ErrorMonitor,
    LocalHardThresholdStrategy,
    StepStats,
)
from tests.integration.models import Classifier, ManualClassifier, TwoPlayers, quiet_trainer
from tests.integration.test_checkpoint import ResumableData
from tests.workers import run_workers

STEPS = 13


class EveryThird(Classifier):
    """Steps in every third batch only, by hand; the batches before it add to the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Exchanges(Callback):
    """Which exchanges fell into which batch, of those in which an optimizer stepped."""

    def __init__(self) -> None:
        self.new: list[StepStats] = []
        self.of_batches: list[tuple[int, list[StepStats]]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(self.new.append)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.of_batches.append((trainer.fit_loop.epoch_loop._batches_that_stepped, self.new.copy()))
            self.new.clear()


def local(every_n_steps: int, **options: Any) -> Any:
    return LocalHardThresholdStrategy(threshold=0.01, every_n_steps=every_n_steps, **options)


def gradients(**options: Any) -> Any:
    return DDPHardThresholdStrategy(threshold=0.01, **(options or {"find_unused_parameters": True}))


@dataclass(frozen=True)
class Program:
    """What trains.

    Attributes:
        waits: whether a gradient is exchanged in batches before the one whose step logs it.
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
    "drift, every second step, overlapping": Program(Classifier, lambda: local(2, overlap=True)),
    "drift, every fifth step, accumulated": Program(Classifier, lambda: local(5), accumulate=2),
    "drift, two optimizers, every fourth step": Program(TwoPlayers, lambda: local(4)),
    "drift, two optimizers, every step": Program(TwoPlayers, lambda: local(1)),
    "drift, every fifth step, epochs that end between rows": Program(Classifier, lambda: local(5), batches_per_epoch=6),
    "gradients, epochs that end between rows": Program(Classifier, gradients, batches_per_epoch=7),
}


def run(name: str, log_every: int, folder: str) -> list[tuple[int, list[StepStats]]]:
    program = PROGRAMS[name]
    exchanges = Exchanges()
    trainer = quiet_trainer(
        program.make_strategy(),
        num_workers=2,
        max_steps=STEPS,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=log_every,
        accumulate_grad_batches=program.accumulate,
        callbacks=[exchanges, DensityMonitor(), ErrorMonitor(per_layer=True)],
    )
    with redirect_stdout(io.StringIO()):
        trainer.fit(program.make_model(), ResumableData(program.batches_per_epoch))
    return exchanges.of_batches


@dataclass
class LoggedRow:
    """What a row must hold.

    Attributes:
        density: of the last batch with an exchange that has not been in a row.
        payload_bytes: of the same batch.
        newest: the last of the exchanges of that batch.
        so_far: all exchanges up to that batch.
    """

    density: float
    payload_bytes: float
    newest: StepStats
    so_far: list[StepStats]

    def columns(self) -> dict[str, float]:
        """Returns the value of each column, those of both monitors too."""
        elements = sum(step.num_workers * step.num_elements for step in self.so_far)
        of_layers = {f"sparse/layer_density/{name}": layer.density for name, layer in self.newest.layers.items()}
        of_layers |= {
            f"sparse/layer_error_norm/{name}": sqrt(layer.squared_error) for name, layer in self.newest.layers.items()
        }
        return {
            "sparse/density": self.density,
            "sparse/payload_bytes": self.payload_bytes,
            "sparse/average_density": sum(step.selected for step in self.so_far) / elements,
            "sparse/total_error": sum(step.squared_error for step in self.so_far),
            **of_layers,
        }


def expected_rows(of_batches: list[tuple[int, list[StepStats]]], log_every: int, waits: bool) -> dict[int, LoggedRow]:
    """The rows by step."""
    rows: dict[int, LoggedRow] = {}
    row, waiting, so_far = None, [], []
    for batch, steps in of_batches:
        waiting += steps
        if waiting and (not waits or batch % 3 == 2):
            elements = sum(step.num_workers * step.num_elements for step in waiting)
            density, sent = sum(step.selected for step in waiting) / elements, sum(one.payload_bytes for one in waiting)
            so_far += waiting
            row = LoggedRow(density, sent, waiting[-1], so_far.copy())
            waiting = []
        if (batch + 1) % log_every == 0 and row is not None:
            rows[batch], row = row, None
    return rows


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_exchange_is_in_one_row_at_most(name: str, log_every: int, tmp_path: Path) -> None:
    of_batches = run_workers(run, 2, name, log_every, str(tmp_path), process_group=False)[0]
    expected = expected_rows(of_batches, log_every, PROGRAMS[name].waits)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert expected
    columns = next(iter(expected.values())).columns()
    if PROGRAMS[name].waits:  # monitors show an exchange when it is over, and not with the step that it waits for
        columns = ("sparse/density", "sparse/payload_bytes")
    # Averages are in all rows from the first exchange on; what is of one exchange is in one row.
    for column in columns:
        found = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        is_average = column in ("sparse/average_density", "sparse/total_error")
        assert found.keys() >= expected.keys() if is_average else found.keys() == expected.keys(), column
        for step, row in expected.items():
            assert found[step] == pytest.approx(row.columns()[column], rel=1e-5, abs=1e-7), (column, step)
    if log_every == 1:
        logged = sum(step.payload_bytes for batch, steps in of_batches for step in steps if batch <= max(expected))
        assert sum(row.payload_bytes for row in expected.values()) == pytest.approx(logged)


class SeesAll(Classifier):
    """Has a ``log`` of its own, as somebody has who renames what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append((name, float(value)))
        super().log(name, value, *args, **kwargs)


def seen_of_log(where: str) -> tuple[list[tuple[str, float]], list[float]]:
    """What ``log`` was called with in two epochs of five batches, and the density that callbacks saw in each."""
    densities: list[float] = []
    seen: list[tuple[str, float]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            densities.append(float(trainer.callback_metrics["sparse/density"]))

    def recorded(log: Callable[..., None], at: int) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            seen.append((args[at], float(args[at + 1])))
            log(*args, **kwargs)

        return record

    model = SeesAll() if where == "subclass" else Classifier()
    with pytest.MonkeyPatch.context() as patch:
        if where == "lightning":
            patch.setattr(_ResultCollection, "log", recorded(_ResultCollection.log, 2))
        elif where == "class":
            patch.setattr(LightningModule, "log", recorded(LightningModule.log, 1))
        elif where == "instance":
            model.log = recorded(model.log, 0)
        trainer = quiet_trainer(
            DDPHardThresholdStrategy(threshold=0.01), num_workers=2, max_steps=10, callbacks=[Watch()]
        )
        trainer.fit(model, ResumableData(5))
    return getattr(model, "seen", seen), densities


LOGGED = ("density", "error_norm", "payload_bytes", "threshold", "exchange_wait_ms")


def test_lightning_works_out_once_how_a_number_is_logged() -> None:
    """It takes a quarter of a millisecond for each: see the docstring of ``StepLog._log``."""
    for calls, densities in run_workers(seen_of_log, 2, "lightning", process_group=False):
        names = [name for name, _ in calls]
        assert names == [f"sparse/{name}" for name in LOGGED]
        assert len(densities) == 10
        assert len(set(densities)) > 2


@pytest.mark.parametrize("where", ["subclass", "class", "instance"])
def test_a_log_of_the_users_own_sees_every_number(where: str) -> None:
    for seen, densities in run_workers(seen_of_log, 2, where, process_group=False):
        logged = [value for name, value in seen if name == "sparse/density"]
        assert logged == pytest.approx(densities)
        assert len(logged) == 10


class NamesakeByHand(Classifier):
    """Logs a metric that is named like one of ours, and optimizes by hand."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("sparse/density", 100.0 + batch_idx, **self.how)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Namesake(Classifier):
    """Logs a metric of an epoch that is named like one of ours."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("sparse/density", 100.0 + batch_idx, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def metrics_with_a_namesake(model: Classifier) -> dict[str, float]:
    trainer = quiet_trainer(DDPHardThresholdStrategy(threshold=0.01), num_workers=2, max_steps=3)
    trainer.fit(model, ResumableData(3))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_metric_of_the_same_name_keeps_all_its_values_or_is_refused() -> None:
    for metrics in run_workers(metrics_with_a_namesake, 2, Namesake(), process_group=False):
        assert metrics["sparse/density_epoch" if "sparse/density_epoch" in metrics else "sparse/density"] == 101.0
    for how in ({"on_step": True}, {"on_step": False, "on_epoch": True}):
        with pytest.raises(AssertionError, match="twice in `training_step` with different arguments"):
            run_workers(metrics_with_a_namesake, 2, NamesakeByHand(**how), process_group=False)


class StepsTwice(Classifier):
    """Steps in ``training_step`` but for the first batch, and again when the batch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def _step(self, batch: list[torch.Tensor]) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if batch_idx:
            self._step(batch)

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        self._step(batch)


def rows_of(model: Classifier, folder: str, precision: str, batches: int) -> list[StepStats]:
    steps: list[StepStats] = []

    class Follow(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.strategy.state.subscribe(steps.append)

    trainer = quiet_trainer(
        DDPHardThresholdStrategy(threshold=0.01),
        num_workers=2,
        max_steps=-1,
        max_epochs=1,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        precision=precision,
        callbacks=[Follow()],
    )
    trainer.fit(model, ResumableData(batches))
    return steps


def read_rows(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob("metrics.csv")).open() as file:
        return [row for row in csv.DictReader(file) if row["sparse/payload_bytes"]]


def test_a_row_holds_all_exchanges_of_its_batch_whoever_stepped(tmp_path: Path) -> None:
    steps = run_workers(rows_of, 2, StepsTwice(), str(tmp_path), "32-true", 3, process_group=False)[0]
    assert len(steps) == 5
    sent = [float(row["sparse/payload_bytes"]) for row in read_rows(tmp_path)]
    assert sent == [sum(step.payload_bytes for step in some) for some in (steps[:1], steps[1:3], steps[3:])]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_numbers_are_not_rounded_to_the_precision_of_the_training(precision: str, tmp_path: Path) -> None:
    steps = run_workers(rows_of, 2, ManualClassifier(), str(tmp_path), precision, 2, process_group=False)[0]
    for row, step in zip(read_rows(tmp_path), steps, strict=True):
        assert float(row["sparse/density"]) == step.density
        assert float(row["sparse/threshold"]) == 0.01
        assert float(row["sparse/payload_bytes"]) == step.payload_bytes


def metrics_of_the_progress_bar(make_strategy: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """The names that the progress bar shows after three steps, and all that were logged."""
    trainer = quiet_trainer(make_strategy(), num_workers=2, max_steps=3)
    trainer.fit(Classifier(), ResumableData(3))
    return set(trainer.progress_bar_metrics), set(trainer.callback_metrics)


@pytest.mark.parametrize("make_strategy", [gradients, partial(local, 1)])
def test_the_progress_bar_shows_none_of_the_numbers(make_strategy: Callable[[], Any]) -> None:
    for shown, logged in run_workers(metrics_of_the_progress_bar, 2, make_strategy, process_group=False):
        assert "sparse/density" in logged
        assert not {name for name in shown if name.startswith("sparse/")}
