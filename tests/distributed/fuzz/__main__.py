"""The command line; see the package."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from tests.distributed.fuzz.case import Case, draw_case
from tests.distributed.fuzz.training import run_seed
from tests.workers import run_workers

CASE_SECONDS = 90.0
"""Time limit of a case, which usually takes a second."""


def run_cases(seeds: Sequence[int], seconds: float = CASE_SECONDS) -> Iterator[tuple[Case, str | None, int]]:
    """Yield each case, its failure or None, and its steps that sent a part. A crash or timeout fails only its case."""
    for case in map(draw_case, seeds):
        try:
            difference, partial_steps = run_workers(run_seed, case.num_workers, case.seed, timeout=seconds)[0]
        except (AssertionError, TimeoutError) as error:
            difference, partial_steps = str(error), 0
        if difference is not None:
            fields = "\n".join(f"    {name}={value!r}" for name, value in vars(case).items())
            difference = f"{difference}\n{fields}\n  again: python -m tests.distributed.fuzz --seed {case.seed}"
        yield case, difference, partial_steps


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed.fuzz", description="Random trainings against n workers in plain tensors."
    )
    parser.add_argument("--cases", type=int, default=200, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run only this seed")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.cases)
    seeds = seeds if arguments.seed is None else [arguments.seed]
    started, steps, failed = time.monotonic(), 0, []
    for case, failure, _ in run_cases(seeds):
        steps += case.steps
        print(f"seed {case.seed}: {failure or 'passed'}", flush=True)
        failed += [case.seed] * (failure is not None)
    seconds = time.monotonic() - started
    print(f"{len(seeds)} cases, {steps} steps in {seconds:.0f} s, {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
