"""Runs each training of a comparison once, in its own folder, and reads its outcome."""

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
from recipes.logs import read

DENSITY_TOLERANCE = 0.1
"""Largest relative deviation of the average density from its target."""
MAX_TRIALS, MAX_FLAT_TRIALS = 8, 3
ARGUMENTS, RECIPE = "arguments.txt", "recipe.yaml"
"""Files beside the logs of a run that record its arguments and its recipe."""
UNFINISHED = ".unfinished-"


class Outcome(NamedTuple):
    """The results of one run.

    Attributes:
        metric: the metric of the last validation.
        density: average density, in 0…1; 1 for a dense run.
        payload_bytes: bytes that a worker sends in all steps together.
        dense_bytes: bytes that a worker would send without sparsification.
        step_time: median seconds per step.
    """

    metric: float
    density: float
    payload_bytes: float
    dense_bytes: float
    step_time: float


class Choice(NamedTuple):
    """The grid value and the value of ``{tuned}`` for a variant; None for a variant without them."""

    grid_value: str | None
    tuned: str | None


@dataclass(frozen=True)
class Runs:
    """Makes the runs of a comparison and keeps them in an output folder.

    Args:
        config: the recipe.
        output: the folder of all runs.
        metric: the name of the logged metric.
        common: arguments of all runs.
        grid: values of an argument to choose from; None without a grid.
    """

    config: Path
    output: Path
    metric: str
    common: Sequence[str]
    grid: Grid | None

    def folder(self, variant: Variant, choice: Choice, seed: int) -> Path:
        """Return the folder of a run, which may not exist yet."""
        folder = self.output / self.config.parent.name / make_folder_name(variant.label)
        tuned = None if choice.tuned is None else f"tuned_{choice.tuned}"
        return folder.joinpath(*(make_folder_name(part) for part in (choice.grid_value, tuned, f"seed_{seed}") if part))

    def command(self, variant: Variant, choice: Choice, seed: int, folder: Path) -> list[str]:
        """Return the command that makes a run in ``folder``, which holds a copy of the recipe."""
        fit = [sys.executable, "-m", "recipes", "fit", f"--config={folder / RECIPE}"]
        _, *rest = self._arguments(variant, choice, seed)
        return [*fit, f"--trainer.logger.save_dir={folder}", "--trainer.log_every_n_steps=1", *rest]

    def command_to_repeat(self, variant: Variant, choice: Choice, seed: int) -> str:
        """Return a shell command that repeats a run outside the comparison's folder."""
        threads, fit = f"OMP_NUM_THREADS={_environment()['OMP_NUM_THREADS']}", ["python", "-m", "recipes", "fit"]
        return shlex.join([threads, *fit, *self._arguments(variant, choice, seed)])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output folder; exit with a message if another comparison holds the lock."""
        self.output.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.output / ".lock", timeout=0):
                yield
        except Timeout:
            sys.exit(f"Another comparison is running in {self.output}. Wait for it to end, or give another --output.")

    def _arguments(self, variant: Variant, choice: Choice, seed: int) -> list[str]:
        own = variant.with_tuned(choice.tuned)
        if self.grid is not None and choice.grid_value is not None:
            own.append(f"--{self.grid.argument}={choice.grid_value}")
        return [f"--config={self.config}", f"--seed_everything={seed}", *self.common, *own]

    def run(self, variant: Variant, choice: Choice, seed: int) -> Outcome:
        """Return the outcome of a run, and train first if it is missing; exit if the training fails."""
        folder = self.folder(variant, choice, seed)
        if not folder.exists():
            for left in folder.parent.glob(f"{folder.name}{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            # A unique name, because a training whose comparison was killed may still write to an old folder.
            unfinished = folder.with_name(f"{folder.name}{UNFINISHED}{uuid4().hex[:8]}")
            unfinished.mkdir(parents=True)
            # The training reads a copy, so later edits of the recipe do not reach it.
            shutil.copyfile(self.config, unfinished / RECIPE)
            command = self.command(variant, choice, seed, unfinished)
            exit_code, output_text = _run(command)
            if exit_code:
                shutil.rmtree(unfinished, ignore_errors=True)
                sys.exit(f"{self.command_to_repeat(variant, choice, seed)} failed:\n{output_text}")
            (unfinished / ARGUMENTS).write_text(shlex.join(self._arguments(variant, choice, seed)), encoding="utf-8")
            unfinished.rename(folder)
        saved = (folder / ARGUMENTS).read_text(encoding="utf-8")
        if saved != shlex.join(self._arguments(variant, choice, seed)):
            sys.exit(f"{folder} holds a run with other arguments (see its {ARGUMENTS}). Use another label or --output.")
        if _content(folder / RECIPE) != _content(self.config):
            sys.exit(f"{folder} holds a run of another {self.config.name} (see its {RECIPE}). Use another --output.")
        return read_outcome(folder, self.metric)

    def count_finished(self, variant: Variant, seeds: Sequence[int]) -> int:
        """Return the number of a variant's finished runs with these seeds."""
        folder = self.output / self.config.parent.name / make_folder_name(variant.label)
        names = {f"seed_{seed}" for seed in seeds}
        return sum(run.name in names for run in folder.rglob("seed_*"))

    def tune(self, variant: Variant, grid_value: str | None, run: Callable[[Variant, Choice], Outcome]) -> Choice:
        """Return the value of ``{tuned}`` at which a variant's average density reaches its target.

        Args:
            variant: the variant to tune.
            grid_value: the value of the grid's argument in all trials.
            run: makes or reads a complete run and returns its outcome.
        """
        if variant.start is None or variant.density is None:
            return Choice(grid_value, None)
        trials: list[tuple[float, float]] = []
        log_value = math.log(variant.start)
        for _ in range(MAX_TRIALS):
            choice = Choice(grid_value, f"{math.exp(log_value):.4g}")
            density = run(variant, choice).density
            if abs(density / variant.density - 1) <= DENSITY_TOLERANCE:
                return choice
            log_error = math.log(variant.density / max(density, 1e-9))
            trials.append((log_value, log_error))
            if len({log_error for _, log_error in trials}) == 1 and len(trials) == MAX_FLAT_TRIALS:
                break  # the density does not depend on the value
            log_value += log_error / estimate_slope(trials)
        listed = ", ".join(f"{math.exp(value):.4g}: {variant.density / math.exp(error):.3g}" for value, error in trials)
        sys.exit(f"{variant.label}: no value reaches {variant.density:g} within {DENSITY_TOLERANCE:.0%} ({listed}).")


def make_folder_name(label: str) -> str:
    """Return the folder name for a variant's runs, made of the words of its label."""
    return re.sub(r"[^\w.]+", "_", label).lstrip(".") or "_"


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return a training's exit code and output; kill all its processes if this process is interrupted."""
    caught = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=_environment(), start_new_session=True, **caught) as training:
        try:
            output_text, _ = training.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(training.pid, signal.SIGKILL)
            raise
    return training.returncode, output_text


def _environment() -> dict[str, str]:
    # One thread per worker; thread pools of all cores would compete on one machine.
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _content(path: Path) -> object:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def estimate_slope(trials: Sequence[tuple[float, float]]) -> float:
    """Return the slope of log density over the log of the tuned value, from the last two trials.

    Args:
        trials: logarithms of the value, and of the target density over the measured density. The density of a hard
            threshold is about proportional to 1 / λ².
    """
    if len(trials) < 2:
        return -2.0
    (first, first_off), (second, second_off) = trials[-2:]
    slope = (first_off - second_off) / (second - first) or -0.0  # gives -0.25: both trials send nothing or all
    return math.copysign(min(max(abs(slope), 0.25), 8.0), slope)


def read_outcome(folder: Path, metric: str) -> Outcome:
    """Return the outcome that a finished run logged."""
    values = read(folder).values
    if metric not in values:
        sys.exit(f"{folder} holds no metric {metric!r}. Use one of: {', '.join(sorted(values))}.")
    num_steps = len(values["train/local_loss"])
    dense_bytes = num_steps * values["gradient_bytes"][0]
    compressed = values.get("compressed_bytes")  # by other means, such as recipes.power_sgd
    of_exchange = sum(values.get("sparse/density", [1.0] * num_steps)) / num_steps  # also of steps without exchange
    return Outcome(
        metric=values[metric][-1],
        density=sum(compressed) / dense_bytes if compressed else of_exchange,
        payload_bytes=sum(compressed or values.get("sparse/payload_bytes", [dense_bytes])),
        dense_bytes=dense_bytes,
        step_time=median(values["step_time"]),
    )
