"""A rank that dies ends all others, in its replica and elsewhere, and the last checkpoint is enough to go on from."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_sparse import HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy
from lightning_sparse.checkpointing import together
from lightning_sparse.checkpointing.whole_files import part_of, put_in_place
from lightning_sparse.drift.shard_averager import ShardModelAverager
from lightning_sparse.gradients.shard_exchange import ShardExchange
from tests.integration.hsdp_models import STEPS, Sharded, data, num_ranks, whole_weights
from tests.integration.models import quiet_trainer
from tests.integration.test_dying_workers import GROUP_TIMEOUT
from tests.integration.unwatched_workers import workers
from tests.workers import run_workers

THRESHOLD = 0.03
DIES_AT = 5


class Mortal(Sharded):
    """One of its ranks dies in its forward, in its backward, or when replicas exchange."""

    def __init__(self, place: str = "nowhere", rank: int = 0) -> None:
        super().__init__()
        self.place, self.rank = place, rank

    def meet(self, place: str) -> None:
        if (place, dist_rank()) == (self.place, self.rank) and self.trainer.global_step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, batch: Any) -> torch.Tensor:
        self.meet("forward")
        loss = super().loss(batch)
        loss.register_hook(lambda _: self.meet("backward"))
        return loss


def dist_rank() -> int:
    return int(os.environ["RANK"])


class InExchange(Callback):
    """Lets a rank die once it has sent what it selected of its first bucket."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        state: ShardExchange | ShardModelAverager = trainer.strategy.state
        finish = state._engine.finish

        def struck() -> Any:
            pl_module.meet("exchange")
            return finish()

        state._engine.finish = struck  # type: ignore[method-assign]


def _train(folder: str, make: Any, place: str = "nowhere", rank: int = 0, resume: str | None = None) -> Any:
    model = Mortal(place, rank)
    strategy = make(
        threshold=THRESHOLD, replicas=2, timeout=timedelta(seconds=GROUP_TIMEOUT), process_group_backend="gloo"
    )
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
    trainer = quiet_trainer(
        strategy,
        num_workers=num_ranks(),
        max_steps=STEPS,
        limit_train_batches=2,
        callbacks=[InExchange(), saves],
        enable_checkpointing=True,
    )
    trainer.fit(model, data(), ckpt_path=resume)
    return whole_weights(model)


GRADIENTS, DRIFTS = HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("make", "place"),
    [(GRADIENTS, "forward"), (GRADIENTS, "backward"), (GRADIENTS, "exchange"), (DRIFTS, "exchange")],
)
def test_a_death_ends_all_others(tmp_path: Path, make: Any, place: str, rank: int) -> None:
    with workers(4, tmp_path, _train, str(tmp_path / "saved"), make, place, rank) as started:
        seconds = started.wait(range(4))
        codes = [one.exitcode for one in started.processes]
    assert codes[rank] == -signal.SIGKILL
    assert all(code not in (0, -signal.SIGKILL) for place, code in enumerate(codes) if place != rank)
    assert seconds < 60
    assert {one.name for one in (tmp_path / "saved").iterdir()} == {"step=2.ckpt", "step=4.ckpt"}


def _resume(folder: str, make: Any, resume: str | None) -> Any:
    return _train(folder, make, resume=resume)


@pytest.mark.full
@pytest.mark.parametrize("make", [GRADIENTS, DRIFTS])
def test_the_last_checkpoint_is_enough(tmp_path: Path, make: Any) -> None:
    with workers(4, tmp_path, _train, str(tmp_path / "saved"), make, "exchange", 2) as started:
        started.wait(range(4))
    last = str(tmp_path / "saved" / "step=4.ckpt")
    resumed = run_workers(_resume, 4, str(tmp_path / "more"), make, last, process_group=False, new=True)
    straight = run_workers(_resume, 4, str(tmp_path / "other"), make, None, process_group=False, new=True)
    for one, other in zip(resumed, straight, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _train_and_be_killed(folder: str, make: Any, place: str) -> None:
    """All ranks are killed in the second save of the same name: before Lightning writes its part, or after it."""
    count = {"saves": 0}
    save = ModelParallelStrategy.save_checkpoint

    def meet(at: str) -> None:
        if at == place and count["saves"] == 2:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args: Any, **kwargs: Any) -> None:
        count["saves"] += 1
        meet("between the parts")
        save(*args, **kwargs)
        meet("before it is in place")

    ModelParallelStrategy.save_checkpoint = counted  # type: ignore[method-assign]
    trainer = quiet_trainer(
        make(threshold=THRESHOLD, replicas=2),
        num_workers=num_ranks(),
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=2)],
        limit_train_batches=2,
        enable_checkpointing=True,
    )
    trainer.fit(Mortal(), data())


@pytest.mark.full
@pytest.mark.parametrize("place", ["between the parts", "before it is in place"])
@pytest.mark.parametrize("make", [GRADIENTS, DRIFTS])
def test_a_kill_in_a_save_leaves_the_checkpoint_before(tmp_path: Path, make: Any, place: str) -> None:
    saved = tmp_path / "saved"
    with workers(4, tmp_path, _train_and_be_killed, str(saved), make, place) as started:
        started.wait(range(4))
        assert [one.exitcode for one in started.processes] == [-signal.SIGKILL] * 4
    last = str(saved / "last.ckpt")
    assert torch.load(f"{last}/meta.pt", weights_only=False)["global_step"] == 2
    resumed = run_workers(_resume, 4, str(tmp_path / "more"), make, last, process_group=False, new=True)
    straight = run_workers(_resume, 4, str(tmp_path / "other"), make, None, process_group=False, new=True)
    for one, other in zip(resumed, straight, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("before", ["nothing", "a file", "a folder"])
def test_a_folder_that_is_whole_takes_the_place_of_what_was_there(tmp_path: Path, before: str) -> None:
    path = tmp_path / "last.ckpt"
    if before == "a file":
        path.write_text("old")
    elif before == "a folder":
        path.mkdir()
        (path / "old").touch()
    part_of(path).mkdir()
    (part_of(path) / "new").touch()
    for _ in range(2):  # the second node with the same disk finds it done
        put_in_place(path)
        assert [one.name for one in path.iterdir()] == ["new"]
        assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


class Raising(Callback):
    """Raises on one rank, or on all."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == DIES_AT and dist_rank() in self.ranks:
            raise RuntimeError("my own error")


def _train_and_raise(folder: str, make: Any, is_folder: bool, ranks: list[int]) -> None:
    together.PATIENCE_IN_TROUBLE = 2.0
    strategy = make(threshold=THRESHOLD, replicas=2, save_distributed_checkpoint=is_folder)
    saves = ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=2, save_on_exception=True)
    trainer = quiet_trainer(
        strategy,
        num_workers=num_ranks(),
        max_steps=STEPS,
        limit_train_batches=2,
        callbacks=[Raising(ranks), saves],
        enable_checkpointing=True,
    )
    trainer.fit(Mortal(), data())


@pytest.mark.full
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("make", [GRADIENTS, DRIFTS])
def test_who_is_alone_with_an_exception_saves_nothing_and_shows_it(tmp_path: Path, make: Any, is_folder: bool) -> None:
    with workers(4, tmp_path, _train_and_raise, str(tmp_path / "saved"), make, is_folder, [1]) as started:
        started.wait(range(4))
        assert started.processes[1].exitcode == 1  # not by a signal, as of a collective that met another
    said = (tmp_path / "output of 1").read_text()
    assert "my own error" in said
    assert "No checkpoint was written: the first worker did not come to save" in said
    [last] = (tmp_path / "saved").iterdir()
    saved = torch.load(last / "meta.pt" if is_folder else last, weights_only=False)
    assert saved["global_step"] == 4


@pytest.mark.full
def test_an_exception_of_all_is_saved(tmp_path: Path) -> None:
    with workers(4, tmp_path, _train_and_raise, str(tmp_path / "saved"), DRIFTS, True, [0, 1, 2, 3]) as started:
        started.wait(range(4))
        assert {one.exitcode for one in started.processes} == {1}
    saved = {one.name: torch.load(one / "meta.pt", weights_only=False) for one in (tmp_path / "saved").iterdir()}
    assert DIES_AT in {one["global_step"] for one in saved.values()}
