"""The command line; see the package."""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.distributed.fuzz.case import HUGE, Case
from tests.distributed.fuzz.runner import CASE_SECONDS, CASES_PER_START, Outcome, run_cases


def count_kinds(cases: Sequence[Case]) -> dict[str, Counter[str]]:
    """Returns how many cases have which word of which option."""
    kinds = {
        "workers": lambda case: case.num_workers,
        "dtype": lambda case: case.dtype,
        "layers": lambda case: len(case.layers),
        "largest layer": lambda case: "> 65,000" if max(one.size for one in case.layers) > 65_000 else "small",
        "one-element layer": lambda case: any(one.size == 1 for one in case.layers),
        "bucket cap in MB": lambda case: case.bucket_cap_mb,
        "gradient_as_bucket_view": lambda case: case.gradient_as_bucket_view,
        "sparsifier": lambda case: case.sparsifier,
        "threshold": lambda case: (
            {0.0: "0", HUGE: "huge"}.get(case.threshold, "other") if case.sparsifier == "threshold" else "none"
        ),
        "layer thresholds": lambda case: len(case.layer_thresholds),
        "error feedback": lambda case: case.error_feedback,
        "value dtype": lambda case: case.value_dtype,
        "exchange": lambda case: (
            case.exchange + (f" {case.num_workers}/{case.workers_per_node}" if case.exchange == "hierarchical" else "")
        ),
        "clipped": lambda case: case.local_clip_norm is not None,
        "backwards a step": lambda case: case.micro_steps,
        "unused": lambda case: case.unused,
        "skips": lambda case: "none" if not case.skips else "late" if case.skips_late else "yes",
        "zeroing": lambda case: case.zeroing,
        "jumps": lambda case: len(set(case.step_scales)) > 1,
        "silent workers": lambda case: bool(case.silent),
        "bad": lambda case: "none" if case.bad is None else case.bad[3],
        "loss scale": lambda case: case.loss_scale,
        "overflow under a loss scale": lambda case: case.bad is not None and case.loss_scale is not None,
        "edges": lambda case: case.edges,
        "per-layer statistics": lambda case: case.per_layer_stats,
        "steps": lambda case: case.steps,
    }
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
                print(f"{outcome.case.seed:6} {outcome.seconds:5.1f} s  {outcome.case.describe()}", flush=True)
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
