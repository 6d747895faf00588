"""Resumes every strategy from every strategy's checkpoint: keeps residuals or warns of their loss."""

import os
import re
from collections.abc import Mapping
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_sparse import (
    DDPHardThresholdStrategy,
    HardThreshold,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    TopK,
)
from lightning_sparse.checkpointing.content import WRITERS
from lightning_sparse.exchange.sharded_tensors import full_tensors
from tests.integration.models import WEIGHTS_ONLY, assert_equal, clones, messages_of, quiet_trainer, warnings_of
from tests.integration.strategies.hsdp_models import Sharded, data, whole_weights
from tests.workers import run_workers

STOP, END = 5, 7
OTHER_NUMBER = {
    "gradients": "each starts from the mean of the old residuals",
    "drifts": "all begin with the mean of the old weights",
}


class Resumed(NamedTuple):
    """The start of a resumed training on a rank, in whole tensors.

    Attributes:
        squares: the squared norm of each worker's unsent values.
        weights: the parameters by name.
        momentum: the optimizer's buffers by the number of the parameter.
        warned: all warnings.
        messages: all messages, or the error.
    """

    squares: list[float]
    weights: dict[str, Tensor]
    momentum: dict[int, Tensor]
    warned: list[str]
    messages: list[str]


def hsdp(num_workers: int, **options: Any) -> Any:
    return HSDPHardThresholdStrategy(threshold=0.2, replicas=num_workers, **options)


def local_hsdp(num_workers: int, **options: Any) -> Any:
    return LocalHSDPHardThresholdStrategy(threshold=0.05, replicas=num_workers, **options)


IN_ONE_FILE: dict[str, Any] = {"save_distributed_checkpoint": False}
STRATEGIES: dict[str, Any] = {
    "ddp": lambda n: DDPHardThresholdStrategy(threshold=0.2),
    "ddp_topk": lambda n: SparseDDPStrategy(TopK(0.1)),
    "simulated": lambda n: SimulatedWorkersStrategy(HardThreshold(threshold=0.2), n),
    "local": lambda n: LocalHardThresholdStrategy(threshold=0.05),
    "local, kept apart": lambda n: LocalHardThresholdStrategy(threshold=0.05, keep_drift=False),
    "hsdp file": lambda n: hsdp(n, **IN_ONE_FILE),
    "hsdp folder": hsdp,
    "local_hsdp file": lambda n: local_hsdp(n, **IN_ONE_FILE),
    "local_hsdp file, kept apart": lambda n: local_hsdp(n, keep_drift=False, **IN_ONE_FILE),
    "local_hsdp folder, kept apart": lambda n: local_hsdp(n, keep_drift=False),
    "plain ddp": lambda n: "ddp",
}
READERS = [name for name in STRATEGIES if name != "plain ddp"]
OF_DRIFTS = {name for name in READERS if name.startswith("local")}
FAMILIES = {"gradients": {*READERS} - OF_DRIFTS, "drifts": OF_DRIFTS}
OF_THREE = ("ddp", "simulated", "local, kept apart", "hsdp file", "local_hsdp folder, kept apart")
NOTHING_UNSENT = {"local", "local_hsdp file"}
"""Strategies that keep unsent drifts in the weights of each worker; the file holds the mean weights."""


def notes_start(start: Resumed) -> Callback:
    """Return a callback that notes weights, momentum and the squared norm of unsent values of each worker."""

    def note(trainer: Any, module: Any) -> None:
        start.weights.update(clones(whole_weights(module).items()))
        start.momentum.update(momentum_of(trainer))
        start.squares.extend(squares_of(trainer))

    return LambdaCallback(on_train_start=note)


def squares_of(trainer: Any) -> list[float]:
    """Return the squared norm of the unsent values of each worker of this process."""
    owned = [averager.snapshot().own.get("unsent", {}) for averager in getattr(trainer.strategy, "averagers", [])]
    return [sum(float(tensor.double().square().sum()) for tensor in held.values()) for held in owned]


def momentum_of(trainer: Any) -> dict[int, Tensor]:
    buffers = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    return clones(enumerate(map(full_tensors, buffers)))


def saved_momentum(file: Mapping[str, Any]) -> dict[int, Tensor]:
    return {number: state["momentum_buffer"] for number, state in file["optimizer_states"][0]["state"].items()}


def _processes(name: str, num_workers: int) -> int:
    return 1 if name == "simulated" else num_workers


def _write(names: list[str], folder: str) -> dict[str, list[float]]:
    """Save a checkpoint of each strategy; return the squared norms of this process's unsent values."""
    squares = {}
    for name in names:
        trainer = quiet_trainer(STRATEGIES[name](2), max_steps=STOP)
        trainer.fit(Sharded(), data())
        trainer.save_checkpoint(f"{folder}/{name}")
        squares[name] = squares_of(trainer)
    return squares


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> tuple[Path, dict[str, float]]:
    """Return a folder with a checkpoint of every strategy, and the norms of unsent values by strategy."""
    place: Path = tmp_path_factory.mktemp("pairs")
    names = [name for name in STRATEGIES if name != "simulated"]
    results = run_workers(_write, 2, names, str(place), process_group=False)
    results += run_workers(_write, 1, ["simulated"], str(place), process_group=False)
    norms = {}
    for name in STRATEGIES:
        squares = [square for result in results for square in result.get(name, [])]
        norms[name] = sqrt(sum(squares) / len(squares)) if squares else 0.0
    return place, norms


@pytest.fixture
def folder(written: tuple[Path, dict[str, float]]) -> Path:
    """Return a folder with a checkpoint of every strategy."""
    return written[0]


def _resume_from(path: str, reader: str, num_workers: int) -> Resumed:
    start = Resumed([], {}, {}, [], [])
    trainer = quiet_trainer(STRATEGIES[reader](num_workers), max_steps=END, callbacks=[notes_start(start)])
    with messages_of(start.messages), warnings_of(start.warned):
        try:
            trainer.fit(Sharded(), data(), ckpt_path=path)
        except ValueError as error:
            start.messages[:] = [f"ValueError: {error}"]
    return start


def _resume(reader: str, num_workers: int, folder: str) -> dict[str, Resumed]:
    return {writer: _resume_from(f"{folder}/{writer}", reader, num_workers) for writer in STRATEGIES}


def _consolidated(folder: str, reader: str, writer: str) -> Resumed:
    """Resume from a file that Lightning consolidated from a folder."""
    merged = _load_distributed_checkpoint(Path(folder, writer))
    merged["optimizer_states"] = [merged.pop("optimizer_0")]
    path = f"{folder}/consolidated for {os.environ['RANK']}"
    torch.save(merged, path)
    return _resume_from(path, reader, 2)


@pytest.mark.parametrize(
    ("reader", "writer", "starts"),
    [
        ("ddp", "hsdp folder", "residuals of zero"),
        ("hsdp file", "hsdp folder", "residuals of zero"),
        ("local", "local_hsdp folder, kept apart", "The workers' own weights are lost"),
    ],
)
def test_a_consolidated_checkpoint_causes_a_warning_of_lost_state(
    folder: Path, reader: str, writer: str, starts: str
) -> None:
    start, _ = run_workers(_consolidated, 2, str(folder), reader, writer, process_group=False)
    assert start.squares == [0]
    missing = rf"the checkpoint holds no .* \(its folder lightning_sparse is missing\)\. .*{starts}"
    assert any(re.search(missing, text) for text in start.warned)


def _resume_plainly(folder: str) -> None:
    for writer in STRATEGIES:
        path = Path(folder, writer)
        if path.is_dir():
            continue
        start = Resumed([], {}, {}, [], [])
        trainer = quiet_trainer("ddp", max_steps=END, callbacks=[notes_start(start)])
        trainer.fit(Sharded(), data(), ckpt_path=path)
        assert trainer.global_step == END, writer
        assert_starts_as_saved(start, path, writer)
        loaded = Sharded.load_from_checkpoint(path, **WEIGHTS_ONLY)
        assert_equal(clones(loaded.named_parameters()), torch.load(path, weights_only=True)["state_dict"], writer)


def test_plain_ddp_resumes_from_every_file(folder: Path) -> None:
    run_workers(_resume_plainly, 2, str(folder), process_group=False)


def assert_starts_as_saved(start: Resumed, path: Path, writer: str) -> None:
    saved = torch.load(path, weights_only=True)
    assert_equal(start.weights, saved["state_dict"], writer)
    assert_equal(start.momentum, saved_momentum(saved), writer)


def _matching(messages: list[str], word: str) -> list[str]:
    return [message for message in messages if "lightning_sparse" in message and re.search(word, message)]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("num_workers", "reader"), [*product([2], READERS), *product([3], OF_THREE)])
def test_a_resume_keeps_unsent_values_or_warns_of_their_loss(reader: str, num_workers: int, written: Any) -> None:
    folder, norms = written
    results = run_workers(
        _resume, _processes(reader, num_workers), reader, num_workers, str(folder), process_group=False
    )
    family = next(kind for kind, names in FAMILIES.items() if reader in names)
    for writer in STRATEGIES:
        starts = [result[writer] for result in results]
        squares = [square for start in starts for square in start.squares]
        warned, messages = starts[0].warned, starts[0].messages
        kind = next((kind for kind, names in FAMILIES.items() if writer in names), None)
        lost = _matching(warned, "are lost")
        assert len(_matching(messages, "the sparsifier differs from the checkpoint's")) <= 1, writer
        if "folder" in writer and "hsdp" not in reader:
            assert re.search("is a folder, but .* resume with one of these", messages[0]), writer
            continue
        if "folder" not in writer:
            saved_file = torch.load(folder / writer, weights_only=True)
            if family == "gradients" or kind != family:  # else each worker has its own weights
                assert_equal(starts[0].weights, saved_file["state_dict"], writer)
            if family == "gradients" or kind != family or num_workers == 3 or ("hsdp" in reader) != ("hsdp" in writer):
                for start in starts:
                    assert_equal(start.momentum, saved_momentum(saved_file), writer)
        unsent = sqrt(sum(squares) / len(squares))
        if kind is None:
            assert (lost, unsent) == ([], 0), writer
            assert _matching(messages, "written without a sparse exchange"), writer
            continue
        saved = norms[writer]
        assert (saved == 0) == (writer in NOTHING_UNSENT), writer
        if kind == family:
            assert not lost, (writer, lost)
            of_three = f"number of (workers|replicas) is 3 instead of 2: {OTHER_NUMBER[family]}"
            assert bool(_matching(messages, of_three)) == (num_workers == 3), writer
            if saved and not reader.endswith(("local", "local_hsdp file")):
                is_kept = 0 < unsent < saved if num_workers == 3 else unsent == pytest.approx(saved, rel=1e-5)
                assert is_kept, writer  # the norm of a mean is below the mean norm
        else:
            assert unsent == 0, writer
            losses = lost or _matching(messages, "It holds no unsent")
            assert len(losses) == 1, (writer, losses)
            assert f"{WRITERS[kind]} wrote the checkpoint" in losses[0], writer
            assert bool(lost) == (saved > 0), writer
