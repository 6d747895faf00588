"""Faults at every point of a training, by hundreds, and how many of them a training survives.

python -m tests.integration.fault_table --per-point 1              # every point once, in turn in every way
"""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.integration.fault_judge import Judge, Outcome
from tests.integration.fault_local import LocalJudge
from tests.integration.fault_points import AFTERWARDS, Fault, Point
from tests.integration.fault_workers import Case, trace

CASES = [
    Case("gather"),
    Case("gather", together=True),
    Case("gather", own_select=True),
    Case("dense"),
    Case("auto"),
    Case("reduce_scatter"),
    Case("hierarchical", hosts=2),
    Case("gather", residual_checkpoint="mean"),
    Case("gather", saver="model_checkpoint"),
    Case("gather", manual=True),
    Case("gather", 3),
    Case("dense", 3),
    Case("reduce_scatter", 3),
    Case("hierarchical", 3),
    Case("local"),
    Case("local", residual_checkpoint="mean"),
    Case("local", manual=True),
]
WAYS = ("raise", "SIGUSR1", "SIGINT", "SIGKILL")
WINDOWS = ("set-up", "step 0", "step 1", "save 1", "step 2", "save 2", "end")
"""The other steps are like the third."""


def points_of(traces: Sequence[Sequence[Point]], windows: Sequence[str]) -> list[Point]:
    """Returns every point that some worker comes by, once; of looks into the store, as many as it takes, one."""
    points = dict.fromkeys(
        point for points_of_worker in traces for point in points_of_worker if point.window in windows
    )
    return [point for point in points if not ("store." in point.name and point.k)]


def who(number: int, case: Case) -> list[bool]:
    """Returns which workers are struck: the first, the last, all."""
    return [number == 2 or rank == (0, case.num_workers - 1)[number] for rank in range(case.num_workers)]


def faults_of(case: Case, windows: Sequence[str], per_point: int, seed: int, skewed: int) -> list[Fault]:
    """Returns faults at every point, each way and each choice of workers in turn, and at unlike points of workers."""
    traces = trace(case)
    sets = [set(points) for points in traces]
    generator = random.Random(seed)
    kinds = list(itertools.product(WAYS, range(3)))
    turn: Iterator[tuple[str, int]] = itertools.chain.from_iterable(
        generator.sample(kinds, len(kinds)) for _ in itertools.count()
    )
    faults: dict[Fault, None] = {}
    for point in points_of(traces, windows):
        found = 0
        for way, number in itertools.islice(turn, 4 * len(kinds)):
            if found == per_point:
                break
            struck = who(number, case)
            if all(point in sets[rank] for rank in range(case.num_workers) if struck[rank]):
                fault = Fault(way, tuple(point if is_struck else None for is_struck in struck))
                found += fault not in faults
                faults[fault] = None
    for _ in range(skewed):
        window = generator.choice([known for known in windows if known != "set-up"])
        chosen = tuple(generator.choice(points_of([points], [window])) for points in traces)
        faults[Fault(generator.choice(WAYS[:3]), chosen)] = None
    return list(faults)


def second_faults_of(case: Case, per_point: int, seed: int) -> list[Fault]:
    """Returns faults that strike while a checkpoint is saved because of a first one, which all workers have met."""
    generator = random.Random(seed)
    faults = []
    for first in ("raise", "SIGUSR1"):
        point = Point("step 2", "backward", 1)
        fault = Fault(first, (point,) * case.num_workers)
        sets = [set(points) for points in trace(case, fault)]
        for second in points_of([sorted(points) for points in sets], [AFTERWARDS]):
            kinds = [
                (way, number)
                for way, number in itertools.product(WAYS, range(3))
                if all(second in sets[rank] for rank, is_struck in enumerate(who(number, case)) if is_struck)
            ]
            for way, number in generator.sample(kinds, min(per_point, len(kinds))):
                then = Fault(way, tuple(second if is_struck else None for is_struck in who(number, case)))
                faults.append(replace(fault, then=then))
    return faults


def inject(rows: Sequence[tuple[Case, Fault]], at_a_time: int = 4) -> list[Outcome]:
    """Lets every fault happen in a training of its own, some of them at a time, as most of them wait."""
    judges = {case: (LocalJudge if case.is_local else Judge)(case) for case, _ in rows}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_a_time) as pool:
        folders = [Path(name) / str(number) for number in range(len(rows))]
        for folder in folders:
            folder.mkdir()
        list(pool.map(lambda judge: judge.prepare(), judges.values()))
        outcomes = list(pool.map(lambda row, folder: judges[row[0]].strike(row[1], folder), rows, folders))
        of_case: dict[Case, list[tuple[Outcome, Path]]] = {case: [] for case in judges}
        for outcome, folder in zip(outcomes, folders, strict=True):
            of_case[outcome.case].append((outcome, folder))
        list(pool.map(lambda case: judges[case].resume(of_case[case]), judges))
    return outcomes


def plain_of(case: Case) -> Case:
    """Returns the same case with Lightning's own strategy."""
    return Case("ddp", case.num_workers, manual=case.manual, saver=case.saver)


def strikes_first_again(fault: Fault) -> bool:
    """Whether a second fault strikes the first worker; in plain ddp no other takes part in a save."""
    return fault.then is not None and fault.then.points[0] is not None


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", help="part of the name of the cases to run", default="")
    parser.add_argument("--windows", default=",".join(WINDOWS), help="of a training, separated by commas")
    parser.add_argument("--per-point", type=int, default=1, help="faults at each point, of twelve")
    parser.add_argument("--share", type=float, default=1.0, help="of all faults, drawn at random")
    parser.add_argument("--skewed", type=int, default=10, help="faults that strike workers at unlike points, per case")
    parser.add_argument("--second", action="store_true", help="also a second fault, while the first is handled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-a-time", type=int, default=4)
    arguments = parser.parse_args()
    num_faults = num_survived = num_compared = 0
    for case in (known for known in CASES if arguments.route in str(known)):
        started = time.monotonic()
        windows = arguments.windows.split(",")
        faults = faults_of(case, windows, arguments.per_point, arguments.seed, arguments.skewed)
        if arguments.second:
            faults += second_faults_of(case, arguments.per_point, arguments.seed)
        faults = random.Random(arguments.seed).sample(faults, round(arguments.share * len(faults)))
        some = inject([(case, fault) for fault in faults], arguments.at_a_time)
        in_plain = plain_of(case)
        known = {point for points in trace(in_plain) for point in points} | {None}
        like = [
            outcome
            for outcome in some
            if known.issuperset(outcome.fault.points) and not strikes_first_again(outcome.fault)
        ]
        alone = list(dict.fromkeys(replace(outcome.fault, then=None) for outcome in like))
        struck = inject([(in_plain, fault) for fault in alone], arguments.at_a_time)
        plain = dict(zip(alone, struck, strict=True))
        for outcome in like:
            compare(outcome, plain[replace(outcome.fault, then=None)])
        num_compared += len(like)
        for outcome in some:
            if outcome.problems:
                print(outcome, *dict.fromkeys(outcome.problems), sep="\n    ", flush=True)
        survived = sum(not outcome.problems for outcome in some)
        print(f"{case}: {survived} of {len(some)} survived, {time.monotonic() - started:.0f} s", flush=True)
        num_faults, num_survived = num_faults + len(some), num_survived + survived
    print(f"{num_survived} of {num_faults} survived; {num_compared} were compared with plain ddp")


if __name__ == "__main__":
    main()
