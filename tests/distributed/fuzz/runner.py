"""Many cases, several to a start of workers."""

import dataclasses
import faulthandler
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.distributed.fuzz.case import Case, draw_case
from tests.distributed.fuzz.training import run_case
from tests.workers import run_workers

CASE_SECONDS = 90.0
"""After so long a case hangs: its workers write where they are and end. A usual case takes a second."""
CASES_PER_START = 12


def _run_batch(seeds: Sequence[int], folder: str, seconds: float) -> None:
    """Runs cases one after the other; the first worker notes each in a file, so that a crash loses only its own."""
    warnings.filterwarnings("ignore")
    hang = open(f"{folder}/hang.{dist.get_rank()}", "w")  # noqa: SIM115
    for seed in seeds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=hang)
        started = time.monotonic()
        difference, seen = run_case(draw_case(seed))
        if dist.get_rank() == 0:
            note = {"seed": seed, "difference": difference, "seen": seen, "seconds": time.monotonic() - started}
            with open(f"{folder}/notes", "a") as notes:
                notes.write(json.dumps(note) + "\n")
    faulthandler.cancel_dump_traceback_later()
    hang.close()


@dataclass
class Outcome:
    """What came of a case: ``failure`` is None, or a message to repeat it with."""

    case: Case
    failure: str | None
    seen: dict[str, int]
    seconds: float


def failure_message(case: Case, what: str) -> str:
    fields = "\n".join(f"    {one.name}={getattr(case, one.name)!r}" for one in dataclasses.fields(case))
    again = f"python -m tests.distributed.fuzz --seed {case.seed}"
    return f"seed {case.seed}: {what}\n{fields}\n  again: {again}"


def run_cases(seeds: Sequence[int], seconds: float = CASE_SECONDS) -> Iterator[Outcome]:
    """Yields what came of each case; those with as many workers share their start.

    A crash fails its case and no other, and so does a case that needs more than so many seconds.
    """
    waiting: dict[int, list[int]] = {}
    for seed in seeds:
        waiting.setdefault(draw_case(seed).num_workers, []).append(seed)
    for num_workers, left in sorted(waiting.items()):
        while left:
            batch = left[:CASES_PER_START]
            with tempfile.TemporaryDirectory() as folder:
                broken = None
                try:
                    run_workers(_run_batch, num_workers, batch, folder, seconds, timeout=seconds * len(batch) + 30)
                except (AssertionError, TimeoutError) as error:
                    hangs = [path.read_text() for path in sorted(Path(folder).glob("hang.*"))]
                    broken = "\n".join([str(error), *filter(None, hangs)])
                notes = Path(folder, "notes")
                lines = notes.read_text().splitlines() if notes.exists() else []
            for line in lines:
                note = json.loads(line)
                case = draw_case(note["seed"])
                failure = None if note["difference"] is None else failure_message(case, note["difference"])
                yield Outcome(case, failure, note["seen"], note["seconds"])
            done = len(lines)
            if broken is not None and done < len(batch):
                case = draw_case(batch[done])
                yield Outcome(case, failure_message(case, broken), {}, 0.0)
                done += 1
            left = left[done:]
