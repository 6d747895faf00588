"""Prints the table of ``README.md`` and draws its picture: ``python -m recipes.cifar10_94.table --picture volume.png``.

Both summarise ``runs.csv``, one row per training.
"""

import argparse
import csv
import re
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev, variance

from recipes.compare.pictures import draw_volume
from recipes.compare.runs import Outcome
from recipes.compare.variants import Variant

VOLUMES = re.compile(r", ([\d.]+( and [\d.]+)? %|rank \d)")
"""The part of a variant's label that determines its bytes."""
MIN_SEEDS = 3
"""The smallest number of seeds of a variant in the picture, and of a row with standard errors."""
HEAD = ("method", "learning rate", "seeds", "test accuracy, last epoch", "loss", "from dense", "times fewer bytes")
Run = dict[str, str]


def main() -> None:
    """Print the table, and write the picture if asked for."""
    parser = argparse.ArgumentParser(prog="python -m recipes.cifar10_94.table", description=__doc__)
    parser.add_argument("--picture", type=Path, help="the picture to write, for example volume.png")
    arguments = parser.parse_args()
    groups = read_runs()
    print("\n".join(make_table(groups)))
    if arguments.picture is not None:
        outcomes = {
            Variant(label, VOLUMES.sub("", label), ()): [_outcome(run) for run in runs]
            for label, runs in best_rates(groups).items()
            if len(runs) >= MIN_SEEDS
        }
        draw_volume(outcomes, "loss").savefig(arguments.picture, dpi=120)


def read_runs() -> dict[tuple[str, str], list[Run]]:
    """Return the runs of each variant and learning rate, in the order of the file."""
    groups: dict[tuple[str, str], list[Run]] = {}
    with Path(__file__).with_name("runs.csv").open(encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            groups.setdefault((run["variant"], run["learning_rate"]), []).append(run)
    return groups


def best_rates(groups: dict[tuple[str, str], list[Run]]) -> dict[str, list[Run]]:
    """Return each variant's runs at its best learning rate: the one with most seeds, then with the smallest loss."""
    best: dict[str, list[Run]] = {}
    for (variant, _), runs in sorted(groups.items(), key=lambda group: (-len(group[1]), fmean(_losses(group[1])))):
        best.setdefault(variant, runs)
    return {variant: best[variant] for variant, _ in groups}


def make_table(groups: dict[tuple[str, str], list[Run]]) -> list[str]:
    """Return the lines of a Markdown table with a row per variant and learning rate.

    "From dense" is the difference of accuracy and of loss from dense training in standard errors.
    """
    dense = groups["dense", "0.3"]
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for (variant, rate), runs in groups.items():
        accuracies = _accuracies(runs)
        distances = ""
        if len(runs) >= MIN_SEEDS and runs is not dense:
            pairs = ((accuracies, _accuracies(dense)), (_losses(runs), _losses(dense)))
            distances = ", ".join(f"{_standard_errors(*pair):.1f}".replace("-", "−") for pair in pairs)
        fewer = fmean([float(run["dense_bytes"]) / float(run["payload_bytes"]) for run in runs])
        cells = (variant, rate, str(len(runs)), f"{_mean(accuracies, 2)} %", _mean(_losses(runs), 3), distances)
        lines.append(f"| {' | '.join(cells)} | {fewer:.0f} |")
    return lines


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [100 * float(run["accuracy_epoch_12"]) for run in runs]


def _losses(runs: Sequence[Run]) -> list[float]:
    return [float(run["loss"]) for run in runs]


def _mean(values: Sequence[float], digits: int) -> str:
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def _standard_errors(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the difference of two means in standard errors."""
    return (fmean(values) - fmean(others)) / sqrt(sum(variance(part) / len(part) for part in (values, others)))


def _outcome(run: Run) -> Outcome:
    numbers = (float(run[name]) for name in ("loss", "density", "payload_bytes", "dense_bytes", "median_step_seconds"))
    return Outcome(*numbers)


if __name__ == "__main__":
    main()
