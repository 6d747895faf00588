"""Strikes workers everywhere in a training, and judges every file they leave by a simulation in plain tensors.

python -m tests.integration.fault_injector --share 0.2       # a fifth of all points; --help
"""

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy

import lightning_sparse.strategies.checkpoint
import lightning_sparse.strategies.ddp
import lightning_sparse.strategies.drift_checkpoint
import lightning_sparse.strategies.local
from lightning_sparse import HardThreshold, SparseDDPStrategy, SparseLocalStrategy
from lightning_sparse.sparsifiers import LayerLayout, Selection
from tests.integration.fault_points import Fault, Injector, Point, Watcher
from tests.integration.fault_training import SIZES, ByHand, Endless, Exact, State, first_state, simulate, zeros
from tests.integration.models import SMALL_BUCKETS_MB, WEIGHTS_ONLY, quiet_trainer
from tests.workers import environment_of, reserved_port

KEY = "lightning_sparse"
THRESHOLD = 1.125
LOCAL_THRESHOLD = 0.6
STEPS, RESUMED_STEPS = 6, 9
GROUP_TIMEOUT, PATIENCE, PATIENCE_IN_TROUBLE = 8.0, 5.0, 2.5
HANG = 45.0
"""Seconds after which workers count as hanging: several timeouts may follow each other, Lightning's barriers too."""


@dataclass(frozen=True)
class Case:
    """How is trained.

    Args:
        route: the strategy's exchange; ``"ddp"`` is Lightning's own strategy, ``"local"`` local training.
        num_workers: n.
        hosts: how many of them, for the hierarchical route.
        residual_checkpoint: the strategy's; ``"mean"`` of local training saves nothing of single workers.
        own_select: whether the sparsifier is a user's own, for which compensating and selecting are apart.
        manual: whether the module optimizes by itself, and so steps after the backward, not around it.
        saver: what saves on an exception: ``"on_exception"`` or ``"model_checkpoint"``.
    """

    route: str = "gather"
    num_workers: int = 2
    hosts: int = 1
    residual_checkpoint: str = "full"
    own_select: bool = False
    manual: bool = False
    saver: str = "on_exception"

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
        extra = [f"{self.hosts} hosts"] * (self.hosts > 1) + ["own select"] * self.own_select + ["manual"] * self.manual
        extra += [self.residual_checkpoint] * (self.residual_checkpoint != "full") + [self.saver][
            : self.saver[0] == "m"
        ]
        return ", ".join([self.route, f"{self.num_workers} workers", *extra])


class OwnSelect(HardThreshold):
    """Selects the same, but is asked for it."""

    def select(self, compensated: torch.Tensor, layout: LayerLayout) -> Selection:
        indices = (compensated.abs() >= THRESHOLD).nonzero().squeeze(1)
        return Selection(indices, compensated[indices])


# --------------------------------------------------------------------------------------------------------- in a worker


class SaveAll(Callback):
    """Saves after every step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(
    case: Case,
    folder: Path,
    injector: Injector,
    max_steps: int,
    ckpt_path: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Trains with torchrun's and SLURM's environment variables set; returns what there is in the end."""
    common = {"timeout": timedelta(seconds=GROUP_TIMEOUT), "bucket_cap_mb": SMALL_BUCKETS_MB}
    strategy: DDPStrategy = DDPStrategy(process_group_backend="gloo", **common)
    if case.is_local:
        strategy = SparseLocalStrategy(
            HardThreshold(LOCAL_THRESHOLD),
            drift_checkpoint=case.residual_checkpoint,
            optimizer_checkpoint="first" if case.residual_checkpoint == "mean" else "full",
            process_group_backend="gloo",
            timeout=common["timeout"],
        )
    elif case.is_sparse:
        strategy = SparseDDPStrategy(
            (OwnSelect if case.own_select else HardThreshold)(THRESHOLD),
            exchange=case.route,
            residual_checkpoint=case.residual_checkpoint,
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
        enable_checkpointing=not callbacks,
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
        default_root_dir=folder,
        use_distributed_sampler=False,
        gradient_clip_val=None,
    )
    model = (ByHand if case.manual else Exact)(injector.tell)
    if case.is_local:
        model = model.double()
    trainer.fit(model, Endless(), ckpt_path=ckpt_path, **WEIGHTS_ONLY)
    state: Any = getattr(strategy, "state", None)
    residuals = {}
    if case.is_local:
        residuals = {name: one.clone() for name, one in state.anchor().items()}
    elif state is not None:
        residuals = state.residuals.state_dict()
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    return {"weights": weights, "residuals": residuals, "steps": trainer.global_step}


def _be_a_worker(rank: int, case: Case, port: int, folder: str, function: Callable[..., None], args: Any) -> None:
    output = os.open(f"{folder}/output of {rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= environment_of(rank, case.num_workers, port)
    os.environ |= {
        "SLURM_NTASKS": str(case.num_workers),
        "SLURM_NTASKS_PER_NODE": str(case.num_workers),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "training",
        "GROUP_RANK": str(rank * case.hosts // case.num_workers),
    }
    torch.set_num_threads(1)
    tempfile.tempdir = folder  # where Lightning begins a file, which a kill leaves there
    lightning_sparse.strategies.ddp.PATIENCE = lightning_sparse.strategies.local.PATIENCE = PATIENCE
    for module in (lightning_sparse.strategies.checkpoint, lightning_sparse.strategies.drift_checkpoint):
        module.PATIENCE_IN_TROUBLE = PATIENCE_IN_TROUBLE
    function(rank, case, Path(folder), *args)


def _train(rank: int, case: Case, folder: Path, fault: Fault) -> None:
    injector = Injector(fault.strokes(rank), folder / f"struck {rank}")
    with injector.watching():
        try:
            result = fit(case, folder, injector, STEPS)
            torch.save(result, folder / f"result of {rank}")
            # A process of a fork server leaves without it.
            injector.tell("before the process ends")
        finally:
            (folder / f"trace of {rank}").write_text(json.dumps([vars(one) for one in injector.trace]))


def _save_all(rank: int, case: Case, folder: Path) -> None:
    fit(case, folder, Injector([], folder / "none"), STEPS, callbacks=[SaveAll(folder)])


def _resume(rank: int, case: Case, folder: Path, paths: list[str]) -> None:
    for number, path in enumerate(paths):
        # Lightning finds the newest of these by itself.
        number_of = {one: int(one.stem.rpartition("_")[2]) for one in Path(path).parent.glob("hpc_ckpt_*.ckpt")}
        ckpt_path = "hpc" if Path(path) == max(number_of, key=number_of.__getitem__, default=None) else path
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            injector = Injector([], folder / "none")
            result = fit(case, Path(path).parent, injector, RESUMED_STEPS, ckpt_path, [Callback()])
        torch.save(result | {"warnings": [str(one.message) for one in caught]}, folder / f"{number} of {rank}")


# --------------------------------------------------------------------------------------------------- who watches them


@dataclass
class Ended:
    """How workers ended: seconds of all and exit codes, None for those that had to be killed."""

    seconds: float
    exit_codes: list[int | None]


def run(case: Case, folder: Path, function: Callable[..., None], *args: Any, limit: float = HANG) -> Ended:
    """Runs a function in every worker until all have ended, and leaves none behind."""
    context = multiprocessing.get_context("forkserver")  # the one that tests.workers has prepared
    started = time.monotonic()
    with reserved_port() as port:
        processes = [
            context.Process(target=_be_a_worker, args=(rank, case, port, str(folder), function, args))
            for rank in range(case.num_workers)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, started + limit - time.monotonic()))
            return Ended(time.monotonic() - started, [process.exitcode for process in processes])
        finally:
            for process in processes:
                process.kill()
                process.join()


def trace(case: Case, fault: Fault | None = None) -> list[list[Point]]:
    """Returns all points that each worker comes by, without a fault or with one that no worker dies of at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = run(case, folder, _train, fault or Fault("none", (None,) * case.num_workers))
        assert fault or ended.exit_codes == [0] * case.num_workers, (folder / "output of 0").read_text()
        return [
            [Point(**one) for one in json.loads((folder / f"trace of {rank}").read_text())]
            for rank in range(case.num_workers)
        ]


# --------------------------------------------------------------------------------------------------------- the judge


@dataclass
class File:
    """A checkpoint that a struck training left.

    Attributes:
        name: the file's.
        step: after how many optimizer steps the weights in it were; None if they were changed in part.
        global_step: what the file says of that.
        holds: ``"residuals"``, ``"nothing yet"`` (before the first step), or why there are none.
        content: tells files of the same content.
        is_ahead: whether what it says of the last step, of calibration, … is not that of the weights' step.
        delay: seconds after the fault at which it was there.
    """

    name: str
    step: int | None
    global_step: int
    holds: str
    content: str
    is_ahead: bool = False
    delay: float = 0.0

    @property
    def has_residuals(self) -> bool:
        return self.holds == "residuals"


@dataclass
class Outcome:
    """What a fault led to; a survived one has no problems."""

    case: Case
    fault: Fault
    seconds: float
    exit_codes: list[int | None]
    files: list[File] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    finished: bool = False
    has_struck: bool = True

    def file(self, start: str) -> File | None:
        return next((one for one in self.files if one.name.startswith(start)), None)

    @property
    def saved(self) -> File | None:
        """What was saved because of the fault."""
        return self.file("on_exception") or self.file("hpc") or self.file("model")

    def __str__(self) -> str:
        files = "; ".join(f"{one.name} at {one.step}{'+' * one.is_ahead}: {one.holds}" for one in self.files)
        return f"{self.case} | {self.fault} | {self.seconds:.1f} s {self.exit_codes} | {files}"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether tensors are equal to the last bit; what is missing is zero."""
    empty = zeros()
    return all(
        torch.equal(one.get(name, empty[name]).flatten(), other.get(name, empty[name]).flatten()) for name in SIZES
    )


class Judge:
    """Compares files and results of one case with the simulation; resumes each file whose content it has not seen."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.states = simulate(first_state(case.num_workers), range(STEPS), case.threshold)
        self.shared: dict[int, Any] = {}
        self.resumed: dict[str, list[str]] = {"": []}

    def read(self, path: Path, problems: list[str]) -> File | None:
        """Returns what a file is; notes what is wrong with it."""
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:
            problems.append(f"{path.name} cannot be loaded: {error!r}")
            return None
        state = self.start(saved)
        steps = [
            step
            for step, one in enumerate(self.states)
            if same(state.weights, one.weights) and same(state.momentum, one.momentum)
        ]
        step = steps[0] if steps else None
        if not saved["optimizer_states"]:
            # An exception before there was an optimizer: nobody, plain ddp neither, resumes from such a file.
            return File(path.name, step, saved["global_step"], "nothing yet", "")
        content = saved.get(KEY)
        holds, is_ahead = "ddp", False
        if self.case.is_sparse:
            holds = self._residuals(content, step, path.name, problems)
            is_ahead = bool(step) and content["shared"] != self.shared[step]
        digest = hashlib.sha256(repr((step, saved["global_step"], holds, content and content["shared"])).encode())
        if step is None:
            for one in (*state.weights.values(), *state.momentum.values()):
                digest.update(one.numpy().tobytes())
        return File(path.name, step, saved["global_step"], holds, digest.hexdigest(), is_ahead)

    def _residuals(self, content: Any, step: int | None, name: str, problems: list[str]) -> str:
        if content is None:
            problems.append(f"{name} has nothing under {KEY}")
            return "nothing"
        residuals, why_not = content["residuals"], content["why_no_residuals"]
        if why_not is not None:
            if residuals:
                problems.append(f"{name} has residuals and says why it has none: {why_not}")
            return str(why_not)
        if step is None:
            problems.append(f"{name}: weights belong to no step, but it has residuals")
            return "residuals"
        if step > 0 and not residuals:
            problems.append(f"{name}: no residuals, and no word on why")
            return "nothing"
        if self.case.residual_checkpoint == "mean":
            pairs = [(residuals, mean(self.states[step].residuals))]
        else:
            if residuals and len(residuals) != self.case.num_workers:
                problems.append(f"{name}: residuals of {len(residuals)} workers")
            pairs = list(zip(residuals, self.states[step].residuals, strict=False))
        for rank, (one, expected) in enumerate(pairs):
            if not same(one, expected):
                of = [
                    other
                    for other, state in enumerate(self.states)
                    if same(one, state.residuals[rank if len(pairs) > 1 else 0])
                ]
                problems.append(f"{name}: residuals of rank {rank} are not those of step {step} (of {of})")
        return "residuals" if step else "nothing yet"

    def start(self, saved: dict[str, Any]) -> State:
        """What a run that resumes should start from."""
        of_optimizer = saved["optimizer_states"][0]["state"] if saved["optimizer_states"] else {}
        momentum = {name: of_optimizer[index]["momentum"] for index, name in enumerate(SIZES) if index in of_optimizer}
        content = saved.get(KEY)
        residuals: Any = content["residuals"] if content is not None else []
        if isinstance(residuals, dict):
            residuals = [residuals] * self.case.num_workers
        residuals = residuals or [{}] * self.case.num_workers
        return State(saved["state_dict"], zeros() | momentum, [zeros() | one for one in residuals])

    def prepare(self) -> None:
        """Trains without a fault, for what is the same on all workers after every step."""
        if not self.case.is_sparse:
            return
        with tempfile.TemporaryDirectory() as name:
            run(self.case, Path(name), _save_all)
            files = [torch.load(path, weights_only=True) for path in Path(name).glob("*.ckpt")]
            self.shared = {saved["global_step"]: saved[KEY]["shared"] for saved in files}
            assert sorted(self.shared) == list(range(1, STEPS + 1)), (Path(name) / "output of 0").read_text()

    def check_end(self, result: dict[str, Any], rank: int, expected: State, what: str) -> list[str]:
        problems = []
        if not same(result["weights"], expected.weights):
            problems.append(f"{what}: weights at the end are not the simulation's")
        if self.case.is_sparse and not same(result["residuals"], expected.residuals[rank]):
            problems.append(f"{what}: residuals of rank {rank} at the end are not the simulation's")
        return problems

    def check_last(self, result: dict[str, Any], rank: int) -> list[str]:
        return self.check_end(result, rank, self.states[-1], "the struck run itself")

    def strike(self, fault: Fault, folder: Path) -> Outcome:
        """Lets a fault happen and looks at what is left."""
        ended = run(self.case, folder, _train, fault)
        outcome = Outcome(self.case, fault, ended.seconds, ended.exit_codes)
        times = [float(one.read_text()) for one in folder.glob("struck *")]
        outcome.has_struck = bool(times)
        if None in ended.exit_codes:
            outcome.problems.append(f"hangs after {HANG} s")
        for path in sorted(folder.glob("*.ckpt")):
            file = self.read(path, outcome.problems)
            if file is not None:
                outcome.files.append(file)
                file.delay = path.stat().st_mtime - max(times, default=0.0)
                without = "weights and without drifts" if self.case.is_local else "written without residuals"
                is_said = without in (folder / "output of 0").read_text()
                if self.case.is_sparse and file.holds not in ("residuals", "nothing yet") and not is_said:
                    outcome.problems.append(f"{file.name}: no warning")
        if ended.exit_codes == [0] * self.case.num_workers:
            outcome.finished = True
            for rank in range(self.case.num_workers):
                result = torch.load(folder / f"result of {rank}", weights_only=True)
                outcome.problems += self.check_last(result, rank)
        return outcome

    def resume(self, outcomes: Sequence[tuple[Outcome, Path]]) -> int:
        """Resumes, in one start of workers, from every content not seen before; returns from how many."""
        chosen: dict[str, Path] = {}
        for outcome, folder in outcomes:
            for file in outcome.files:
                if file.content not in self.resumed:
                    chosen.setdefault(file.content, folder / file.name)
        paths = list(chosen.values())
        if paths:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                ended = run(self.case, folder, _resume, list(map(str, paths)), limit=HANG + 3 * len(paths))
                for number, (content, path) in enumerate(chosen.items()):
                    try:
                        self.resumed[content] = self._check_resumed(path, folder, number)
                    except FileNotFoundError:
                        said = (folder / "output of 0").read_text()[-1500:]
                        self.resumed[content] = [f"a resume from {path.name} failed: {ended.exit_codes} {said}"]
        for outcome, _ in outcomes:
            for file in outcome.files:
                outcome.problems += self.resumed[file.content]
        return len(paths)

    def _check_resumed(self, path: Path, folder: Path, number: int) -> list[str]:
        saved = torch.load(path, weights_only=True)
        expected = simulate(self.start(saved), range(saved["global_step"], RESUMED_STEPS), self.case.threshold)[-1]
        problems = []
        for rank in range(self.case.num_workers):
            result = torch.load(folder / f"{number} of {rank}", weights_only=True)
            problems += self.check_end(result, rank, expected, f"resumed from {path.name}")
            if rank == 0 and self.case.is_sparse and (why := saved[KEY]["why_no_residuals"]) is not None:
                had_steps = saved[KEY]["shared"]["last_step"] is not None
                if had_steps and not any("holds no residuals" in one and why in one for one in result["warnings"]):
                    problems.append(f"resumed from {path.name}: no warning of missing residuals")
        return problems


def mean(residuals: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: (sum(one[name].double() for one in residuals) / len(residuals)).float() for name in SIZES}


def inject(rows: Sequence[tuple[Case, Fault]], at_a_time: int = 4) -> list[Outcome]:
    """Lets every fault happen in a training of its own, some of them at a time, as most of them wait."""
    from tests.integration.fault_local import LocalJudge

    judges = {case: (LocalJudge if case.is_local else Judge)(case) for case, _ in rows}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_a_time) as pool:
        folders = [Path(name) / str(number) for number in range(len(rows))]
        for folder in folders:
            folder.mkdir()
        list(pool.map(Judge.prepare, judges.values()))
        outcomes = list(pool.map(lambda row, folder: judges[row[0]].strike(row[1], folder), rows, folders))
        of_case: dict[Case, list[tuple[Outcome, Path]]] = {case: [] for case in judges}
        for outcome, folder in zip(outcomes, folders, strict=True):
            of_case[outcome.case].append((outcome, folder))
        list(pool.map(lambda case: judges[case].resume(of_case[case]), judges))
    return outcomes
