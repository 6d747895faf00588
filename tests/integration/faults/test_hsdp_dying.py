"""If a rank dies, the ranks of all replicas end, and training resumes from the last checkpoint."""

import functools
import os
import signal
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_sparse.exchange import save_barrier
from tests.integration.faults.test_dying_workers import GROUP_TIMEOUT, Failure
from tests.integration.faults.unwatched_workers import workers
from tests.integration.models import HAS_SAVE_ON_EXCEPTION, assert_equal, quiet_trainer
from tests.integration.strategies.hsdp_models import DRIFTS, GRADIENTS, STEPS, Sharded, data, run_ranks, whole_weights

DIES_AT = 5
saves_on_exception = pytest.mark.skipif(
    not HAS_SAVE_ON_EXCEPTION, reason="this Lightning's ModelCheckpoint has no save_on_exception"
)


class Mortal(Sharded):
    """May fail in a forward, in a backward or during an exchange."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure

    def fail_if_due(self, place: str) -> None:
        self.failure.fail_if_due(place, self.trainer.global_step)

    def loss(self, batch: Any) -> torch.Tensor:
        self.fail_if_due("forward")
        loss = super().loss(batch)
        loss.register_hook(lambda _: self.fail_if_due("backward"))
        return loss


class InExchange(Callback):
    """Lets a rank fail after it has sent its first bucket."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.state._engine
        finish = engine.finish

        def fail_or_finish() -> Any:
            pl_module.fail_if_due("exchange")
            return finish()

        engine.finish = fail_or_finish


def train(
    folder: str,
    kind: Any,
    failure: Failure | None = None,
    resume: str | None = None,
    *,
    keeps_last: bool = False,
    **options: Any,
) -> Any:
    """Train and save every two steps, as ``last.ckpt`` or in separate files, and on an exception if any is raised."""
    failure = failure or Failure()
    strategy = kind(
        threshold=0.03, replicas=2, timeout=timedelta(seconds=GROUP_TIMEOUT), process_group_backend="gloo", **options
    )
    names = {"save_top_k": 0, "save_last": True} if keeps_last else {"save_top_k": -1}
    if failure.way == "raise":
        names["save_on_exception"] = True
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, **names)
    trainer = quiet_trainer(strategy, max_steps=STEPS, limit_train_batches=2, callbacks=[InExchange(), saves])
    model = Mortal(failure)
    trainer.fit(model, data(), ckpt_path=resume)
    return whole_weights(model)


def assert_resumes(folder: Path, kind: Any, checkpoint: Path) -> None:
    """Check that a resumed run ends with the weights of an uninterrupted run."""
    resumed = run_ranks(partial(train, resume=str(checkpoint)), 4, str(folder / "more"), kind)
    assert_equal(resumed, uninterrupted(kind))


@functools.cache
def uninterrupted(kind: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(train, 4, folder, kind)


@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "place", "options"),
    [
        *((GRADIENTS, place, {}) for place in ("forward", "backward", "exchange")),
        (DRIFTS, "exchange", {}),
        (DRIFTS, "forward", {"every_n_steps": 4}),
    ],
)
def test_a_death_ends_all_others(tmp_path: Path, kind: Any, place: str, options: dict[str, Any], rank: int) -> None:
    failure = Failure(place, rank=rank, step=DIES_AT)
    with workers(4, tmp_path, partial(train, **options), str(tmp_path / "saved"), kind, failure) as started:
        seconds = started.wait(range(4))
        codes = [process.exitcode for process in started.processes]
    assert codes[rank] == -signal.SIGKILL
    assert all(code not in (0, -signal.SIGKILL) for place, code in enumerate(codes) if place != rank)
    assert seconds < GROUP_TIMEOUT + 45
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"step=2.ckpt", "step=4.ckpt"}
    if rank == 3 and place == "exchange":
        assert_resumes(tmp_path, kind, tmp_path / "saved" / "step=4.ckpt")


def _train_and_be_killed(folder: str, kind: Any, place: str) -> None:
    """Kill all ranks in the second save of ``last.ckpt``, before or after Lightning writes its part."""
    count = {"saves": 0}
    save = ModelParallelStrategy.save_checkpoint

    def die_if_due(at: str) -> None:
        if at == place and count["saves"] == 2:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def save_or_die(*args: Any, **kwargs: Any) -> None:
        count["saves"] += 1
        die_if_due("between the parts")
        save(*args, **kwargs)
        die_if_due("before it is in place")

    ModelParallelStrategy.save_checkpoint = save_or_die  # type: ignore[method-assign]
    train(folder, kind, keeps_last=True)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "place"), [(GRADIENTS, "between the parts"), (DRIFTS, "before it is in place")])
def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path, kind: Any, place: str) -> None:
    saved = tmp_path / "saved"
    with workers(4, tmp_path, _train_and_be_killed, str(saved), kind, place) as started:
        started.wait(range(4))
        assert [process.exitcode for process in started.processes] == [-signal.SIGKILL] * 4
    assert torch.load(saved / "last.ckpt" / "meta.pt", weights_only=False)["global_step"] == 2
    assert_resumes(tmp_path, kind, saved / "last.ckpt")


def _train_and_raise(folder: str, kind: Any, is_folder: bool, is_alone: bool) -> None:
    save_barrier.SHORT_PATIENCE = 2.0
    failure = Failure("forward", "raise", 1 if is_alone else int(os.environ["RANK"]), DIES_AT)
    train(folder, kind, failure, keeps_last=True, save_distributed_checkpoint=is_folder)


@saves_on_exception
@pytest.mark.full
@pytest.mark.parametrize(("kind", "is_folder"), [(GRADIENTS, True), (DRIFTS, False)], ids=["folder", "file"])
def test_an_exception_on_a_single_rank_is_shown_and_saves_nothing(tmp_path: Path, kind: Any, is_folder: bool) -> None:
    with workers(4, tmp_path, _train_and_raise, str(tmp_path / "saved"), kind, is_folder, True) as started:
        started.wait(range(4))
        assert started.processes[1].exitcode == 1  # not by a signal, which mismatched collectives would cause
    printed = (tmp_path / "output of 1").read_text()
    assert "this worker's own error" in printed
    assert "lightning_sparse: rank 1 handles RuntimeError(" in printed
    assert "No checkpoint was written: rank 0 did not reach the save" in printed
    assert "The exception above ended the training." in printed
    [last] = (tmp_path / "saved").iterdir()
    saved = torch.load(last / "meta.pt" if is_folder else last, weights_only=False)
    assert saved["global_step"] == 4


@saves_on_exception
@pytest.mark.full
def test_an_exception_on_all_ranks_saves_a_checkpoint(tmp_path: Path) -> None:
    with workers(4, tmp_path, _train_and_raise, str(tmp_path / "saved"), DRIFTS, True, False) as started:
        started.wait(range(4))
        assert {process.exitcode for process in started.processes} == {1}
    saved = {path.name: torch.load(path / "meta.pt", weights_only=False) for path in (tmp_path / "saved").iterdir()}
    assert DIES_AT in {checkpoint["global_step"] for checkpoint in saved.values()}
