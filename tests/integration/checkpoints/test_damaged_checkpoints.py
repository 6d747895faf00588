"""Every worker rejects damaged state of a strategy before it loads anything."""

import copy
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import model_parallel
from torch import Tensor

from lightning_sparse import (
    DDPHardThresholdStrategy,
    HardThreshold,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
    SimulatedWorkersStrategy,
)
from lightning_sparse.checkpointing.content import KEY
from lightning_sparse.checkpointing.files import WholeFileCheckpointIO
from lightning_sparse.checkpointing.restoring import restore
from tests.distributed.drift.drift_simulation import NESTEROV
from tests.integration.models import Classifier, adam, data, quiet_trainer
from tests.integration.strategies.hsdp_models import Sharded
from tests.integration.strategies.hsdp_models import data as shard_data
from tests.workers import on_workers, run_workers

CASES = 120
"""Number of seeds for each strategy. A manual run of 1,000 seeds each also passed."""

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPHardThresholdStrategy(density=0.1),
    "local": lambda: LocalHardThresholdStrategy(threshold=0.02, keep_drift=False, outer_optimizer=NESTEROV),
    "hsdp": lambda: HSDPHardThresholdStrategy(threshold=0.1, replicas=2, save_distributed_checkpoint=False),
    "local_hsdp": lambda: LocalHSDPHardThresholdStrategy(
        threshold=0.02, replicas=2, keep_drift=False, outer_optimizer=NESTEROV, save_distributed_checkpoint=False
    ),
    "simulated": lambda: SimulatedWorkersStrategy(HardThreshold(density=0.1), 2),
}


def flipped(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() and value.element_size() in (4, 8):
        changed = value.clone()
        bits = changed.view(-1).view(torch.int32)  # the last 32-bit word of a number holds the exponent
        bits[-1] ^= 1 << (30 if value.is_floating_point() else 5)
        return changed
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return -1e30 * (value + 1)
    return 7 if value is None else None


def with_nan(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        changed = value.clone()
        changed.view(-1)[-1] = float("nan")
        return changed
    return float("nan")


def resized(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.cat([value.flatten(), value.flatten(), torch.zeros(1, dtype=value.dtype)])
    return [value, value]


def retyped(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else f"{value}!"


CHANGES = [flipped, with_nan, resized, retyped]


def damaged(content: dict[str, Any], seed: int) -> Any:
    """Return the saved state of a strategy with one entry changed or missing, at any depth."""
    chance = random.Random(seed)
    container: Any = {"content": copy.deepcopy(content)}
    root, key = container, "content"
    while isinstance(inner := container[key], (dict, list)) and inner and (container is root or chance.random() < 0.8):
        container = inner
        key = chance.choice(list(container) if isinstance(container, dict) else range(len(container)))
    change = chance.choice([*CHANGES, None])
    if change is None:
        del container[key]
    else:
        container[key] = change(container[key])
    return root["content"]


class DamagedLoader(Callback):
    """Loads damaged copies of a checkpoint when training starts, and the intact one at the end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.accepted: list[int] = []
        self.errors: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint = torch.load(self.path, weights_only=True)
        self.load(trainer, checkpoint)
        before = [averager.state_dict()["seal"] for averager in trainer.strategy.averagers]
        contents = [damaged(checkpoint[KEY], seed) for seed in range(CASES)] + [3, "text", [], {}]
        for seed, content in enumerate(contents):
            try:
                self.load(trainer, {**checkpoint, KEY: content})
            except RuntimeError as error:
                self.errors.append(re.sub(r"^Rank \d+: ", "", str(error)))
            else:
                self.accepted.append(seed)
        assert [averager.state_dict()["seal"] for averager in trainer.strategy.averagers] == before
        self.load(trainer, checkpoint)

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        strategy: Any = trainer.strategy
        if "HSDP" in type(strategy).__name__:
            with strategy._ignoring_steps():
                restore(strategy.averagers, checkpoint[KEY], path=Path(self.path))
        else:
            strategy.load_optimizer_state_dict(checkpoint)


def _load_damaged(name: str, path: str) -> tuple[list[int], list[str], bool]:
    def fit(max_steps: int, *callbacks: Callback) -> Any:
        trainer = quiet_trainer(STRATEGIES[name](), max_steps=max_steps, callbacks=list(callbacks))
        model = Sharded() if "hsdp" in name else Classifier(adam)
        trainer.fit(model, shard_data() if "hsdp" in name else data(256))
        return trainer

    fit(6).save_checkpoint(path)
    loads = DamagedLoader(path)
    trainer = fit(9, loads)
    finite = all(bool(parameter.isfinite().all()) for parameter in trainer.lightning_module.parameters())
    return loads.accepted, loads.errors, finite


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_workers_reject_a_changed_entry_before_loading(name: str, tmp_path: Path) -> None:
    num_workers, path = 1 if name == "simulated" else 2, str(tmp_path / "6.ckpt")
    results = run_workers(_load_damaged, num_workers, name, path, process_group=False)
    for accepted, errors, finite in results:
        assert accepted == []
        assert errors == results[0][1]
        heads = {error.split(":")[0] for error in errors}
        assert heads <= {"lightning_sparse cannot resume", "The checkpoint holds gradients in format"}
        assert finite


def _flip(file: Path) -> None:
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 2] ^= 1
    file.write_bytes(octets)


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file is missing": (Path.unlink, "lightning_sparse cannot be read"),
    "a file is cut off": (lambda file: os.truncate(file, file.stat().st_size - 200), "distcp has changed"),
    "a flipped bit": (_flip, "distcp has changed"),
}


@pytest.mark.parametrize("name", FOLDERS)
@on_workers(2, process_group=False)
def test_all_ranks_reject_a_damaged_folder(name: str, tmp_path: Path) -> None:
    strategy = HSDPHardThresholdStrategy(threshold=0.1, replicas=2)
    trainer = quiet_trainer(strategy, max_steps=4)
    trainer.fit(Sharded(), shard_data())
    path = tmp_path / "4.ckpt"
    trainer.save_checkpoint(path)
    if trainer.global_rank == 0:
        FOLDERS[name][0](next((path / "lightning_sparse").glob("*.distcp")))
    trainer.strategy.barrier()
    again = quiet_trainer(HSDPHardThresholdStrategy(threshold=0.1, replicas=2), max_steps=6)
    with pytest.raises(RuntimeError, match=f"lightning_sparse cannot resume.*{FOLDERS[name][1]}"):
        again.fit(Sharded(), shard_data(), ckpt_path=path)


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="a folder has this name"):
        WholeFileCheckpointIO().save_checkpoint({}, tmp_path)
    assert not [*tmp_path.parent.glob(".*.part")]


def test_a_save_that_fails_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WholeFileCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "last.ckpt")
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        WholeFileCheckpointIO().save_checkpoint({"step": 2}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True) == {"step": 1}


@on_workers(2, process_group=False)
def test_shards_replace_a_checkpoint_of_either_form_or_a_link_and_no_other_folder(tmp_path: Path) -> None:
    last, saved = tmp_path / "saved/last.ckpt", tmp_path / "saved"
    for is_folder in (True, False, True):
        strategy = HSDPHardThresholdStrategy(threshold=0.1, replicas=2, save_distributed_checkpoint=is_folder)
        trainer = quiet_trainer(strategy, max_steps=1)
        trainer.fit(Sharded(), shard_data())
        (saved / ".last.ckpt.part").mkdir(parents=True, exist_ok=True)  # of a killed save
        trainer.save_checkpoint(last)
        assert last.is_dir() == is_folder
        with pytest.raises(IsADirectoryError, match="a folder has this name"):
            trainer.save_checkpoint(saved)
        assert [path.name for path in saved.iterdir()] == ["last.ckpt"]
        target = tmp_path / f"before-{len(list(tmp_path.iterdir()))}.ckpt"
        trainer.strategy.barrier()
        if trainer.global_rank == 0:
            last.rename(target)
            last.symlink_to(target)
        trainer.strategy.barrier()
        for _ in range(2):
            trainer.save_checkpoint(last)
            assert [path.name for path in saved.iterdir()] == ["last.ckpt"]
        assert target.exists()
        assert not last.is_symlink()
    interrupted = patch.object(model_parallel, "_distributed_checkpoint_save", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        trainer.save_checkpoint(last)
    trainer.strategy.barrier()
    assert [path.name for path in saved.iterdir()] == ["last.ckpt"]
