r"""Runs one recipe with several strategies and seeds and prints a table: ``python -m recipes.compare <recipe>.yaml …``.

A variant is a label and the arguments that make it, which replace or add to those of the YAML::

    python -m recipes.compare recipes/resnet18_cifar10/laptop.yaml --metric val/accuracy \
        --variant "dense: --trainer.strategy=ddp" \
        --variant "hard threshold: --trainer.strategy.threshold=0.01" -- --data.root=data

Runs are finished one by one and kept in ``--output``: a run that is there already is not repeated, so that a comparison
that was stopped goes on where it was. The recipe must log every step (``log_every_n_steps: 1``).
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

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


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--metric", required=True, help="as it is logged, for example val/accuracy")
    parser.add_argument("--variant", action="append", required=True, metavar="'LABEL: ARGUMENTS'", dest="variants")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "comparison")
    parser.epilog = "Arguments of all runs follow after --"
    given = [*sys.argv[1:], "--"]
    own_end = given.index("--")
    arguments, common = parser.parse_args(given[:own_end]), given[own_end + 1 : -1]
    variants = dict(map(labelled, arguments.variants))
    outcomes: dict[str, list[Outcome]] = {label: [] for label in variants}
    # Seed by seed, so that what else the machine does falls on all variants alike.
    for seed in arguments.seeds:
        for label, own in variants.items():
            folder = arguments.output / arguments.config.parent.name / re.sub(r"[^\w.]+", "_", label) / str(seed)
            run(arguments.config, folder, [f"--seed_everything={seed}", *common, *own])
            outcomes[label].append(outcome(folder, arguments.metric))
    print(table(outcomes, arguments.metric))


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
