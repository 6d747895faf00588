"""An exception, a signal or a death anywhere leaves a checkpoint that is right, or says what it lacks.

Every row strikes one training. For each, ``tests.integration.fault_judge`` has all files that are left loaded
with ``weights_only=True``, compared with a simulation in plain tensors, resumed, and compared with it again. What is
expected beyond that is in the rows.
"""

import inspect
import itertools
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.integration.fault_judge import Judge, LocalJudge, Outcome
from tests.integration.fault_points import AFTERWARDS, Fault, Point
from tests.integration.fault_training import State, simulate
from tests.integration.fault_workers import HANG, THRESHOLD, Case, trace

pytestmark = [
    pytest.mark.xdist_group("interrupts"),  # all are struck together
    pytest.mark.long,
    pytest.mark.timeout(400),
]
AT_A_TIME = 8
"""Most workers wait for others that do not come: two cores are enough."""
HAS_SAVE_ON_EXCEPTION = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
FIRST, LAST, ALL = "first", "last", "all"

IN_BACKWARD = Point("step 2", "backward", 1)
"""Some buckets are on their way, others are not."""
IN_TRAINING_STEP = Point("step 2", "training_step begins")
AFTER_BACKWARD = Point("step 2", "on_after_backward")
IN_OPTIMIZER = Point("step 2", "optimizer changed a weight", 1)
AFTER_STEP = Point("step 2", "on_train_batch_end")
BEFORE_SENDING = Point("save 1", "before send")
AT_THE_BARRIER = Point("save 2", "after store.set came")
WHILE_WRITTEN = Point("save 2", "while written")

RESIDUALS = "residuals"
NOBODY_CAME = "did not reach the save within"
IN_THE_MIDDLE = "in the middle of an optimizer's step"
NO_FILE = "no file"

GATHER, DENSE = Case("gather"), Case("dense")
HIERARCHICAL = Case("hierarchical", hosts=2)
MEAN = Case("gather", worker_state="small")
MODEL_CHECKPOINT = Case("gather", saver="model_checkpoint")
BY_HAND = Case("gather", manual=True)
LOCAL, LOCAL_MEAN = Case("local"), Case("local", worker_state="small")


class Row(NamedTuple):
    """One training that is struck.

    Args:
        case: how is trained.
        fault: what strikes whom.
        saved: what the file that was saved because of it holds: RESIDUALS, part of why not, or NO_FILE.
        finishes: whether the training goes on to its end.
    """

    case: Case
    fault: Fault
    saved: str
    finishes: bool = False


def strike(case: Case, way: str, whom: str, point: Point, then: Fault | None = None) -> Fault:
    """A fault at one point for those whom it strikes."""
    struck = {FIRST: [0], LAST: [case.num_workers - 1], ALL: range(case.num_workers)}[whom]
    return Fault(way, tuple(point if rank in struck else None for rank in range(case.num_workers)), then)


def row(case: Case, way: str, whom: str, point: Point, saved: str, *, finishes: bool = False) -> Row:
    return Row(case, strike(case, way, whom, point), saved, finishes)


def then_killed(case: Case, name: str, saved: str) -> Row:
    """All raise, and the last worker dies at a point of the save that follows."""
    death = strike(case, "SIGKILL", LAST, Point(AFTERWARDS, name))
    return Row(case, strike(case, "raise", ALL, IN_BACKWARD, death), saved)


FIRST_BACKWARD = Point("step 0", "backward", 1)
FIRST_OPTIMIZER = Point("step 0", "optimizer changed a weight", 1)
FIRST_COMMIT = Point("step 0", "after ResidualMemory.commit")
IN_BOTH_PLACES = (IN_BACKWARD, IN_TRAINING_STEP)

# SLURM signals the first process of a job, or all of them. In local training "residuals" are the drifts of all workers.
LIST = [
    *(
        row(case, way, ALL, IN_BACKWARD, RESIDUALS, finishes=way == "SIGUSR1")
        for case in (
            *(GATHER, DENSE, Case("auto"), Case("reduce_scatter"), HIERARCHICAL, Case("gather", 3), Case("dense", 3)),
            *(MEAN, BY_HAND, Case("gather", own_select=True), Case("gather", together=True), LOCAL),
        )
        for way in ("raise", "SIGUSR1")
    ),
    *(row(case, "SIGUSR1", FIRST, IN_BACKWARD, NOBODY_CAME) for case in (GATHER, DENSE, MEAN, LOCAL)),
    row(GATHER, "SIGUSR1", LAST, IN_BACKWARD, NO_FILE),
    *(Row(case, Fault("SIGUSR1", IN_BOTH_PLACES), RESIDUALS, finishes=True) for case in (GATHER, LOCAL)),
    Row(
        GATHER,
        Fault("SIGUSR1", (Point("step 0", "before Exchange.finish"), Point("step 0", "on_before_backward"))),
        "nothing yet",
        finishes=True,
    ),
    *(row(case, "raise", FIRST, IN_TRAINING_STEP, NOBODY_CAME) for case in (GATHER, MODEL_CHECKPOINT)),
    *(row(case, "raise", LAST, IN_TRAINING_STEP, NOBODY_CAME) for case in (GATHER, MODEL_CHECKPOINT, MEAN, LOCAL)),
    row(MODEL_CHECKPOINT, "raise", ALL, IN_TRAINING_STEP, RESIDUALS),
    row(GATHER, "raise", ALL, AFTER_BACKWARD, RESIDUALS),
    row(BY_HAND, "raise", ALL, Point("step 2", "between backward and step"), RESIDUALS),
    row(GATHER, "raise", ALL, IN_OPTIMIZER, IN_THE_MIDDLE),
    row(GATHER, "raise", ALL, AFTER_STEP, RESIDUALS),
    row(GATHER, "raise", ALL, FIRST_BACKWARD, "nothing yet"),
    row(GATHER, "raise", ALL, FIRST_OPTIMIZER, IN_THE_MIDDLE),
    *(row(DENSE, way, ALL, FIRST_COMMIT, IN_THE_MIDDLE, finishes=way == "SIGUSR1") for way in ("raise", "SIGUSR1")),
    row(GATHER, "SIGINT", ALL, IN_BACKWARD, RESIDUALS),
    *(row(GATHER, "SIGINT", whom, IN_BACKWARD, NOBODY_CAME) for whom in (FIRST, LAST)),
    row(GATHER, "SIGINT", ALL, Point("step 2", "before isend", 1), RESIDUALS),
    row(LOCAL_MEAN, "SIGINT", LAST, Point("end", "on_train_end"), NOBODY_CAME),
    row(GATHER, "SIGKILL", LAST, IN_BACKWARD, NOBODY_CAME),
    row(GATHER, "SIGKILL", FIRST, IN_BACKWARD, NO_FILE),
    row(GATHER, "SIGKILL", LAST, AT_THE_BARRIER, NOBODY_CAME),
    row(GATHER, "SIGKILL", LAST, Point("save 1", "before new_group"), NOBODY_CAME),
    row(GATHER, "SIGKILL", LAST, BEFORE_SENDING, NOBODY_CAME),
    row(HIERARCHICAL, "SIGKILL", LAST, Point("set-up", "before new_group"), NO_FILE),
    row(GATHER, "SIGKILL", FIRST, WHILE_WRITTEN, NO_FILE),
    row(GATHER, "raise", FIRST, WHILE_WRITTEN, NOBODY_CAME),
    row(LOCAL, "raise", ALL, Point("step 2", "before DriftExchange._move_anchor"), "of an exchange"),
    then_killed(GATHER, "before send", "gathering them failed"),
    then_killed(LOCAL, "before Workers.average", "averaging weights failed"),
    then_killed(LOCAL, "before Workers.gather_objects_to_first", "gathering them failed"),
]
ROWS = {f"{row.fault}: {row.case}": row for row in LIST}
assert len(ROWS) == len(LIST)


Pair = tuple[Case, Fault]


def points_of(traces: Sequence[Sequence[Point]]) -> list[Point]:
    """Returns every point of some steps and saves once; a worker may look into the store any number of times."""
    windows = ("step 0", "step 2", "save 1", "save 2")
    points = dict.fromkeys(point for points in traces for point in points if point.window in windows)
    return [point for point in points if not ("store." in point.name and point.k)]


def faults_of(case: Case) -> list[Fault]:
    """Returns two faults at every point, in turn of each way and each choice of workers."""
    traces = trace(case)
    generator = random.Random(1)
    kinds = list(itertools.product(("raise", "SIGUSR1", "SIGINT", "SIGKILL"), (FIRST, LAST, ALL)))
    turn = itertools.chain.from_iterable(generator.sample(kinds, len(kinds)) for _ in itertools.count())
    faults: dict[Fault, None] = {}
    for point in points_of(traces):
        found = 0
        for way, whom in itertools.islice(turn, 4 * len(kinds)):
            if found == 2:
                break
            fault = strike(case, way, whom, point)
            if all(point in traces[rank] for rank in fault.ranks):
                found += fault not in faults
                faults[fault] = None
    return list(faults)


def samples() -> list[Pair]:
    """Faults drawn from all points, the same in every run of the same code."""
    drawn = []
    for case, number in ((GATHER, 10), (DENSE, 6)):
        # Those that strike all workers alike, which nobody waits for, and a few others.
        faults = faults_of(case)
        generator = random.Random(2)
        alike = [fault for fault in faults if fault.is_everywhere]
        alone = [fault for fault in faults if not fault.is_everywhere]
        drawn += [(case, fault) for fault in generator.sample(alike, number) + generator.sample(alone, number // 3)]
    return drawn


def struck(pairs: list[Pair]) -> dict[Pair, Outcome]:
    """Returns the outcome of each fault, of which some strike at a time; those for which workers wait come first."""
    pairs = sorted(dict.fromkeys(pairs), key=lambda pair: pair[1].is_everywhere)
    judges = {case: (LocalJudge if case.is_local else Judge)(case) for case, _ in pairs}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_A_TIME) as pool:
        folders = [Path(name) / str(number) for number in range(len(pairs))]
        for folder in folders:
            folder.mkdir()
        list(pool.map(lambda judge: judge.prepare(), judges.values()))
        outcomes = list(pool.map(lambda pair, folder: judges[pair[0]].strike(pair[1], folder), pairs, folders))
        of_case: dict[Case, list[tuple[Outcome, Path]]] = {case: [] for case in judges}
        for outcome, folder in zip(outcomes, folders, strict=True):
            of_case[outcome.case].append((outcome, folder))
        list(pool.map(lambda case: judges[case].resume(of_case[case]), judges))
    return dict(zip(pairs, outcomes, strict=True))


@pytest.fixture(scope="module")
def outcomes(rows: list[dict[str, str]]) -> dict[Pair, Outcome]:
    """The outcomes of all rows that this session runs, and of the same faults under plain ddp."""
    chosen = [ROWS[row["name"]] for row in rows]
    pairs = [(row.case, row.fault) for row in chosen if row.case.saver != "model_checkpoint" or HAS_SAVE_ON_EXCEPTION]
    return struck([*pairs, *(in_plain_ddp(*pair) for pair in pairs if is_in_plain_ddp(pair[1]))])


def is_in_plain_ddp(fault: Fault) -> bool:
    """Whether plain ddp passes the points of a fault."""
    names = {"backward", "training_step begins", "on_after_backward", "optimizer changed a weight"}
    names |= {"on_train_batch_end", "between backward and step", "while written"}
    return all(point is None or point.name in names for point in fault.points)


def in_plain_ddp(case: Case, fault: Fault) -> Pair:
    """Returns the same case with Lightning's own strategy, in whose save no second fault strikes."""
    return Case("ddp", case.num_workers, manual=case.manual, saver=case.saver), Fault(fault.way, fault.points)


def compare(ours: Outcome, plain: Outcome) -> None:
    """Notes where plain ddp left a correct file and we none."""
    if not plain.has_struck or plain.saved is None or plain.saved.step is None:
        return
    if ours.finished:
        return  # it went on where plain ddp could not
    same = ours.file(plain.saved.name)
    if ours.case.is_local and same is not None and not same.has_residuals:
        return  # it has the anchor, and says so
    if same is None:
        ours.problems.append(f"no {plain.saved.name}, and plain ddp wrote it at {plain.saved.step}")
    elif same.step != plain.saved.step:
        ours.problems.append(f"{same.name} of step {same.step}, plain ddp's of {plain.saved.step}")


@pytest.mark.parametrize("name", ROWS)
def test_an_interrupted_run_leaves_a_correct_checkpoint(name: str, outcomes: dict[Pair, Outcome]) -> None:
    row = ROWS[name]
    if row.case.saver == "model_checkpoint" and not HAS_SAVE_ON_EXCEPTION:
        pytest.skip("this Lightning's ModelCheckpoint has no save_on_exception")
    outcome = outcomes[row.case, row.fault]
    if is_in_plain_ddp(row.fault):
        compare(outcome, outcomes[in_plain_ddp(row.case, row.fault)])
    assert outcome.has_struck
    assert not outcome.problems, f"{outcome}: {outcome.problems}"
    assert outcome.finished == row.finishes, f"{outcome}\n{outcome.printed}"
    assert outcome.seconds < HANG
    saved = outcome.saved
    if row.saved == NO_FILE:
        # SIGUSR1 on one worker alone ends the training in an error of all, for which there is a file of its own.
        assert saved is None or saved.name == "on_exception.ckpt"
    else:
        file = outcome.file("hpc") if row.fault.way == "SIGUSR1" else saved
        assert file is not None
        assert row.saved in file.holds
        assert not (file.is_ahead and file.has_residuals)
    if saved is not None and row.fault.way != "SIGUSR1" and row.saved != IN_THE_MIDDLE:
        assert saved.step == saved.global_step


@pytest.mark.full
def test_random_faults_leave_correct_checkpoints() -> None:
    found = struck(samples()).values()
    assert all(outcome.has_struck for outcome in found)
    assert not [f"{outcome}: {outcome.problems}" for outcome in found if outcome.problems]
    assert sum(file.has_residuals for outcome in found for file in outcome.files) > len(found) / 2


def test_the_simulation_sends_some_and_keeps_some() -> None:
    first, *others = simulate(State.first(2), range(3), THRESHOLD)
    for state in others:
        assert all(any(residual.any() for residual in residuals.values()) for residuals in state.residuals)
        assert all((state.weights[name] != first.weights[name]).any() for name in first.weights)
    residual = torch.cat(list(others[-1].residuals[0].values()))
    assert 0.5 < residual.count_nonzero() / residual.numel() < 1.0
