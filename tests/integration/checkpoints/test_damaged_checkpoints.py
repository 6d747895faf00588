"""Incomplete checkpoints raise an error before training, and a failed save leaves the old checkpoint."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import model_parallel

from lightning_sparse import DDPHardThresholdStrategy, HSDPHardThresholdStrategy, LocalHardThresholdStrategy
from lightning_sparse.checkpointing.content import KEY
from lightning_sparse.checkpointing.files import WholeFileCheckpointIO
from tests.integration.models import Classifier, adam, data, quiet_trainer, warnings_of
from tests.integration.strategies.hsdp_models import Sharded
from tests.integration.strategies.hsdp_models import data as shard_data
from tests.workers import on_workers


def _cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 200)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "tensors are missing": ("*.distcp", Path.unlink),
    "tensors are cut off": ("*.distcp", _cut_off),
    "the list of tensors is missing": (".metadata", Path.unlink),
    "the list of tensors is cut off": (".metadata", _cut_off),
}


@pytest.mark.parametrize("name", DAMAGES)
@on_workers(2, process_group=False)
def test_all_ranks_reject_an_incomplete_folder(name: str, tmp_path: Path) -> None:
    strategy = HSDPHardThresholdStrategy(threshold=0.1, replicas=2)
    trainer = quiet_trainer(strategy, max_steps=4)
    trainer.fit(Sharded(), shard_data())
    path = tmp_path / "4.ckpt"
    trainer.save_checkpoint(path)
    if trainer.global_rank == 0:
        pattern, damage = DAMAGES[name]
        damage(next((path / "lightning_sparse").glob(pattern)))
    trainer.strategy.barrier()
    again = quiet_trainer(HSDPHardThresholdStrategy(threshold=0.1, replicas=2), max_steps=6)
    with pytest.raises(RuntimeError, match=r"cannot resume: the folder .*lightning_sparse' cannot be read"):
        again.fit(Sharded(), shard_data(), ckpt_path=path)
    assert again.strategy.state.last_step is None
    trainer.strategy.barrier()
    if trainer.global_rank == 0:
        shutil.rmtree(path / "lightning_sparse")
    trainer.strategy.barrier()
    with warnings_of(messages := [], "its folder lightning_sparse is missing"):
        again.fit(Sharded(), shard_data(), ckpt_path=path)
    assert (again.global_step, len(messages)) == (6, trainer.global_rank == 0)


@pytest.mark.parametrize("make", [DDPHardThresholdStrategy, LocalHardThresholdStrategy])
@on_workers(2, process_group=False)
def test_all_ranks_reject_a_file_that_is_cut_off_or_of_a_newer_version(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "4.ckpt"
    trainer = quiet_trainer(make(threshold=0.1), max_steps=4)
    trainer.fit(Classifier(adam), data(256))
    trainer.save_checkpoint(path)
    if trainer.global_rank == 0:
        saved = torch.load(path, weights_only=True)
        saved[KEY]["version"] += 1
        torch.save(saved, tmp_path / "newer.ckpt")
        _cut_off(path)
    trainer.strategy.barrier()
    newer = "The checkpoint holds .* in format 2, but this version of lightning_sparse reads formats up to 1"
    cut_off = "zip archive|Invalid argument"  # torch's error depends on the size
    for name, message in (("newer.ckpt", newer), ("4.ckpt", cut_off)):
        again = quiet_trainer(make(threshold=0.1), max_steps=6)
        with pytest.raises((RuntimeError, OSError), match=message):
            again.fit(Classifier(adam), data(256), ckpt_path=tmp_path / name)
        assert not any(averager.last_step for averager in again.strategy.averagers)


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
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

    def interrupt(*_: object) -> None:
        dist.barrier()  # all ranks create the incomplete folder, which rank 0 removes after the interrupt
        raise KeyboardInterrupt

    interrupted = patch.object(model_parallel, "_distributed_checkpoint_save", interrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        trainer.save_checkpoint(last)
    trainer.strategy.barrier()
    assert [path.name for path in saved.iterdir()] == ["last.ckpt"]
