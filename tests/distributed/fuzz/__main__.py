"""The command line; see the package."""

import argparse
import sys
import time
from collections import Counter

from tests.distributed.fuzz.runner import Outcome, run_cases


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
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in run_cases(seeds):
        outcomes.append(outcome)
        if outcome.failure is not None:
            print(f"FAILED {outcome.failure}\n", flush=True)
        else:
            print(f"{outcome.case.seed:6} {outcome.seconds:5.1f} s", flush=True)
    failed = sorted(outcome.case.seed for outcome in outcomes if outcome.failure is not None)
    seen: Counter[str] = Counter()
    for outcome in outcomes:
        seen.update(outcome.seen)
    print(", ".join(f"{word}: {count}" for word, count in seen.items()))
    print(f"{len(outcomes)} cases in {time.monotonic() - started:.0f} s, {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
