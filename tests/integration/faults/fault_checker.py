"""Checks the checkpoints that faults leave against a simulation in plain tensors."""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_sparse.checkpointing.content import KEY
from tests.integration.faults.fault_points import Fault
from tests.integration.faults.fault_training import SIZES, Layers, LocalState, State, simulate, zeros
from tests.integration.faults.fault_workers import (
    HANG,
    NO_FAULT,
    RESUMED_STEPS,
    STEPS,
    Case,
    resume,
    run,
    save_all,
    train,
)
from tests.integration.models import mean_of


@dataclass
class File:
    """A checkpoint of a training that a fault interrupted.

    Attributes:
        name: file name.
        step: number of optimizer steps that its weights have seen; None if a step has changed only some weights.
        global_step: number of optimizer steps that the file states.
        holds: ``"residuals"``, ``"nothing yet"`` (before the first step), or why residuals are missing.
        content: digest of the content.
        is_ahead: whether its other state (last step, calibration, …) belongs to a later step than its weights.
    """

    name: str
    step: int | None
    global_step: int
    holds: str
    content: str
    is_ahead: bool = False

    @property
    def has_residuals(self) -> bool:
        return self.holds == "residuals"


@dataclass
class Outcome:
    """The outcome of a fault; without problems, the fault did no harm."""

    case: Case
    fault: Fault
    seconds: float
    exit_codes: list[int | None]
    files: list[File] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    finished: bool = False
    was_injected: bool = True
    printed: str = ""
    """The last output of each worker, if the training did not finish."""

    def file(self, start: str) -> File | None:
        return next((file for file in self.files if file.name.startswith(start)), None)

    @property
    def saved(self) -> File | None:
        """The checkpoint that was saved because of the fault."""
        return self.file("on_exception") or self.file("hpc") or self.file("model")

    def __str__(self) -> str:
        files = "; ".join(f"{file.name} at {file.step}{'+' * file.is_ahead}: {file.holds}" for file in self.files)
        return f"{self.case} | {self.fault} | {self.seconds:.1f} s {self.exit_codes} | {files}"


def same(actual: Layers, expected: Layers) -> bool:
    """Return whether tensors are equal to the last bit; missing tensors count as zero."""
    actual, expected = zeros() | actual, zeros() | expected
    return all(torch.equal(actual[name].flatten().double(), expected[name].flatten().double()) for name in SIZES)


def momentum_of(optimizer_states: list[Any]) -> Layers:
    """Return the momentum of one worker by parameter name."""
    of_optimizer = optimizer_states[0]["state"] if optimizer_states else {}
    return zeros() | {
        name: of_optimizer[index]["momentum"] for index, name in enumerate(SIZES) if index in of_optimizer
    }


def numbers_of(content: dict[str, Any]) -> Any:
    """Return the numbers that are equal on all workers."""
    return content["numbers"], content["histories"]


class CheckpointChecker:
    """Compares files and results of one case with the simulation, and resumes each distinct file once."""

    state: Any = State
    """The class of the simulated states."""

    lacking = "residuals"
    """The word for missing state in a warning."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.states = self.simulate(self.state.first(case.num_workers), range(STEPS))
        self.shared: dict[int, Any] = {}
        self.resumed: dict[str, list[str]] = {"": []}

    def simulate(self, start: Any, steps: range) -> list[Any]:
        return simulate(start, steps, self.case.threshold)

    def read(self, path: Path, problems: list[str]) -> File | None:
        """Read a checkpoint; append its faults to ``problems``."""
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:
            problems.append(f"{path.name} cannot be loaded: {error!r}")
            return None
        if self.case.is_sparse and saved["optimizer_states"] and KEY not in saved:
            problems.append(f"{path.name} has nothing under {KEY}")
            return None
        return self.describe(path.name, saved, problems)

    def describe(self, name: str, saved: dict[str, Any], problems: list[str]) -> File:
        """Describe a checkpoint; append its faults to ``problems``."""
        state = self.start(saved)
        steps = [
            step
            for step, known in enumerate(self.states)
            if same(state.weights, known.weights) and same(state.momentum, known.momentum)
        ]
        step = steps[0] if steps else None
        if not saved["optimizer_states"]:
            # Saved before the optimizer existed; not even plain ddp can resume from this file.
            return File(name, step, saved["global_step"], "nothing yet", "")
        content = saved.get(KEY)
        holds, is_ahead = "ddp", False
        if self.case.is_sparse:
            holds = self._residuals(content, step, name, problems)
            is_ahead = bool(step) and numbers_of(content) != self.shared[step]
        digest = hashlib.sha256(repr((step, saved["global_step"], holds, content and numbers_of(content))).encode())
        if step is None:
            for weight in (*state.weights.values(), *state.momentum.values()):
                digest.update(weight.numpy().tobytes())
        return File(name, step, saved["global_step"], holds, digest.hexdigest(), is_ahead)

    def _residuals(self, content: Any, step: int | None, name: str, problems: list[str]) -> str:
        residuals = [worker["unsent"] for worker in content["workers"]]
        why_not = content["why_incomplete"]
        if why_not is not None:
            if residuals:
                problems.append(f"{name} has residuals, but states a reason for missing residuals: {why_not}")
            return str(why_not)
        if step is None:
            problems.append(f"{name} has residuals, but its weights are those of no step")
            return "residuals"
        if step > 0 and not residuals:
            problems.append(f"{name} has no residuals and states no reason")
            return "nothing"
        if self.case.worker_state == "small":
            pairs = [(residual, mean_of(self.states[step].residuals)) for residual in residuals]
        else:
            if residuals and len(residuals) != self.case.num_workers:
                problems.append(f"{name}: residuals of {len(residuals)} workers")
            pairs = list(zip(residuals, self.states[step].residuals, strict=False))
        for rank, (residual, expected) in enumerate(pairs):
            if not same(residual, expected):
                matches = [
                    other
                    for other, state in enumerate(self.states)
                    if same(residual, state.residuals[rank if len(pairs) > 1 else 0])
                ]
                problems.append(f"{name}: residuals of rank {rank} match steps {matches}, not {step}")
        return "residuals" if step else "nothing yet"

    def start(self, saved: dict[str, Any]) -> Any:
        """Return the state that a resumed run should start from."""
        content = saved.get(KEY)
        residuals: Any = [worker["unsent"] for worker in content["workers"]] if content is not None else []
        if len(residuals) < 2:  # the mean residual or nothing
            residuals = (residuals or [{}]) * self.case.num_workers
        momentum = momentum_of(saved["optimizer_states"])
        return State(saved["state_dict"], momentum, [zeros() | residual for residual in residuals])

    def prepare(self) -> None:
        """Train without a fault to record the numbers that are equal on all workers after every step."""
        if not self.case.is_sparse:
            return
        with tempfile.TemporaryDirectory() as name:
            _, exit_codes = run(self.case, Path(name), save_all, limit=NO_FAULT)
            assert exit_codes == [0] * self.case.num_workers  # None: not within the limit
            files = [torch.load(path, weights_only=True) for path in Path(name).glob("*.ckpt")]
            self.shared = {saved["global_step"]: numbers_of(saved[KEY]) for saved in files}
            assert sorted(self.shared) == list(range(1, STEPS + 1)), (Path(name) / "output of 0").read_text()

    def check_end(self, result: dict[str, Any], rank: int, expected: Any, what: str) -> list[str]:
        problems = []
        if not same(result["weights"], expected.weights):
            problems.append(f"{what}: final weights differ from the simulation")
        if self.case.is_sparse and not same(result["residuals"], expected.residuals[rank]):
            problems.append(f"{what}: final residuals of rank {rank} differ from the simulation")
        return problems

    def inject(self, fault: Fault, folder: Path) -> Outcome:
        """Train with a fault and check the files that are left."""
        outcome = Outcome(self.case, fault, *run(self.case, folder, train, fault))
        outcome.was_injected = any(folder.glob("injected *"))
        if None in outcome.exit_codes:
            outcome.problems.append(f"hangs after {HANG} s")
        for path in sorted(folder.glob("*.ckpt")):
            file = self.read(path, outcome.problems)
            if file is not None:
                outcome.files.append(file)
                is_warned = f"holds no {self.lacking}" in (folder / "output of 0").read_text()
                if self.case.is_sparse and file.holds not in ("residuals", "nothing yet") and not is_warned:
                    outcome.problems.append(f"{file.name}: no warning")
        if outcome.exit_codes == [0] * self.case.num_workers:
            outcome.finished = True
            for rank in range(self.case.num_workers):
                result = torch.load(folder / f"result of {rank}", weights_only=True)
                outcome.problems += self.check_end(result, rank, self.states[-1], "the interrupted run itself")
        else:
            outputs = sorted(folder.glob("output of *"))
            outcome.printed = "\n".join(f"{output.name}:\n{output.read_text()[-3000:]}" for output in outputs)
        return outcome

    def resume(self, outcomes: Sequence[tuple[Outcome, Path]]) -> None:
        """Resume from every content not seen before; start the workers only once."""
        chosen: dict[str, Path] = {}
        for outcome, folder in outcomes:
            for file in outcome.files:
                if file.content not in self.resumed:
                    chosen.setdefault(file.content, folder / file.name)
        paths = list(chosen.values())
        if paths:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                _, exit_codes = run(self.case, folder, resume, list(map(str, paths)), limit=HANG + 3 * len(paths))
                for number, (content, path) in enumerate(chosen.items()):
                    try:
                        self.resumed[content] = self._check_resumed(path, folder, number)
                    except FileNotFoundError:
                        printed = (folder / "output of 0").read_text()[-1500:]
                        self.resumed[content] = [f"a resume from {path.name} failed: {exit_codes} {printed}"]
        for outcome, _ in outcomes:
            for file in outcome.files:
                outcome.problems += self.resumed[file.content]

    def _check_resumed(self, path: Path, folder: Path, number: int) -> list[str]:
        saved = torch.load(path, weights_only=True)
        expected = self.simulate(self.start(saved), range(saved["global_step"], RESUMED_STEPS))[-1]
        problems = []
        for rank in range(self.case.num_workers):
            result = torch.load(folder / f"{number} of {rank}", weights_only=True)
            problems += self.check_end(result, rank, expected, f"resumed from {path.name}")
            if rank == 0 and self.case.is_sparse and (why := saved[KEY]["why_incomplete"]) is not None:
                had_steps = self.case.is_local or saved[KEY]["numbers"]["last_step"] is not None
                is_warned = any(f"holds no {self.lacking}" in text and why in text for text in result["warnings"])
                if had_steps and not is_warned:
                    problems.append(f"resumed from {path.name}: no warning of missing {self.lacking}")
        return problems


def own_of(content: dict[str, Any]) -> list[tuple[dict[str, Any], Layers]]:
    """Return the tensors and the momentum of every worker."""
    extras = content["extras"][0] if content["extras"] else []
    return [
        (held, momentum_of(extra["optimizer_states"])) for held, extra in zip(content["workers"], extras, strict=False)
    ]


class LocalCheckpointChecker(CheckpointChecker):
    """Checks mean weights, the state of each worker and every resume of local training; all are exact."""

    state = LocalState
    lacking = "drifts"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        # A fault may happen between the optimizer step and the exchange.
        self.stepped = [state.stepped(step) for step, state in enumerate(self.states[:-1])]

    def prepare(self) -> None:
        """Need no training of its own."""

    def describe(self, name: str, saved: dict[str, Any], problems: list[str]) -> File:
        if not saved["optimizer_states"]:
            return File(name, None, saved["global_step"], "nothing yet", "")
        weights, content = saved["state_dict"], saved[KEY]
        why_not = content["why_incomplete"]
        if why_not is None:
            holds = "residuals"
            step = self._check_workers(saved, name, problems)
        else:
            holds = str(why_not)
            known = [(step, state.anchor) for step, state in enumerate(self.states)]
            if "gathering" in why_not:  # after weights were averaged
                known = [(step, state.mean) for step, state in enumerate(self.states)]
            step = next((step for step, layers in known if same(weights, layers)), None)
            if step is None and "changed" not in why_not:
                problems.append(f"{name}: the weights are not the anchor or mean of any step")
            if content["numbers"] is not None:
                problems.append(f"{name} has λ")
            if content["workers"]:
                problems.append(f"{name} has drifts, but states a reason for missing drifts: {why_not}")
        digest = hashlib.sha256(repr((step, saved["global_step"], holds)).encode())
        for weight in (*weights.values(), *momentum_of(saved["optimizer_states"]).values()):
            digest.update(weight.numpy().tobytes())
        return File(name, step, saved["global_step"], holds, digest.hexdigest())

    def _check_workers(self, saved: dict[str, Any], name: str, problems: list[str]) -> int | None:
        """Return the step of the workers' state; None, as with plain ddp, if an optimizer step was interrupted."""
        content = saved[KEY]
        workers = [(held["weights"], momentum) for held, momentum in own_of(content)]
        known = [*enumerate(self.states), *((step + 1, state) for step, state in enumerate(self.stepped))]
        found: list[tuple[int, LocalState]] = []
        if self.case.worker_state == "small":
            if workers:
                problems.append(f"{name} has the state of workers, which nobody requested")
            # An exchange does not change the mean.
            found = [entry for entry in known if same(saved["state_dict"], entry[1].mean)]
        elif len(workers) != self.case.num_workers:
            problems.append(f"{name} has the state of {len(workers)} workers")
        else:
            mean = LocalState({}, [weights for weights, _ in workers], []).mean
            if not same(saved["state_dict"], mean):
                problems.append(f"{name}: the weights are not the mean of all workers")
            for entry in known:
                pairs = zip(workers, entry[1].weights, entry[1].momentum, strict=True)
                if all(same(own[0], weights) and same(own[1], momentum) for own, weights, momentum in pairs):
                    found = [entry]
        anchors = [state.anchor for _, state in found] or [state.anchor for state in self.states]
        if not any(same(content["shared"]["anchor"], anchor) for anchor in anchors):
            problems.append(f"{name}: the anchor belongs to another step than the weights")
        return found[0][0] if found else None

    def start(self, saved: dict[str, Any]) -> Any:
        content, n = saved[KEY], self.case.num_workers
        weights = [saved["state_dict"]] * n
        momentum = [momentum_of(saved["optimizer_states"])] * n
        if content["why_incomplete"] is not None:
            return LocalState(saved["state_dict"], weights, momentum)
        if content["workers"]:
            weights = [held["weights"] for held, _ in own_of(content)]
            momentum = [own for _, own in own_of(content)]
        anchor = {name: content["shared"]["anchor"][name] for name in SIZES}
        return LocalState(anchor, weights, momentum)

    def check_end(self, result: dict[str, Any], rank: int, expected: Any, what: str) -> list[str]:
        problems = []
        if not same(result["weights"], expected.mean):
            problems.append(f"{what}: final weights differ from the simulated mean")
        if not same(result["residuals"], expected.anchor):
            problems.append(f"{what}: the final anchor differs from the simulation")
        return problems
