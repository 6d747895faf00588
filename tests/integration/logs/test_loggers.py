"""The numbers that W&B and MLflow hold after training on two workers with both monitors."""

import importlib.util
import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from tests.integration.logs.test_step_log import Batches, expected_rows, fit, gradients
from tests.integration.models import SMALL_BUCKETS_MB, Classifier
from tests.workers import run_workers

STEPS = 6
Points = list[tuple[int, float]]


def _needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: `pip install {package}` (it is not among what `make setup` installs)."
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def train(make_logger: Callable[[str], Logger], folder: str, every: int) -> Batches:
    model, options = Classifier(partial(torch.optim.SGD, lr=0.1)), {"max_steps": STEPS, "log_every_n_steps": every}
    return fit(model, gradients(bucket_cap_mb=SMALL_BUCKETS_MB), 1000, make_logger(folder), **options).of_batches


def wandb_logger(folder: str) -> Logger:
    return WandbLogger(project="sparse", save_dir=folder, offline=True)


def train_with_wandb(folder: str, every: int) -> Batches:
    import wandb

    of_batches = train(wandb_logger, folder, every)
    wandb.finish()  # as at the end of a program
    return of_batches


def mlflow_logger(folder: str) -> Logger:
    return MLFlowLogger("sparse", tracking_uri=f"sqlite:///{folder}/mlflow.db")


def make_database(folder: str) -> None:
    """Create the tables first, because concurrent workers would fail to (docs/guides/loggers.md)."""
    mlflow_logger(folder)


def read_wandb(folder: str) -> list[dict[str, Points]]:
    """Return the points of each run by name, from its file."""
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
    """Yield the records of a LevelDB log: blocks of 32 KiB hold pieces, each after its checksum, length and kind."""
    position, pieces = 7, b""  # skips the header of W&B
    while position + 7 <= len(content):
        advance = 32768 - position % 32768
        if advance >= 7:
            _, length, kind = struct.unpack_from("<IHB", content, position)
            pieces += content[position + 7 : position + 7 + length]
            if kind in (1, 4):  # a complete record or its last piece
                yield pieces
                pieces = b""
            advance = 7 + length
        position += advance


def read_mlflow(folder: str) -> list[dict[str, Points]]:
    """Return the points of each run by name, from the database."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("sparse")
    assert experiment is not None
    runs = []
    for run in client.search_runs([experiment.experiment_id]):
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        runs.append({name: [(point.step, point.value) for point in history] for name, history in histories.items()})
    return runs


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("prepare", "train_with", "read"),
    [
        pytest.param(None, train_with_wandb, read_wandb, marks=_needs("wandb"), id="wandb"),
        pytest.param(make_database, partial(train, mlflow_logger), read_mlflow, marks=_needs("mlflow"), id="mlflow"),
    ],
)
def test_a_logger_records_all_exchanges(
    prepare: Any, train_with: Callable[[str, int], Batches], read: Any, every: int, tmp_path: Path
) -> None:
    if prepare is not None:
        run_workers(prepare, 1, str(tmp_path), process_group=False, new=True)
    of_batches = run_workers(train_with, 2, str(tmp_path), every, process_group=False, new=True)[0]
    assert [len(steps) for _, steps in of_batches] == [1] * STEPS
    [runs] = run_workers(read, 1, str(tmp_path), process_group=False, new=True)
    [found] = runs  # only rank 0 logs
    # Times differ from run to run.
    found = {name: points for name, points in found.items() if name.startswith("sparse/") and name[-3:] != "_ms"}
    rows = expected_rows(of_batches, every, waits=False)
    assert found.keys() == rows[every - 1].keys()
    for name, points in found.items():
        assert [step for step, _ in points] == list(rows), name
        assert [value for _, value in points] == pytest.approx([row[name] for row in rows.values()], rel=1e-5), name
