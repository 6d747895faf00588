r"""Runs one recipe with several strategies and seeds and prints a table: ``python -m recipes.compare <recipe>.yaml …``.

A variant is a label and the arguments that make it, which replace or add to those of the YAML::

    python -m recipes.compare recipes/resnet18_cifar10/laptop.yaml --metric val/accuracy \
        --variant "dense: --trainer.strategy=ddp" \
        --variant "hard threshold: --trainer.strategy.threshold=0.01" -- --data.root=data

Many of them are better kept in a YAML file, ``label: arguments``, and given as ``--variants``. With a grid, every
variant runs with all of its values for the first ``--grid-seeds`` seeds, and with that which came out best, on average
over them, for the others::

    python -m recipes.compare recipes/gpt_wikitext/laptop.yaml --metric val/loss --mode min \
        --variants recipes/gpt_wikitext/comparison.yaml --grid model.learning_rate=0.001,0.003,0.01

Runs are finished one by one and kept in ``--output``: a run that is there already is not repeated, so that a comparison
that was stopped goes on where it was. The recipe must log every step (``log_every_n_steps: 1``).
"""

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import yaml

from recipes.demo import REPOSITORY, read


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


class Grid(NamedTuple):
    """Values of an argument, of which each variant takes the best.

    Attributes:
        argument: its name on the command line, without dashes.
        values: as they are written there.
        mode: ``"min"`` or ``"max"``: what is best of a metric. NaN never is.
    """

    argument: str
    values: list[str]
    mode: str

    def best(self, metrics: dict[str, float]) -> str:
        """Returns the value with the best metric."""
        sign = 1 if self.mode == "min" else -1
        return min(metrics, key=lambda value: math.inf if math.isnan(metrics[value]) else sign * metrics[value])


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--metric", required=True, help="as it is logged, for example val/accuracy")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: ARGUMENTS'", dest="given_variants")
    parser.add_argument("--variants", type=Path, metavar="FILE", help="YAML with label: arguments")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="of the variants")
    parser.add_argument("--grid", metavar="NAME=VALUE,VALUE", help="every variant takes what is best for it")
    parser.add_argument("--grid-seeds", type=int, default=1, help="the grid is tried with so many of the seeds")
    parser.add_argument("--mode", choices=["min", "max"], default="max", help="what is best of the metric")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "comparison")
    parser.epilog = "Arguments of all runs follow after --"
    given = [*sys.argv[1:], "--"]
    own_end = given.index("--")
    arguments, common = parser.parse_args(given[:own_end]), given[own_end + 1 : -1]
    variants = dict(map(labelled, arguments.given_variants))
    if arguments.variants is not None:
        listed = yaml.safe_load(arguments.variants.read_text(encoding="utf-8"))
        variants |= {label: shlex.split(own) for label, own in listed.items()}
    if unknown := set(arguments.only or ()) - variants.keys():
        parser.error(f"Unknown variants {sorted(unknown)}. There are {', '.join(variants)}.")
    variants = {label: own for label, own in variants.items() if arguments.only is None or label in arguments.only}
    if not 1 <= arguments.grid_seeds <= len(arguments.seeds):
        parser.error(f"Invalid --grid-seeds {arguments.grid_seeds}. Must be 1 to the number of seeds.")
    if not variants:
        parser.error("There is nothing to compare: give a --variant or a file of --variants.")
    grid = None if arguments.grid is None else parsed_grid(arguments.grid, arguments.mode)

    def outcome_of(label: str, seed: int, value: str | None) -> Outcome:
        folder = arguments.output / arguments.config.parent.name / re.sub(r"[^\w.]+", "_", label)
        own = variants[label]
        if grid is not None and value is not None:
            folder, own = folder / value, [*own, f"--{grid.argument}={value}"]
        run(arguments.config, folder / str(seed), [f"--seed_everything={seed}", *common, *own])
        return outcome(folder / str(seed), arguments.metric)

    tried: dict[str, dict[str, float]] = {}
    chosen: dict[str, str | None] = dict.fromkeys(variants)
    grid_seeds = arguments.seeds[: arguments.grid_seeds]
    if grid is not None:
        for label in variants:
            tried[label] = {
                value: fmean([outcome_of(label, seed, value).metric for seed in grid_seeds]) for value in grid.values
            }
            chosen[label] = grid.best(tried[label])
    outcomes: dict[str, list[Outcome]] = {label: [] for label in variants}
    # Seed by seed, so that what else the machine does falls on all variants alike.
    for seed in arguments.seeds:
        for label, value in chosen.items():
            outcomes[label].append(outcome_of(label, seed, value))
    print(table(outcomes, arguments.metric))
    if grid is not None:
        print(f"\n{grid_table(grid, tried, arguments.metric, grid_seeds)}")


def parsed_grid(text: str, mode: str) -> Grid:
    """Returns the grid of ``NAME=VALUE,VALUE``."""
    argument, _, values = text.removeprefix("--").partition("=")
    return Grid(argument, values.split(","), mode)


def grid_table(grid: Grid, tried: dict[str, dict[str, float]], metric: str, seeds: list[int]) -> str:
    """Returns a Markdown table of what each value of the grid came to, the best in bold."""
    of_seeds = f"{'seed' if len(seeds) == 1 else 'mean of seeds'} {', '.join(map(str, seeds))}"
    lines = [
        f"| {metric} by {grid.argument}, {of_seeds} | {' | '.join(grid.values)} |",
        "|---" * (len(grid.values) + 1) + "|",
    ]
    for label, metrics in tried.items():
        best = grid.best(metrics)
        cells = [f"**{one:.4f}**" if value == best else f"{one:.4f}" for value, one in metrics.items()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def labelled(text: str) -> tuple[str, list[str]]:
    """Returns label and arguments of ``LABEL: ARGUMENTS``."""
    label, _, own = text.partition(": ")
    return label, shlex.split(own)


def run(config: Path, folder: Path, arguments: list[str]) -> None:
    """Runs the recipe in a process of its own, unless its folder is there; a run that fails leaves none."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "recipes", "fit", f"--config={config}", f"--trainer.logger.save_dir={unfinished}"]
    print(f"{folder.parent.name}, seed {folder.name}", file=sys.stderr, flush=True)
    # One thread each: workers on one machine would otherwise get in each other's way.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [*command, *arguments],
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{shlex.join([*command, *arguments])} failed:\n{done.stdout}")
    unfinished.rename(folder)


def outcome(folder: Path, metric: str) -> Outcome:
    """Returns what a finished run logged."""
    values = read(folder).values
    num_steps = len(values["train/local_loss"])
    dense_bytes = num_steps * values["gradient_bytes"][0]
    return Outcome(
        metric=values[metric][-1],
        density=sum(values.get("sparse/density", [1.0] * num_steps)) / num_steps,  # also of steps without exchange
        payload_bytes=sum(values.get("sparse/payload_bytes", [dense_bytes])),
        dense_bytes=dense_bytes,
        step_time=median(values["step_time"]),
    )


def table(outcomes: dict[str, list[Outcome]], metric: str) -> str:
    """Returns a Markdown table: mean and standard deviation over the seeds."""

    def spread(values: list[float], digits: int) -> str:
        if fmean(values) >= 10:  # a perplexity or a percentage, not a share
            digits = 1
        deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{deviation}"

    lines = [
        f"| | {metric} | average density | MB sent per worker | times fewer | median step |",
        "|---|---|---|---|---|---|",
    ]
    for label, runs in outcomes.items():
        sent = fmean([one.payload_bytes for one in runs])
        lines.append(
            f"| {label} | {spread([one.metric for one in runs], 4)} "
            f"| {spread([100 * one.density for one in runs], 2)} % "
            f"| {sent / 1e6:,.1f} "
            f"| {fmean([one.dense_bytes for one in runs]) / sent:.1f} "
            f"| {1000 * fmean([one.step_time for one in runs]):.0f} ms |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
