"""Sets up, interrupts and resumes a training in separate worker processes."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_sparse import HardThreshold, SparseDDPStrategy, SparseLocalStrategy
from lightning_sparse.exchange import save_barrier
from lightning_sparse.exchange.routes import gather
from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection
from tests.integration.faults.fault_points import Fault, Injector, Point, Watcher
from tests.integration.faults.fault_training import ByHand, Exact
from tests.integration.faults.unwatched_workers import workers
from tests.integration.models import SMALL_BUCKETS_MB, WEIGHTS_ONLY, quiet_trainer, warnings_of

THRESHOLD = 1.125
LOCAL_THRESHOLD = 0.6
STEPS, RESUMED_STEPS = 6, 9
GROUP_TIMEOUT, PATIENCE, SHORT_PATIENCE = 8.0, 5.0, 2.5
HANG = 45.0
"""Seconds after which workers count as hanging; several timeouts may add up, also those of Lightning's barriers."""
NO_FAULT = 240.0
"""Seconds for a training without a fault, which on a busy machine starts slowly."""


@dataclass(frozen=True)
class Case:
    """The configuration of a training.

    Args:
        route: exchange of the strategy; ``"ddp"`` is Lightning's own strategy, ``"local"`` local training.
        num_workers: number of worker processes.
        worker_state: option of the strategy.
        own_select: whether the sparsifier is custom, so that compensating and selecting are separate calls.
        manual: whether the module uses manual optimization, and so steps after the backward instead of around it.
        saver: callback that saves on an exception: ``"on_exception"`` or ``"model_checkpoint"``.
        together: whether one message holds the payloads of several buckets, as is usual for small payloads.
            Otherwise each bucket has its own message, which gives more points for faults.
    """

    route: str = "gather"
    num_workers: int = 2
    worker_state: str = "full"
    own_select: bool = False
    manual: bool = False
    saver: str = "on_exception"
    together: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.route != "ddp"

    @property
    def is_local(self) -> bool:
        return self.route == "local"

    @property
    def threshold(self) -> float:
        return LOCAL_THRESHOLD if self.is_local else THRESHOLD if self.is_sparse else 0.0

    def __str__(self) -> str:
        unusual = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return ", ".join(unusual) or self.route


class OwnSelect(HardThreshold):
    """Selects the same coordinates through ``select``, as custom sparsifiers do."""

    def select(self, compensated: torch.Tensor, layout: LayerLayout) -> Selection:
        indices = (compensated.abs() >= THRESHOLD).nonzero().squeeze(1)
        return Selection(indices, compensated[indices])


# Runs in a worker.


def fit(
    case: Case,
    folder: Path,
    injector: Injector,
    max_steps: int,
    ckpt_path: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train with the environment variables of torchrun and SLURM; return the final state."""
    if not case.together:
        gather.FULL_BYTES = 0
    common = {"timeout": timedelta(seconds=GROUP_TIMEOUT), "bucket_cap_mb": SMALL_BUCKETS_MB}
    strategy: DDPStrategy = DDPStrategy(process_group_backend="gloo", **common)
    if case.is_local:
        strategy = SparseLocalStrategy(
            HardThreshold(threshold=LOCAL_THRESHOLD),
            worker_state=case.worker_state,
            process_group_backend="gloo",
            timeout=common["timeout"],
        )
    elif case.is_sparse:
        strategy = SparseDDPStrategy(
            (OwnSelect if case.own_select else HardThreshold)(threshold=THRESHOLD),
            exchange=case.route,
            worker_state=case.worker_state,
            process_group_backend="gloo",
            **common,
        )
    saver: Any = OnExceptionCheckpoint(folder)
    if case.saver == "model_checkpoint":
        saver = ModelCheckpoint(folder, "model", save_on_exception=True, every_n_train_steps=1000)
    watcher = Watcher(injector, folder)
    trainer = quiet_trainer(
        strategy,
        num_workers=case.num_workers,
        max_steps=max_steps,
        callbacks=list(callbacks) or [watcher, saver],
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
        default_root_dir=folder,
        use_distributed_sampler=False,
        gradient_clip_val=None,
    )
    model = (ByHand if case.manual else Exact)(injector.reach)
    if case.is_local:
        model = model.double()
    # Gradients depend on the worker and the step, not on the batch.
    trainer.fit(model, range(1_000_000), ckpt_path=ckpt_path, **WEIGHTS_ONLY)
    state: Any = getattr(strategy, "state", None)
    residuals = {}
    if case.is_local:
        residuals = {name: tensor.clone() for name, tensor in state.anchor().items()}
    elif state is not None:
        residuals = state.residuals.state_dict()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"weights": weights, "residuals": residuals, "steps": trainer.global_step}


def _be_a_worker(case: Case, folder: str, function: Callable[..., None], args: Any) -> None:
    rank = int(os.environ["RANK"])
    os.environ |= {
        "SLURM_NTASKS": str(case.num_workers),
        "SLURM_NTASKS_PER_NODE": str(case.num_workers),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "training",
    }
    tempfile.tempdir = folder  # a kill leaves the temporary file of Lightning in this folder
    save_barrier.PATIENCE, save_barrier.SHORT_PATIENCE = PATIENCE, SHORT_PATIENCE
    function(rank, case, Path(folder), *args)


def train(rank: int, case: Case, folder: Path, fault: Fault) -> None:
    injector = Injector(fault.injections(rank), folder / f"injected {rank}")
    with injector.watching():
        try:
            result = fit(case, folder, injector, STEPS)
            torch.save(result, folder / f"result of {rank}")
            # The last point, because a process of a fork server skips the exit of the interpreter.
            injector.reach("before the process ends")
        finally:
            (folder / f"trace of {rank}").write_text(json.dumps([vars(point) for point in injector.trace]))


def save_all(rank: int, case: Case, folder: Path) -> None:
    saves = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")
    )
    fit(case, folder, Injector([], folder / "none"), STEPS, callbacks=[saves])


def resume(rank: int, case: Case, folder: Path, paths: list[str]) -> None:
    for number, path in enumerate(paths):
        # Lightning finds the newest hpc_ckpt file itself.
        number_of = {file: int(file.stem.rpartition("_")[2]) for file in Path(path).parent.glob("hpc_ckpt_*.ckpt")}
        ckpt_path = "hpc" if Path(path) == max(number_of, key=number_of.__getitem__, default=None) else path
        messages: list[str] = []
        with warnings_of(messages):
            injector = Injector([], folder / "none")
            result = fit(case, Path(path).parent, injector, RESUMED_STEPS, ckpt_path, [Callback()])
        torch.save(result | {"warnings": messages}, folder / f"{number} of {rank}")


# Runs in the test process.


def run(
    case: Case, folder: Path, function: Callable[..., None], *args: Any, limit: float = HANG
) -> tuple[float, list[int | None]]:
    """Run a function in every worker; return the seconds and the exit codes, None for killed workers."""
    started = time.monotonic()
    with workers(case.num_workers, folder, _be_a_worker, case, str(folder), function, args) as running:
        for process in running.processes:
            process.join(max(0.0, started + limit - time.monotonic()))
        return time.monotonic() - started, [process.exitcode for process in running.processes]


def trace(case: Case) -> list[list[Point]]:
    """Return all points that each worker reaches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, exit_codes = run(case, folder, train, Fault("none", (None,) * case.num_workers), limit=NO_FAULT)
        assert exit_codes == [0] * case.num_workers, (folder / "output of 0").read_text()
        return [
            [Point(**point) for point in json.loads((folder / f"trace of {rank}").read_text())]
            for rank in range(case.num_workers)
        ]
