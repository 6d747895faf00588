"""Resumes every strategy from every strategy's checkpoint: keeps residuals or names the lost norm."""

import os
import re
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

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
from lightning_sparse.checkpointing.content import KEY, WRITERS
from tests.integration.models import assert_equal, clones, messages_of, quiet_trainer, warnings_of
from tests.integration.strategies.hsdp_models import Sharded, data, whole_weights
from tests.workers import run_workers

STOP, END = 5, 7
OTHER_NUMBER = {
    "gradients": "each starts from the mean of the old residuals",
    "drifts": "all begin with the mean of the old weights",
}
Resumed = tuple[list[float], list[str], list[str], dict[str, torch.Tensor]]


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


def notes_start(squares: list[float], weights: dict[str, torch.Tensor]) -> Callback:
    """Return a callback that notes the weights, and the squared norm of unsent values of each worker."""

    def note(trainer: Any, module: Any) -> None:
        weights.update(clones(whole_weights(module).items()))
        for state in getattr(getattr(trainer.strategy, "workers", None), "each", [trainer.strategy.state]):
            held = state.snapshot().own.get("unsent", {})
            squares.append(sum(float(tensor.double().square().sum()) for tensor in held.values()))

    return LambdaCallback(on_train_start=note)


def _processes(name: str, num_workers: int) -> int:
    return 1 if name == "simulated" else num_workers


def _write(names: list[str], folder: str) -> None:
    for name in names:
        trainer = quiet_trainer(STRATEGIES[name](2), max_steps=STOP)
        trainer.fit(Sharded(), data())
        trainer.save_checkpoint(f"{folder}/{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Return a folder with a checkpoint of every strategy."""
    place: Path = tmp_path_factory.mktemp("pairs")
    run_workers(_write, 2, [name for name in STRATEGIES if name != "simulated"], str(place), process_group=False)
    run_workers(_write, 1, ["simulated"], str(place), process_group=False)
    return place


def _resume_from(path: str, reader: str, num_workers: int) -> Resumed:
    """Return squared norms of unsent values after a resume, warnings, messages, and weights."""
    unsent, warned, messages, weights = list[float](), list[str](), list[str](), dict[str, torch.Tensor]()
    trainer = quiet_trainer(STRATEGIES[reader](num_workers), max_steps=END, callbacks=[notes_start(unsent, weights)])
    with messages_of(messages), warnings_of(warned):
        try:
            trainer.fit(Sharded(), data(), ckpt_path=path)
        except ValueError as error:
            messages = [f"ValueError: {error}"]
    return unsent, warned, messages, weights


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
    (unsent, warned, *_), _ = run_workers(_consolidated, 2, str(folder), reader, writer, process_group=False)
    assert unsent == [0]
    missing = rf"the checkpoint holds no .* \(its folder lightning_sparse is missing\)\. .*{starts}"
    assert any(re.search(missing, text) for text in warned)


def _resume_plainly(folder: str) -> None:
    started: list[dict[str, torch.Tensor]] = []
    for writer in STRATEGIES:
        path = Path(folder, writer)
        if path.is_dir():
            continue
        look = LambdaCallback(on_train_start=lambda _, module: started.append(clones(module.state_dict().items())))
        trainer = quiet_trainer("ddp", max_steps=END, callbacks=[look])
        trainer.fit(Sharded(), data(), ckpt_path=path)
        assert trainer.global_step == END, writer
        assert_equal(started.pop(), torch.load(path, weights_only=True)["state_dict"], writer)


def test_plain_ddp_resumes_from_every_file(folder: Path) -> None:
    run_workers(_resume_plainly, 2, str(folder), process_group=False)


def _unsent_norm(path: Path) -> float | None:
    file = path / "meta.pt" if path.is_dir() else path
    norm: float | None = torch.load(file, weights_only=True)[KEY]["unsent_norm"]
    return norm


def _matching(messages: list[str], word: str) -> list[str]:
    return [message for message in messages if "lightning_sparse" in message and re.search(word, message)]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("num_workers", "reader"), [*product([2], READERS), *product([3], OF_THREE)])
def test_a_resume_keeps_unsent_values_or_warns_of_their_loss(reader: str, num_workers: int, folder: Path) -> None:
    results = run_workers(
        _resume, _processes(reader, num_workers), reader, num_workers, str(folder), process_group=False
    )
    family = next(kind for kind, names in FAMILIES.items() if reader in names)
    for writer in STRATEGIES:
        squares = [square for result in results for square in result[writer][0]]
        _, warned, messages, weights = results[0][writer]
        kind = next((kind for kind, names in FAMILIES.items() if writer in names), None)
        lost = _matching(warned, "are lost")
        assert len(_matching(messages, "the sparsifier differs from the checkpoint's")) <= 1, writer
        if "folder" in writer and "hsdp" not in reader:
            assert re.search("is a folder, but .* resume with one of these", messages[0]), writer
            continue
        if "folder" not in writer and (family == "gradients" or kind != family):  # else each worker has its own
            assert_equal(weights, torch.load(folder / writer, weights_only=True)["state_dict"], writer)
        unsent = sqrt(sum(squares) / len(squares))
        if kind is None:
            assert (lost, unsent) == ([], 0), writer
            assert _matching(messages, "written without a sparse exchange"), writer
            continue
        saved = _unsent_norm(folder / writer)
        assert (saved is None) == (writer in NOTHING_UNSENT), writer
        if kind == family:
            assert not lost, (writer, lost)
            of_three = f"number of (workers|replicas) is 3 instead of 2: {OTHER_NUMBER[family]}"
            assert bool(_matching(messages, of_three)) == (num_workers == 3), writer
            if saved is not None and not reader.endswith(("local", "local_hsdp file")):
                is_kept = 0 < unsent < saved if num_workers == 3 else unsent == pytest.approx(saved, rel=1e-5)
                assert is_kept, writer  # the norm of a mean is below the mean norm
        else:
            assert unsent == 0, writer
            losses = lost or _matching(messages, "It holds no unsent")
            assert len(losses) == 1, (writer, losses)
            assert f"{WRITERS[kind]} wrote the checkpoint" in losses[0], writer
            assert bool(lost) == (saved is not None), writer
            assert saved is None or f"(norm {saved:.3g})" in losses[0], writer
