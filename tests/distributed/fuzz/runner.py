"""Runs cases in turn."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.distributed.fuzz.case import Case, draw_case
from tests.distributed.fuzz.training import run_seed
from tests.workers import run_workers

CASE_SECONDS = 90.0
"""Time limit of a case, which usually takes a second."""


@dataclass
class Outcome:
    """The outcome of a case: ``failure`` is None, or a message with the command that repeats it."""

    case: Case
    failure: str | None
    seen: dict[str, int]
    seconds: float


def failure_message(case: Case, what: str) -> str:
    fields = "\n".join(f"    {field.name}={getattr(case, field.name)!r}" for field in dataclasses.fields(case))
    again = f"python -m tests.distributed.fuzz --seed {case.seed}"
    return f"seed {case.seed}: {what}\n{fields}\n  again: {again}"


def run_cases(seeds: Sequence[int], seconds: float = CASE_SECONDS) -> Iterator[Outcome]:
    """Yield the outcome of each case. A crash or a timeout fails only its case."""
    for case in map(draw_case, seeds):
        started = time.monotonic()
        try:
            difference, seen = run_workers(run_seed, case.num_workers, case.seed, timeout=seconds)[0]
        except (AssertionError, TimeoutError) as error:
            difference, seen = str(error), {}
        failure = None if difference is None else failure_message(case, difference)
        yield Outcome(case, failure, seen, time.monotonic() - started)
