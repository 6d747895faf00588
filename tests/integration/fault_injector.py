"""Strikes workers everywhere in a training, and has every file they leave judged."""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.fault_judge import Judge, Outcome
from tests.integration.fault_local import LocalJudge
from tests.integration.fault_points import Fault
from tests.integration.fault_workers import Case


def inject(rows: Sequence[tuple[Case, Fault]], at_a_time: int = 4) -> list[Outcome]:
    """Lets every fault happen in a training of its own, some of them at a time, as most of them wait."""
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
