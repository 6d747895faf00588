"""After an exception, a signal or a kill at any point, the checkpoint is correct or names the missing state.

Every row injects faults into one training. ``tests.integration.faults.fault_checker`` loads all remaining files with
``weights_only=True``, compares them with a simulation in plain tensors, resumes from them, and compares again.
A row states its further expectations.
"""

import itertools
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.integration.faults.fault_checker import CheckpointChecker, LocalCheckpointChecker, Outcome
from tests.integration.faults.fault_points import AFTERWARDS, Fault, Point
from tests.integration.faults.fault_training import State, simulate
from tests.integration.faults.fault_workers import HANG, THRESHOLD, Case, trace
from tests.integration.models import HAS_SAVE_ON_EXCEPTION

pytestmark = [
    pytest.mark.xdist_group("interrupts"),  # the first row runs the trainings of all rows
    pytest.mark.long,
    pytest.mark.timeout(400),
]
AT_A_TIME = 8
"""Number of concurrent trainings. Two cores are enough, because most workers wait for a missing worker."""
FIRST, LAST, ALL = "first", "last", "all"

IN_BACKWARD = Point("step 2", "backward", 1)
"""Some buckets are being exchanged, others are not."""
IN_TRAINING_STEP = Point("step 2", "training_step begins")
AFTER_BACKWARD = Point("step 2", "on_after_backward")
IN_OPTIMIZER = Point("step 2", "optimizer changed a weight", 1)
AFTER_STEP = Point("step 2", "on_train_batch_end")
BEFORE_SENDING = Point("save 1", "before send")
AT_THE_BARRIER = Point("save 2", "after store.set came")
WHILE_WRITTEN = Point("save 2", "while written")

RESIDUALS = "residuals"
WORKER_MISSING = "did not reach the save within"
IN_THE_MIDDLE = "an optimizer's step or a new layout of residuals was not complete"
NO_FILE = "no file"

GATHER, DENSE = Case("gather"), Case("dense")
MEAN = Case("gather", worker_state="small")
MODEL_CHECKPOINT = Case("gather", saver="model_checkpoint")
BY_HAND = Case("gather", manual=True)
LOCAL, LOCAL_MEAN = Case("local"), Case("local", worker_state="small")


class Row(NamedTuple):
    """One training with a fault.

    Args:
        case: configuration of the training.
        fault: the injected fault.
        saved: RESIDUALS if the file saved because of the fault holds them, part of the reason if not, or NO_FILE.
        finishes: whether the training continues to its end.
    """

    case: Case
    fault: Fault
    saved: str
    finishes: bool = False


def fault_at(case: Case, way: str, whom: str, point: Point, then: Fault | None = None) -> Fault:
    """Return a fault at one point on the first, the last or all workers."""
    ranks = {FIRST: [0], LAST: [case.num_workers - 1], ALL: range(case.num_workers)}[whom]
    return Fault(way, tuple(point if rank in ranks else None for rank in range(case.num_workers)), then)


def row(case: Case, way: str, whom: str, point: Point, saved: str, *, finishes: bool = False) -> Row:
    return Row(case, fault_at(case, way, whom, point), saved, finishes)


def then_killed(case: Case, name: str, saved: str) -> Row:
    """Return a row in which all workers raise, and the last is killed in the save that follows."""
    death = fault_at(case, "SIGKILL", LAST, Point(AFTERWARDS, name))
    return Row(case, fault_at(case, "raise", ALL, IN_BACKWARD, death), saved)


FIRST_BACKWARD = Point("step 0", "backward", 1)
FIRST_OPTIMIZER = Point("step 0", "optimizer changed a weight", 1)
FIRST_COMMIT = Point("step 0", "after ResidualMemory.commit")
IN_BOTH_PLACES = (IN_BACKWARD, IN_TRAINING_STEP)

# SLURM signals the first process of a job or all. In local training "residuals" are the drifts of all workers.
LIST = [
    *(
        row(case, way, ALL, IN_BACKWARD, RESIDUALS, finishes=way == "SIGUSR1")
        for case in (
            *(GATHER, DENSE, Case("auto"), Case("reduce_scatter"), Case("gather", 3)),
            *(MEAN, BY_HAND, Case("gather", own_select=True), Case("gather", together=True), LOCAL),
        )
        for way in ("raise", "SIGUSR1")
    ),
    *(row(case, "SIGUSR1", FIRST, IN_BACKWARD, WORKER_MISSING) for case in (GATHER, MEAN, LOCAL)),
    row(GATHER, "SIGUSR1", LAST, IN_BACKWARD, NO_FILE),
    *(Row(case, Fault("SIGUSR1", IN_BOTH_PLACES), RESIDUALS, finishes=True) for case in (GATHER, LOCAL)),
    Row(
        GATHER,
        Fault("SIGUSR1", (Point("step 0", "before Exchange.finish"), Point("step 0", "on_before_backward"))),
        "nothing yet",
        finishes=True,
    ),
    *(row(case, "raise", FIRST, IN_TRAINING_STEP, WORKER_MISSING) for case in (GATHER, MODEL_CHECKPOINT)),
    *(row(case, "raise", LAST, IN_TRAINING_STEP, WORKER_MISSING) for case in (GATHER, MODEL_CHECKPOINT, MEAN, LOCAL)),
    row(MODEL_CHECKPOINT, "raise", ALL, IN_TRAINING_STEP, RESIDUALS),
    row(GATHER, "raise", ALL, AFTER_BACKWARD, RESIDUALS),
    row(BY_HAND, "raise", ALL, Point("step 2", "between backward and step"), RESIDUALS),
    row(GATHER, "raise", ALL, IN_OPTIMIZER, IN_THE_MIDDLE),
    row(GATHER, "raise", ALL, AFTER_STEP, RESIDUALS),
    row(GATHER, "raise", ALL, FIRST_BACKWARD, "nothing yet"),
    row(GATHER, "raise", ALL, FIRST_OPTIMIZER, IN_THE_MIDDLE),
    *(row(DENSE, way, ALL, FIRST_COMMIT, IN_THE_MIDDLE, finishes=way == "SIGUSR1") for way in ("raise", "SIGUSR1")),
    row(GATHER, "SIGINT", ALL, IN_BACKWARD, RESIDUALS),
    *(row(GATHER, "SIGINT", whom, IN_BACKWARD, WORKER_MISSING) for whom in (FIRST, LAST)),
    row(GATHER, "SIGINT", ALL, Point("step 2", "before isend", 1), RESIDUALS),
    row(LOCAL_MEAN, "SIGINT", LAST, Point("end", "on_train_end"), WORKER_MISSING),
    row(GATHER, "SIGKILL", LAST, IN_BACKWARD, WORKER_MISSING),
    row(GATHER, "SIGKILL", FIRST, IN_BACKWARD, NO_FILE),
    row(GATHER, "SIGKILL", LAST, AT_THE_BARRIER, WORKER_MISSING),
    row(GATHER, "SIGKILL", LAST, Point("save 1", "before new_group"), WORKER_MISSING),
    row(GATHER, "SIGKILL", LAST, BEFORE_SENDING, WORKER_MISSING),
    row(GATHER, "SIGKILL", FIRST, WHILE_WRITTEN, NO_FILE),
    row(GATHER, "raise", FIRST, WHILE_WRITTEN, WORKER_MISSING),
    row(LOCAL, "raise", ALL, Point("step 2", "before DriftExchange._move_anchor"), "of an exchange"),
    then_killed(GATHER, "before send", "gathering them failed"),
    then_killed(LOCAL, "before Workers.average", "averaging weights failed"),
    then_killed(LOCAL, "before Workers.gather_objects_to_first", "gathering them failed"),
]
ROWS = {f"{row.fault}: {row.case}": row for row in LIST}
assert len(ROWS) == len(LIST)


Pair = tuple[Case, Fault]


def points_of(traces: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the distinct points of some steps and save; only the first of repeated accesses to the store counts."""
    windows = ("step 0", "step 2", "save 1", "save 2")
    points = dict.fromkeys(point for points in traces for point in points if point.window in windows)
    return [point for point in points if not ("store." in point.name and point.k)]


def faults_of(case: Case) -> list[Fault]:
    """Return two faults at every point; they take turns through all ways and choices of workers."""
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
            fault = fault_at(case, way, whom, point)
            if all(point in traces[rank] for rank in fault.ranks):
                found += fault not in faults
                faults[fault] = None
    return list(faults)


def samples() -> list[Pair]:
    """Return a reproducible sample of faults at all points."""
    drawn = []
    for case, number in ((GATHER, 10), (DENSE, 6)):
        # Mostly faults on all workers, which cause no wait, and a few others.
        faults = faults_of(case)
        generator = random.Random(2)
        alike = [fault for fault in faults if fault.is_everywhere]
        alone = [fault for fault in faults if not fault.is_everywhere]
        drawn += [(case, fault) for fault in generator.sample(alike, number) + generator.sample(alone, number // 3)]
    return drawn


def run_pairs(pairs: list[Pair]) -> dict[Pair, Outcome]:
    """Return the outcome of each fault; run several trainings at once, first those in which workers wait."""
    pairs = sorted(dict.fromkeys(pairs), key=lambda pair: pair[1].is_everywhere)
    checkers = {case: (LocalCheckpointChecker if case.is_local else CheckpointChecker)(case) for case, _ in pairs}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_A_TIME) as pool:
        folders = [Path(name) / str(number) for number in range(len(pairs))]
        for folder in folders:
            folder.mkdir()
        list(pool.map(lambda checker: checker.prepare(), checkers.values()))
        outcomes = list(pool.map(lambda pair, folder: checkers[pair[0]].inject(pair[1], folder), pairs, folders))
        of_case: dict[Case, list[tuple[Outcome, Path]]] = {case: [] for case in checkers}
        for outcome, folder in zip(outcomes, folders, strict=True):
            of_case[outcome.case].append((outcome, folder))
        list(pool.map(lambda case: checkers[case].resume(of_case[case]), checkers))
    return dict(zip(pairs, outcomes, strict=True))


@pytest.fixture(scope="module")
def outcomes(rows: list[dict[str, str]]) -> dict[Pair, Outcome]:
    """Return the outcomes of all selected rows, and of their faults under plain ddp."""
    chosen = [ROWS[row["name"]] for row in rows]
    pairs = [(row.case, row.fault) for row in chosen if row.case.saver != "model_checkpoint" or HAS_SAVE_ON_EXCEPTION]
    return run_pairs([*pairs, *(in_plain_ddp(*pair) for pair in pairs if is_in_plain_ddp(pair[1]))])


def is_in_plain_ddp(fault: Fault) -> bool:
    """Return whether plain ddp reaches the points of a fault."""
    names = {"backward", "training_step begins", "on_after_backward", "optimizer changed a weight"}
    names |= {"on_train_batch_end", "between backward and step", "while written"}
    return all(point is None or point.name in names for point in fault.points)


def in_plain_ddp(case: Case, fault: Fault) -> Pair:
    """Return the case with Lightning's own strategy, and the fault without a second fault."""
    return Case("ddp", case.num_workers, manual=case.manual, saver=case.saver), Fault(fault.way, fault.points)


def compare(ours: Outcome, plain: Outcome) -> None:
    """Add a problem if plain ddp left a correct file and the sparse strategy did not."""
    if not plain.was_injected or plain.saved is None or plain.saved.step is None:
        return
    if ours.finished:
        return  # it continued although plain ddp could not
    same = ours.file(plain.saved.name)
    if ours.case.is_local and same is not None and not same.has_residuals:
        return  # the file has the anchor and says so
    if same is None:
        ours.problems.append(f"no {plain.saved.name}, which plain ddp wrote at {plain.saved.step}")
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
    assert outcome.was_injected
    assert not outcome.problems, f"{outcome}: {outcome.problems}"
    assert outcome.finished == row.finishes, f"{outcome}\n{outcome.printed}"
    assert outcome.seconds < HANG
    saved = outcome.saved
    if row.saved == NO_FILE:
        # SIGUSR1 on one worker ends the training with an error on all, which saves on_exception.ckpt.
        assert saved is None or saved.name == "on_exception.ckpt"
    else:
        file = outcome.file("hpc") if row.fault.way == "SIGUSR1" else saved
        assert file is not None
        assert row.saved in file.holds
        assert not (file.is_ahead and file.has_residuals)
    if saved is not None and row.fault.way != "SIGUSR1" and row.saved != IN_THE_MIDDLE:
        assert saved.step == saved.global_step


@pytest.mark.slow
def test_random_faults_leave_correct_checkpoints() -> None:
    found = run_pairs(samples()).values()
    assert all(outcome.was_injected for outcome in found)
    assert not [f"{outcome}: {outcome.problems}" for outcome in found if outcome.problems]
    assert sum(file.has_residuals for outcome in found for file in outcome.files) > len(found) / 2


def test_the_simulation_sends_some_and_keeps_some() -> None:
    first, *others = simulate(State.first(2), range(3), THRESHOLD)
    for state in others:
        assert all(any(residual.any() for residual in residuals.values()) for residuals in state.residuals)
        assert all((state.weights[name] != first.weights[name]).any() for name in first.weights)
    residual = torch.cat(list(others[-1].residuals[0].values()))
    assert 0.5 < residual.count_nonzero() / residual.numel() < 1.0
