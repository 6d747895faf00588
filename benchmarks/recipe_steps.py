r"""Measures the step time of a recipe over a slow link for each variant of a comparison.

    python -m benchmarks.recipe_steps recipes/gpt_wikitext/laptop.yaml \
        --variants recipes/gpt_wikitext/comparison.yaml \
        [--rate 200mbit] [--rounds 3] [--only dense "drift, 1 %"] [-- --data.root=data]

Starts the recipe anew for each turn, with a worker on each of two hosts of the network lab (root and Linux), and one
core and thread per worker. Variants take turns, so that other load on the machine affects all variants equally. The
floor is local training without any exchange.

A time is the mean over 30 consecutive steps on rank 0, including loading, logging and all exchanges. The first 30 steps
of a turn do not count, because they compile, lay out buckets and calibrate. The table shows medians over all turns.
Density is the share sent per timed step. After so short a warmup it may differ from the density of the whole training.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import report
from benchmarks.network_lab.lab import NetworkLab
from recipes.compare.options import read_variants_file
from recipes.compare.variants import TUNED, Variant, expand_variants
from recipes.logs import Run, read

BLOCK, BLOCKS = 30, 2
"""Steps per timing, enough for one exchange every 30 steps; timings per turn."""
FLOOR = Variant(
    "no exchange",
    "no exchange",
    (
        "--trainer.strategy=lightning_sparse.LocalHardThresholdStrategy",
        "--trainer.strategy.threshold=0",
        "--trainer.strategy.every_n_steps=1000000",
    ),
)


def train_turn(lab: NetworkLab, variant: Variant, options: argparse.Namespace, common: list[str]) -> Run:
    """Train for a turn and return the logged scalars."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes", "fit", f"--config={options.config}"]
        command += [f"--trainer.logger.save_dir={folder}", *common, *variant.arguments]
        command += ["--trainer.devices=1", f"--trainer.num_nodes={lab.hosts}", "--trainer.limit_val_batches=0"]
        command += [f"--trainer.max_steps={BLOCK * (BLOCKS + 1) + 5}"]
        lab.run(command, timeout=600)
        return read(Path(folder))


def read_times(run: Run) -> tuple[list[float], list[float]]:
    """Return the mean seconds per step of each block, and the density if the run logged it."""
    end = BLOCK * (BLOCKS + 1)
    seconds = run.values["step_time"][BLOCK:end]
    means = [fmean(seconds[first : first + BLOCK]) for first in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    if "sparse/density" not in run.values:
        return means, []
    exchanges = zip(run.steps["sparse/density"], run.values["sparse/density"], strict=True)
    return means, [sum(density for step, density in exchanges if BLOCK <= step < end) / (end - BLOCK)]


def main() -> None:
    """Measure, print and write."""
    command_line = [*sys.argv[1:], "--"]
    end = command_line.index("--")
    options, common = parse(command_line[:end]), command_line[end + 1 : -1]
    listed, defaults = read_variants_file(options.variants)
    try:
        variants = [FLOOR, *expand_variants(listed, defaults.get("densities", []))]
    except ValueError as error:
        sys.exit(str(error))
    if options.only is not None:
        if unknown := set(options.only) - {variant.label for variant in variants}:
            sys.exit(f"Unknown variants {sorted(unknown)}. Use labels of {options.variants}.")
        variants = [FLOOR, *(variant for variant in variants[1:] if variant.label in options.only)]
    if tuned := [variant.label for variant in variants if variant.start is not None]:
        sys.exit(f"Variants {tuned} use {TUNED}, which only recipes.compare tunes. Select other variants with --only.")
    seconds: dict[str, list[float]] = {variant.label: [] for variant in variants}
    densities: dict[str, list[float]] = {variant.label: [] for variant in variants}
    with NetworkLab(hosts=2) as lab:
        lab.shape(options.rate)
        for number in range(options.rounds):
            for variant in variants:
                means, step_densities = read_times(train_turn(lab, variant, options, common))
                seconds[variant.label] += means
                densities[variant.label] += step_densities
                print(f"{number + 1} of {options.rounds}  {variant.label}: {1e3 * fmean(means):.1f} ms", flush=True)
    floor = report.quartiles(seconds[FLOOR.label])["median"]
    results: dict[str, dict[str, Any]] = {
        label: {"seconds": report.quartiles(samples), "ratio": report.quartiles(samples)["median"] / floor}
        | ({"density": fmean(densities[label])} if densities[label] else {})
        for label, samples in seconds.items()
    }
    rows = []
    for label, result in results.items():
        low, high = result["seconds"]["quartiles"]
        share = f"{result['density']:.3%}" if "density" in result else ""
        cells = [label, f"{1e3 * result['seconds']['median']:.1f}", f"{1e3 * low:.1f} - {1e3 * high:.1f}"]
        rows.append([*cells, f"{result['ratio']:.2f}", share])
    print(f"\n{options.config}, 2 hosts, {options.rate}")
    print(report.table(["", "ms", "quartiles", "x no exchange", "density"], rows))
    options.config, options.variants = str(options.config), str(options.variants)
    report.write(options, results)


def parse(command_line: list[str]) -> argparse.Namespace:
    """Return the options before ``--``; the arguments after it are for the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--variants", type=Path, required=True, help="YAML file with lines 'label: arguments'")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="run these variants only")
    parser.add_argument("--rate", default="200mbit", help="rate of each direction of a link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="default: a file in benchmarks/results")
    options = parser.parse_args(command_line)
    if reason := NetworkLab.unavailable_reason():
        parser.error(reason)
    if options.output is None:
        options.output = report.RESULTS / f"recipe_steps_{options.config.parent.name}.json"
    return options


if __name__ == "__main__":
    main()
