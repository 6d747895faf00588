"""What W&B and MLflow hold of a training on two workers with both monitors. TensorBoard, CSV: test_monitors.py."""

import importlib.util
import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightning_sparse import DDPHardThresholdStrategy, DensityMonitor, ErrorMonitor, StepStats
from tests.integration.models import SMALL_BUCKETS_MB, Classifier, Recorder, data, quiet_trainer
from tests.workers import run_workers

STEPS = 6
Points = list[tuple[int, float]]


def _needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: `pip install {package}` (it is not among what `make setup` installs)."
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def train(make_logger: Callable[[str], Logger], folder: str, every: int) -> list[StepStats]:
    recorder = Recorder()
    trainer = quiet_trainer(
        DDPHardThresholdStrategy(threshold=0.15, bucket_cap_mb=SMALL_BUCKETS_MB),
        num_workers=2,
        max_steps=STEPS,
        logger=make_logger(folder),
        log_every_n_steps=every,
        callbacks=[recorder, DensityMonitor(), ErrorMonitor(per_layer=True)],
    )
    trainer.fit(Classifier(partial(torch.optim.SGD, lr=0.1)), data())
    return recorder.steps


def wandb_logger(folder: str) -> Logger:
    return WandbLogger(project="sparse", save_dir=folder, offline=True)


def train_with_wandb(folder: str, every: int) -> list[StepStats]:
    import wandb

    steps = train(wandb_logger, folder, every)
    wandb.finish()  # as at the end of a program
    return steps


def mlflow_logger(folder: str) -> Logger:
    return MLFlowLogger("sparse", tracking_uri=f"sqlite:///{folder}/mlflow.db")


def make_database(folder: str) -> None:
    """Of workers that all begin at once, each would lay out the tables, and all but one fail (docs/loggers.md)."""
    mlflow_logger(folder)


def read_wandb(folder: str) -> list[dict[str, Points]]:
    """The numbers in the files of each run, by name, with Lightning's step."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for path in Path(folder).rglob("run-*.wandb"):
        found: dict[str, Points] = {}
        for content in _records(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name in (name for name in row if name.startswith("sparse/")):
                found.setdefault(name, []).append((row["trainer/global_step"], row[name]))
        runs.append(found)
    return runs


def _records(content: bytes) -> Iterator[bytes]:
    """What is in a log of LevelDB's format: blocks of 32 KiB, in each pieces behind checksum, length and kind."""
    position, pieces = 7, b""  # after W&B's own header
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room >= 7:
            _, length, kind = struct.unpack_from("<IHB", content, position)
            pieces += content[position + 7 : position + 7 + length]
            if kind in (1, 4):  # a whole record, or its last piece
                yield pieces
                pieces = b""
            room = 7 + length
        position += room


def read_mlflow(folder: str) -> list[dict[str, Points]]:
    """The same of MLflow's."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("sparse")
    assert experiment is not None
    runs = []
    for run in client.search_runs([experiment.experiment_id]):
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        runs.append({name: [(one.step, one.value) for one in history] for name, history in histories.items()})
    return runs


def expected_of(steps: list[StepStats], every: int) -> dict[str, Points]:
    """What the numbers of the exchanges come to: names, Lightning's steps, values."""
    shown = [number for number in range(STEPS) if (number + 1) % every == 0]
    selected, elements, errors = [0], [0], [0.0]
    for step in steps:
        selected.append(selected[-1] + step.selected)
        elements.append(elements[-1] + step.num_workers * step.num_elements)
        errors.append(errors[-1] + step.squared_error)
    expected = {
        "sparse/density": [(number, steps[number].density) for number in shown],
        "sparse/error_norm": [(number, steps[number].error_norm) for number in shown],
        "sparse/payload_bytes": [(number, steps[number].payload_bytes) for number in shown],
        "sparse/threshold": [(number, 0.15) for number in shown],
        "sparse/average_density": [(number, selected[number + 1] / elements[number + 1]) for number in shown],
        "sparse/total_error": [(number, errors[number + 1]) for number in shown],
    }
    for name in steps[0].layers:
        layers = [(number, steps[number].layers[name]) for number in shown]
        expected[f"sparse/layer_density/{name}"] = [(number, layer.density) for number, layer in layers]
        expected[f"sparse/layer_error_norm/{name}"] = [(number, sqrt(layer.squared_error)) for number, layer in layers]
    return expected


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("prepare", "train_with", "read"),
    [
        pytest.param(None, train_with_wandb, read_wandb, marks=_needs("wandb"), id="wandb"),
        pytest.param(make_database, partial(train, mlflow_logger), read_mlflow, marks=_needs("mlflow"), id="mlflow"),
    ],
)
def test_a_logger_holds_what_the_exchanges_were(
    prepare: Any, train_with: Callable[[str, int], list[StepStats]], read: Any, every: int, tmp_path: Path
) -> None:
    if prepare is not None:
        run_workers(prepare, 1, str(tmp_path), process_group=False, new=True)
    steps = run_workers(train_with, 2, str(tmp_path), every, process_group=False, new=True)[0]
    assert len(steps) == STEPS
    [runs] = run_workers(read, 1, str(tmp_path), process_group=False, new=True)
    [found] = runs  # the first worker's, and no other's
    found = {name: points for name, points in found.items() if name.startswith("sparse/")}
    expected = expected_of(steps, every)
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [number for number, _ in found[name]] == [number for number, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-5), name
