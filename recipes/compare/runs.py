"""Runs of a recipe: each once, kept in a folder of its own, and what it came to."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple
from uuid import uuid4

import yaml
from filelock import FileLock, Timeout

from recipes.compare.variants import Grid, Variant
from recipes.demo import read

CLOSE = 0.1
"""How far an average density may be from the one that was asked for, as a share of it."""
MOST_TRIALS, FLAT_TRIALS = 8, 3
ARGUMENTS, RECIPE = "arguments.txt", "recipe.yaml"
"""Beside what a run has logged: what made it."""
UNFINISHED = ".unfinished-"


class Outcome(NamedTuple):
    """What one run came to.

    Attributes:
        metric: the metric of the last validation.
        density: average density, in 0…1; 1 for a dense run.
        payload_bytes: bytes that a worker sent in all steps together.
        dense_bytes: what they are without sparsification.
        step_time: median seconds of a step.
    """

    metric: float
    density: float
    payload_bytes: float
    dense_bytes: float
    step_time: float


class Choice(NamedTuple):
    """What was chosen for a variant: of the grid's argument, and for ``{tuned}``; None where there is none."""

    of_grid: str | None
    tuned: str | None


@dataclass(frozen=True)
class Runs:
    """Where runs are and how they are made.

    Args:
        config: the recipe.
        output: the folder of all.
        metric: as it is logged.
        common: arguments of all runs.
        grid: of an argument, if there is one.
    """

    config: Path
    output: Path
    metric: str
    common: Sequence[str]
    grid: Grid | None

    def folder(self, variant: Variant, choice: Choice, seed: int) -> Path:
        """Where a run is, or will be."""
        folder = self.output / self.config.parent.name / folder_name(variant.label)
        parts = [choice.of_grid or "", "" if choice.tuned is None else f"tuned_{choice.tuned}", str(seed)]
        return folder.joinpath(*filter(None, parts))

    def command(self, variant: Variant, choice: Choice, seed: int, folder: Path) -> list[str]:
        """What makes a run."""
        fit = [sys.executable, "-m", "recipes", "fit"]
        config, *rest = self._arguments(variant, choice, seed)
        return [*fit, config, f"--trainer.logger.save_dir={folder}", *rest]

    def command_again(self, variant: Variant, choice: Choice, seed: int) -> str:
        """What makes the same run for whoever types it, elsewhere than where the comparison keeps its own."""
        threads, fit = f"OMP_NUM_THREADS={_environment()['OMP_NUM_THREADS']}", ["python", "-m", "recipes", "fit"]
        return shlex.join([threads, *fit, *self._arguments(variant, choice, seed)])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other comparison makes runs in the same folder; ends with a message where one does."""
        self.output.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.output / ".lock", timeout=0):
                yield
        except Timeout:
            sys.exit(f"Another comparison is running in {self.output}. Wait for it, or give another --output.")

    def _arguments(self, variant: Variant, choice: Choice, seed: int) -> list[str]:
        own = variant.with_tuned(choice.tuned)
        if self.grid is not None and choice.of_grid is not None:
            own.append(f"--{self.grid.argument}={choice.of_grid}")
        return [f"--config={self.config}", f"--seed_everything={seed}", *self.common, *own]

    def outcome(self, variant: Variant, choice: Choice, seed: int) -> Outcome:
        """Returns what a run came to, which is made unless it is there; one that fails ends all and leaves nothing."""
        folder = self.folder(variant, choice, seed)
        if not folder.exists():
            for left in folder.parent.glob(f"{folder.name}{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            # A name of its own: a training whose comparison was killed may still write into that of before.
            unfinished = folder.with_name(f"{folder.name}{UNFINISHED}{uuid4().hex[:8]}")
            command = self.command(variant, choice, seed, unfinished)
            exit_code, said = _run(command)
            if exit_code:
                sys.exit(f"{shlex.join(command)} failed:\n{said}")
            (unfinished / ARGUMENTS).write_text(shlex.join(self._arguments(variant, choice, seed)), encoding="utf-8")
            shutil.copyfile(self.config, unfinished / RECIPE)
            unfinished.rename(folder)
        told = folder / ARGUMENTS
        if told.exists() and told.read_text(encoding="utf-8") != shlex.join(self._arguments(variant, choice, seed)):
            sys.exit(f"{folder} holds a run of other arguments: see {ARGUMENTS} there. Use another label or --output.")
        if (kept := folder / RECIPE).exists() and _content(kept) != _content(self.config):
            sys.exit(f"{folder} holds a run of another {self.config.name}: see {RECIPE} there. Use another --output.")
        return outcome_of(folder, self.metric)

    def kept(self, variant: Variant) -> list[Path]:
        """Runs of a variant that are there."""
        whole = self.output / self.config.parent.name / folder_name(variant.label)
        return [folder.parent for folder in whole.rglob("version_*") if UNFINISHED not in str(folder)]

    def tuned(self, variant: Variant, of_grid: str | None, outcome: Callable[[Variant, Choice], Outcome]) -> Choice:
        """Returns what a variant takes for ``{tuned}``, so that its average density is the one that was asked for.

        Args:
            variant: what is tuned.
            of_grid: with this value of the grid's argument.
            outcome: what a whole run comes to, which is kept.
        """
        if variant.start is None or variant.density is None:
            return Choice(of_grid, None)
        tried: list[tuple[float, float]] = []
        at = math.log(variant.start)
        for _ in range(MOST_TRIALS):
            choice = Choice(of_grid, f"{math.exp(at):.4g}")
            density = outcome(variant, choice).density
            if abs(density / variant.density - 1) <= CLOSE:
                return choice
            off = math.log(variant.density / max(density, 1e-9))
            tried.append((at, off))
            if len({off for _, off in tried}) == 1 and len(tried) == FLAT_TRIALS:
                break  # it does not depend on it
            at += off / next_slope(tried)
        told = ", ".join(f"{math.exp(value):.4g}: {variant.density / math.exp(off):.3g}" for value, off in tried)
        sys.exit(f"{variant.label}: no value came within {CLOSE:.0%} of {variant.density:g} ({told}).")


def folder_name(label: str) -> str:
    """Returns where the runs of a variant are kept: its words."""
    return re.sub(r"[^\w.]+", "_", label).lstrip(".") or "_"


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Returns a training's exit code and what it said. All its processes end with this one, if it can see its end."""
    caught = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=_environment(), start_new_session=True, **caught) as training:  # type: ignore[call-overload]
        try:
            said, _ = training.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(training.pid, signal.SIGKILL)
            raise
    return training.returncode, said


def _environment() -> dict[str, str]:
    # One thread each: workers on one machine would otherwise get in each other's way.
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _content(path: Path) -> object:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def next_slope(tried: Sequence[tuple[float, float]]) -> float:
    """Returns by how much log density goes with the logarithm of what is tuned, from the last two that were tried.

    Args:
        tried: logarithms of values, and of the density asked for over what they came to. Of a hard threshold density
            goes about with 1 / λ².
    """
    if len(tried) < 2:
        return -2.0
    (first, first_off), (second, second_off) = tried[-2:]
    slope = (first_off - second_off) / (second - first) or -0.0  # so little is sent, or so much, that it stays the same
    return math.copysign(min(max(abs(slope), 0.25), 8.0), slope)


def outcome_of(folder: Path, metric: str) -> Outcome:
    """Returns what a finished run logged."""
    values = read(folder).values
    if metric not in values:
        sys.exit(f"{folder} has logged no {metric!r}. There are {', '.join(sorted(values))}.")
    num_steps = len(values["train/local_loss"])
    dense_bytes = num_steps * values["gradient_bytes"][0]
    return Outcome(
        metric=values[metric][-1],
        density=sum(values.get("sparse/density", [1.0] * num_steps)) / num_steps,  # also of steps without exchange
        payload_bytes=sum(values.get("sparse/payload_bytes", [dense_bytes])),
        dense_bytes=dense_bytes,
        step_time=median(values["step_time"]),
    )
