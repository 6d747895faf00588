"""The command line; see the package."""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

from tests.distributed.fuzz.case import HUGE, Case
from tests.distributed.fuzz.runner import CASE_SECONDS, CASES_PER_START, Outcome, run_cases


def count_kinds(cases: Sequence[Case]) -> dict[str, Counter[str]]:
    """Returns how many cases have which word of which option."""
    plain = {field.name for field in fields(Case)} - {"seed", "layers", "rates", "attempts"}
    kinds = {name: attrgetter(name) for name in sorted(plain | {"dtype", "steps"})}
    kinds |= {
        "threshold": lambda case: {0.0: "0", HUGE: "huge"}.get(case.threshold, "other"),
        "layers": lambda case: len(case.layers),
        "largest layer": lambda case: "> 65,000" if max(one.size for one in case.layers) > 65_000 else "small",
        "bad": lambda case: None if case.bad is None else case.bad[3],
    }
    for name in ("layer_thresholds", "skips", "silent", "discards", "resumes", "local_clip_norm"):
        kinds[name] = lambda case, name=name: "given" if getattr(case, name) else "none"
    kinds["step_scales"] = lambda case: "jumps" if len(set(case.step_scales)) > 1 else "even"
    return {name: Counter(str(kind(case)) for case in cases) for name, kind in kinds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed.fuzz", description="Random trainings against n workers in plain tensors."
    )
    parser.add_argument("--cases", type=int, default=200, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so long")
    parser.add_argument("--case-seconds", type=float, default=CASE_SECONDS, help="what takes longer hangs")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--quiet", action="store_true", help="print failures and the summary only")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.cases)
    seeds = seeds if arguments.seed is None else [arguments.seed]
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for first in range(0, len(seeds), 4 * CASES_PER_START):
        if time.monotonic() - started > arguments.seconds:
            break
        for outcome in run_cases(seeds[first : first + 4 * CASES_PER_START], arguments.case_seconds):
            outcomes.append(outcome)
            if outcome.failure is not None:
                print(f"FAILED {outcome.failure}\n", flush=True)
            elif not arguments.quiet:
                print(f"{outcome.case.seed:6} {outcome.seconds:5.1f} s", flush=True)
    failed = sorted(outcome.case.seed for outcome in outcomes if outcome.failure is not None)
    for name, counts in count_kinds([outcome.case for outcome in outcomes]).items():
        print(f"{name}: " + ", ".join(f"{word} {count}" for word, count in sorted(counts.items())))
    seen: Counter[str] = Counter()
    for outcome in outcomes:
        seen.update(outcome.seen)
    print(", ".join(f"{word}: {count}" for word, count in seen.items()))
    print(f"{len(outcomes)} cases in {time.monotonic() - started:.0f} s, {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
