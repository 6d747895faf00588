"""If a worker dies, the others end, and the run resumes from its last checkpoint.

Workers are separate processes with torchrun's environment variables but without an agent, so that only the exchange
can end them. Tests of torchrun run a script with it.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_sparse import HardThreshold, SparseDDPStrategy
from lightning_sparse.checkpointing.content import KEY
from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection, Sparsifier
from tests.integration.checkpoints.test_checkpoint import ResumableData
from tests.integration.faults.unwatched_workers import HANG, environment, is_running, wait_until, workers
from tests.integration.models import (
    SMALL_BUCKETS_MB,
    WEIGHTS_ONLY,
    Classifier,
    Recorder,
    assert_equal,
    clones,
    nesterov,
    quiet_trainer,
)
from tests.workers import environment_of, reserved_port, run_workers

GROUP_TIMEOUT = 15.0
"""Default timeout of the process group in seconds."""
ENDLESS = 1_000_000
THRESHOLD = 0.1
"""Sends about a tenth of the coordinates per step."""

# The training and its failure.


@dataclass
class Failure:
    """The failure of one worker.

    Args:
        place: ``"forward"``, ``"backward"``, ``"hook"``, ``"loader"`` or ``"loader process"``.
        way: ``"kill"``: SIGKILL; ``"raise"``: an exception; ``"stop"``: SIGSTOP, which suspends the process.
        rank: rank of the worker.
        step: step of the failure, counted from 0.
    """

    place: str = "nowhere"
    way: str = "kill"
    rank: int = 1
    step: int = 3
    now: int = field(default=-1, init=False)
    times: int = field(default=0, init=False)

    def __deepcopy__(self, memo: Any) -> "Failure":
        return self  # a run copies its sparsifier, but not the counters of its failure

    def __str__(self) -> str:
        return f"{self.way} {self.rank} in {self.place}"

    def begin(self, step: int) -> None:
        self.now, self.times = step, 0

    def fail_if_due(self, place: str, step: int | None = None) -> None:
        if (place, int(os.environ["RANK"])) != (self.place, self.rank):
            return
        self.times += 1
        if (self.now if step is None else step) != self.step or (place == "hook" and self.times != 2):
            return  # fails at the second bucket, while the first is being exchanged
        print(f"<rank {self.rank} fails: {self.way} in {place}>", flush=True)
        if self.way == "raise":
            raise RuntimeError("this worker's own error")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.way])


class DyingSparsifier(Sparsifier):
    """A custom sparsifier with a hard threshold that may fail."""

    def __init__(self, threshold: float, failure: Failure) -> None:
        self.threshold = threshold
        self._failure = failure

    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        self._failure.fail_if_due("hook")
        indices = compensated.abs().lt(self.threshold).logical_not().nonzero().squeeze(1)
        return Selection(indices, compensated[indices])


class Dying(Classifier):
    """May fail before its forward, and in its backward while the later layers are being exchanged."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(nesterov)
        self.failure = failure
        self.first.weight.register_hook(lambda _: self.failure.fail_if_due("backward"))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.failure.begin(self.global_step)
        self.failure.fail_if_due("forward")
        return super().training_step(batch, batch_idx)


class Batches(ResumableData):
    """A loader that can resume, or a data set for a loader. May fail."""

    def __init__(self, batches_per_epoch: int, failure: Failure) -> None:
        super().__init__(batches_per_epoch)
        self.failure = failure

    def batch(self, number: int) -> list[Tensor]:
        self.failure.fail_if_due("loader" if get_worker_info() is None else "loader process", number)
        return super().batch(number)

    __getitem__ = batch


def train(
    max_steps: int,
    *,
    failure: Failure | None = None,
    exchange: str = "gather",
    timeout: float = GROUP_TIMEOUT,
    loader_processes: int | None = None,
    callbacks: tuple[Callback, ...] = (),
    resume: str | None = None,
) -> dict[str, Any]:
    """Train and return the final state; without ``loader_processes``, the loader can resume."""
    failure = failure or Failure()
    recorder, start = Recorder(), _Start(failure)
    trainer = quiet_trainer(
        SparseDDPStrategy(
            DyingSparsifier(THRESHOLD, failure) if failure.place == "hook" else HardThreshold(threshold=THRESHOLD),
            exchange=exchange,
            timeout=timedelta(seconds=timeout),
            bucket_cap_mb=SMALL_BUCKETS_MB,
            process_group_backend="gloo",
        ),
        num_workers=int(os.environ["WORLD_SIZE"]),
        max_steps=max_steps,
        callbacks=[recorder, start, *callbacks],
        use_distributed_sampler=False,
    )
    loader: Any = Batches(5 if loader_processes is None else ENDLESS, failure)
    if loader_processes is not None:
        # The default of Linux; processes of a fork server would default to another fork server.
        context = "fork" if loader_processes else None
        loader = DataLoader(loader, batch_size=None, num_workers=loader_processes, multiprocessing_context=context)
    trainer.fit(Dying(failure), loader, ckpt_path=resume, **WEIGHTS_ONLY)
    return {
        "start": start.step,
        "start_residuals": start.residuals,
        "steps": trainer.global_step,
        "weights": recorder.weights,
        "residuals": recorder.residuals,
    }


class _Start(Callback):
    """Records the first step and its residuals; prints the number of steps if a worker will fail."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.failure.place != "nowhere":
            print(f"<{trainer.global_step} steps done>", flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        self.residuals = clones(trainer.strategy.state.residuals.state_dict().items())


def last_checkpoint(folder: Path | str, every: int) -> ModelCheckpoint:
    """Return the callback that keeps ``last.ckpt`` and overwrites it every few steps."""
    return ModelCheckpoint(folder, "{step}", save_last=True, save_top_k=0, every_n_train_steps=every)


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


# SIGINT works as in the foreground of a terminal; one thread gives equal bits as in other workers.
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
torch.set_num_threads(1)
from tests.integration.faults import test_dying_workers
getattr(test_dying_workers, sys.argv[1])(*sys.argv[2:])
"""


@contextlib.contextmanager
def torchrun(num_workers: int, folder: Path, function: str, *args: str, restarts: int = 0) -> Iterator[Any]:
    """Start torchrun in a separate process group, as a shell does; end all its processes."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(num_workers)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", str(restarts)]
    command += [str(folder / "train.py"), function, *args]
    # Without this, restarted workers find addresses of the dead workers in the store of the agent. With torch 2.15 and
    # Gloo, every restart by torchrun then fails, also without this package.
    variables = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with (folder / "output of torchrun").open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers, which are in separate sessions
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                for path in folder.glob("process of *"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(path.read_text()), signal.SIGKILL)


def end_of(process: Any, folder: Path) -> tuple[int, str]:
    """Wait for torchrun to end; return its exit code and its output."""
    try:
        process.wait(HANG)
    except subprocess.TimeoutExpired:
        pytest.fail(f"torchrun hangs:\n{(folder / 'output of torchrun').read_text()}")
    return process.returncode, (folder / "output of torchrun").read_text()


# A failure ends the others.


def assert_the_others_end(folder: Path, failure: Failure, within: float, **options: Any) -> None:
    """Check that two of three workers notice the failure of the third, and end with their own error."""
    options = {"loader_processes": 0} | options
    with workers(3, folder, partial(train, ENDLESS, failure=failure, **options)) as started:
        started.wait_for(failure.rank, lambda: f"<rank {failure.rank} fails" in started.output(failure.rank), "to fail")
        others = [rank for rank in range(3) if rank != failure.rank]
        seconds = started.wait(others)
        if failure.way != "stop":
            started.wait([failure.rank])
            killed = failure.way == "kill" and failure.place != "loader process"
            assert started.processes[failure.rank].exitcode == (-signal.SIGKILL if killed else 1)
        for rank in others:
            output = started.output(rank)
            # 1 means an uncaught exception; an abort would give -6.
            assert started.processes[rank].exitcode == 1, output
            assert "Traceback (most recent call last)" in output
            assert "RuntimeError: " in output, output
            assert "this worker's own error" not in output
            assert "<1 steps done>" in output or failure.place == "loader process"
            assert f"<{failure.step + 1} steps done>" not in output  # a step without the failed worker would be wrong
        assert seconds < within, "\n".join(map(started.output, range(3)))


PLACES = ("forward", "backward", "hook", "loader process")
DEATHS = [
    *(("gather", Failure(place, way)) for way in ("kill", "raise") for place in PLACES),
    *((exchange, Failure(place)) for exchange in ("dense", "reduce_scatter") for place in ("forward", "hook")),
    ("gather", Failure("hook", rank=0)),  # rank 0 serves the store
]


@pytest.mark.parametrize(("exchange", "failure"), DEATHS, ids=str)
def test_a_worker_that_dies_ends_the_others(exchange: str, failure: Failure, tmp_path: Path) -> None:
    processes = int(failure.place == "loader process")
    assert_the_others_end(tmp_path, failure, GROUP_TIMEOUT, exchange=exchange, loader_processes=processes)


def die_in_a_script(place: str, way: str) -> None:
    train(ENDLESS, failure=Failure(place, way))


@pytest.mark.slow
def test_an_error_in_the_hook_ends_whole_python_processes(tmp_path: Path) -> None:
    # Unlike processes of a fork server, a script finalizes the interpreter and its process group.
    command = [sys.executable, "-c", SCRIPT, "die_in_a_script", "hook", "raise"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with reserved_port() as port:
        variables = [environment(**environment_of(rank, 2, port)) for rank in range(2)]
        both = [subprocess.Popen(command, env=of_rank, **pipes) for of_rank in variables]
        try:
            first, second = (process.communicate(timeout=HANG)[0] for process in both)
        finally:
            for process in both:
                process.kill()
    assert [process.returncode for process in both] == [1, 1], first + second
    assert "Connection closed by peer" in first
    assert "RuntimeError: this worker's own error" in second


@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
def test_a_stopped_worker_ends_the_others_after_the_timeout(exchange: str, tmp_path: Path) -> None:
    # Connections stay open, so that only the timeout ends the others. Lightning's broadcast before each step may wait
    # for a second timeout, without a message.
    timeout = 4.0
    assert_the_others_end(tmp_path, Failure("hook", "stop"), 2 * timeout + 10, exchange=exchange, timeout=timeout)


# Resumes after a failure.


def train_and_record(folder: str, max_steps: str, every: str, death: str) -> None:
    """Resume from the last checkpoint; before a restart by torchrun, the second worker dies. Runs in workers."""
    rank = os.environ["RANK"]
    Path(f"{folder}/process of {rank}").write_text(str(os.getpid()))
    failure = Failure("forward", step=int(death)) if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" else Failure()
    result = train(int(max_steps), failure=failure, callbacks=(last_checkpoint(folder, int(every)),), resume="last")
    torch.save(result, f"{folder}/result of {rank}")


def recorded(folder: Path, num_workers: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"result of {rank}", weights_only=True) for rank in range(num_workers)]


@pytest.mark.slow
def test_a_run_restarted_by_torchrun_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    straight = run_workers(train, 2, 12, process_group=False)
    with torchrun(2, tmp_path, "train_and_record", str(tmp_path), "12", "3", "7", restarts=1) as process:
        exit_code, output = end_of(process, tmp_path)
    assert exit_code == 0, output
    assert output.count("<rank 1 fails: kill in forward>") == 1
    for expected, found in zip(straight, recorded(tmp_path, 2), strict=True):
        assert (expected["start"], found["start"]) == (0, 6)
        assert_equal(expected["weights"], found["weights"])
        assert_equal(expected["residuals"], found["residuals"])


# Ctrl-C.


def assert_whole(path: Path, num_workers: int) -> int:
    """Check that a checkpoint holds the residuals of every worker and that a run resumes; return its step."""
    saved = read(path)
    step = saved["global_step"]
    assert saved[KEY]["world_size"] == num_workers
    assert len(saved[KEY]["workers"]) == num_workers
    for residuals in (worker["unsent"] for worker in saved[KEY]["workers"]):
        assert {name: residual.numel() for name, residual in residuals.items()} == {
            name: tensor.numel() for name, tensor in saved["state_dict"].items()
        }
        assert any(residual.any() for residual in residuals.values())
    for result in run_workers(partial(train, resume=str(path)), num_workers, step + 2, process_group=False):
        assert (result["start"], result["steps"]) == (step, step + 2)
    return step


@pytest.mark.slow
def test_ctrl_c_at_torchrun_ends_it_and_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with torchrun(2, tmp_path, "train_and_record", str(tmp_path), str(ENDLESS), "1", "-1", restarts=1) as process:
        wait_until(lambda: path.exists() and read(path)["global_step"] >= 5, "five steps")
        process_ids = [int((tmp_path / f"process of {rank}").read_text()) for rank in range(2)]
        assert all(map(is_running, process_ids))
        os.killpg(process.pid, signal.SIGINT)
        exit_code, output = end_of(process, tmp_path)
    assert exit_code != 0, output
    assert not any(map(is_running, process_ids))
    assert assert_whole(path, 2) >= 5


# A death during a write.

WRITTEN_BYTES = 20_000
"""Size at which a write is interrupted, a fraction of a checkpoint."""


class DyingWriter(Callback):
    """Makes the operating system kill rank 0 when a file reaches WRITTEN_BYTES.

    Args:
        step: number of steps after which the limit applies.
        copies: whether the limit applies only to copies of files.
    """

    def __init__(self, step: int, copies: bool) -> None:
        self.step, self.copies = step, copies

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise an OSError instead
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if self.copies:
                sys.addaudithook(lambda event, _: self.limit() if event == "shutil.copyfile" else None)
            else:
                self.limit()

    def limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN_BYTES, WRITTEN_BYTES))


def _die_while_writing(folder: str, temporary: str, name: str, copies: bool) -> None:
    tempfile.tempdir = temporary
    every = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
    train(ENDLESS, callbacks=(DyingWriter(4, copies), last_checkpoint(folder, 3) if name == "last" else every))


@pytest.mark.parametrize("name", ["last", "step=3"])
@pytest.mark.parametrize("copies", [False, True], ids=["written", "copied from TMPDIR"])
def test_a_death_during_a_save_leaves_the_previous_checkpoint(name: str, copies: bool, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if copies and (not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("needs two file systems, of which /dev/shm is one")
    with (
        tempfile.TemporaryDirectory(dir=memory if copies else tmp_path) as temporary,
        workers(2, tmp_path, _die_while_writing, str(tmp_path), temporary, name, copies) as started,
    ):
        started.wait(range(2))
        assert [process.exitcode for process in started.processes] == [-signal.SIGXFSZ, 1], started.output(0)
        if not copies:  # died during the next file, which Lightning first writes elsewhere
            assert [path.stat().st_size for path in Path(temporary).iterdir()] == [WRITTEN_BYTES]
    assert copies or [path.name for path in tmp_path.glob("*.ckpt")] == [f"{name}.ckpt"]
    assert assert_whole(tmp_path / f"{name}.ckpt", 2) == 3
    assert (tmp_path / f"{name}.ckpt").stat().st_size > 2 * WRITTEN_BYTES
