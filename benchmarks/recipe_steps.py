r"""What does a step of a recipe take over a slow link, for each variant of a comparison?

    python -m benchmarks.recipe_steps recipes/gpt_wikitext/laptop.yaml \
        --variants recipes/gpt_wikitext/comparison.yaml \
        [--rate 200mbit] [--rounds 3] [--only dense "drift, 1 %"] [-- --data.root=data]

The recipe itself, begun anew for each turn, with one worker on each of two hosts of the network lab (root and Linux),
one core and one thread each. Variants take turns, so that what else the machine does falls on all alike. Added to them
is the floor: local training that never exchanges anything.

A time is the mean over 30 steps in a row on the first worker, with loading, logging and all exchanges that fall into
them; the first 30 steps of a turn, with what is compiled, laid out and calibrated, do not count. The table shows
medians over all turns. Density is what was sent in the steps timed, a step: with few steps of a warm-up it need not be
that of the whole training.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks import report
from benchmarks.network_lab import NetworkLab
from recipes.compare.variants import Variant, expand_variants
from recipes.demo import Run, read

BLOCK, BLOCKS = 30, 2
"""Steps of one time, so that exchanges of every thirtieth step count, one in each; and times in a turn."""
FLOOR = Variant(
    "no exchange",
    "no exchange",
    (
        "--trainer.strategy=lightning_sparse.LocalHardThresholdStrategy",
        "--trainer.strategy.threshold=0",
        "--trainer.strategy.every_n_steps=1000000",
    ),
)


def turn(lab: NetworkLab, variant: Variant, options: argparse.Namespace, common: list[str]) -> Run:
    """Trains for so many steps and returns what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes", "fit", f"--config={options.config}"]
        command += [f"--trainer.logger.save_dir={folder}", *common, *variant.arguments]
        command += ["--trainer.devices=1", f"--trainer.num_nodes={lab.hosts}", "--trainer.limit_val_batches=0"]
        command += [f"--trainer.max_steps={BLOCK * (BLOCKS + 1) + 5}"]
        lab.run(command, timeout=600)
        return read(Path(folder))


def timed(run: Run) -> tuple[list[float], list[float]]:
    """Returns seconds a step, a mean for each block, and the density of those steps, if one was logged."""
    end = BLOCK * (BLOCKS + 1)
    seconds = run.values["step_time"][BLOCK:end]
    means = [fmean(seconds[first : first + BLOCK]) for first in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    if "sparse/density" not in run.values:
        return means, []
    exchanges = zip(run.steps["sparse/density"], run.values["sparse/density"], strict=True)
    return means, [sum(density for step, density in exchanges if BLOCK <= step < end) / (end - BLOCK)]


def main() -> None:
    """Measures, prints and writes."""
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    options, common = parse(given[:end]), given[end + 1 : -1]
    listed = yaml.safe_load(options.variants.read_text(encoding="utf-8"))
    variants = [FLOOR, *expand_variants(listed, [])]
    if options.only is not None:
        variants = [FLOOR, *(variant for variant in variants[1:] if variant.label in options.only)]
    seconds: dict[str, list[float]] = {variant.label: [] for variant in variants}
    densities: dict[str, list[float]] = {variant.label: [] for variant in variants}
    with NetworkLab(hosts=2) as lab:
        lab.shape(options.rate)
        for number in range(options.rounds):
            for variant in variants:
                means, of_steps = timed(turn(lab, variant, options, common))
                seconds[variant.label] += means
                densities[variant.label] += of_steps
                print(f"{number + 1} of {options.rounds}  {variant.label}: {1e3 * fmean(means):.1f} ms", flush=True)
    floor = report.quartiles(seconds[FLOOR.label])["median"]
    found: dict[str, dict[str, Any]] = {
        label: {"seconds": report.quartiles(some), "ratio": report.quartiles(some)["median"] / floor}
        | ({"density": fmean(densities[label])} if densities[label] else {})
        for label, some in seconds.items()
    }
    rows = []
    for label, result in found.items():
        low, high = result["seconds"]["quartiles"]
        share = f"{result['density']:.3%}" if "density" in result else ""
        cells = [label, f"{1e3 * result['seconds']['median']:.1f}", f"{1e3 * low:.1f} - {1e3 * high:.1f}"]
        rows.append([*cells, f"{result['ratio']:.2f}", share])
    print(f"\n{options.config}, 2 hosts, {options.rate}")
    print(report.table(["", "ms", "quartiles", "x no exchange", "density"], rows))
    options.config, options.variants = str(options.config), str(options.variants)
    report.write(options, found)


def parse(given: list[str]) -> argparse.Namespace:
    """Reads the command line, up to what is for the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--variants", type=Path, required=True, help="YAML with label: arguments")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="of the variants")
    parser.add_argument("--rate", default="200mbit", help="of each direction of a link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    options = parser.parse_args(given)
    if reason := NetworkLab.unavailable_reason():
        parser.error(reason)
    if options.output is None:
        options.output = report.RESULTS / f"recipe_steps_{options.config.parent.name}.json"
    return options


if __name__ == "__main__":
    main()
