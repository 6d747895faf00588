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

``{density}`` in arguments stands for each of ``--densities``. Where the density follows from another number, such as a
constant λ, that one is ``{tuned}``, and the variant says where to begin: it runs with the first seed until the average
density is within 10 % of each of them. The file may hold all of it::

    metric: val/perplexity
    mode: min
    densities: [0.01, 0.001]
    variants:
      dense: --trainer.strategy.threshold=0
      threshold: {arguments: "--trainer.strategy.threshold={tuned}", tuned: 0.0012}
      Top-k: --trainer.strategy=ddp_topk --trainer.strategy.sparsifier.density={density}

Runs are finished one by one and kept in ``--output``: a run that is there already is not repeated, so that a comparison
that was stopped goes on where it was, and drawing again runs nothing. Beside the table come ``runs.csv``, a line a run
with its command, and two pictures: ``volume.png``, the metric against the bytes sent, and ``steps.png``, the metric,
error norm, total error and density by step. The recipe must log every step (``log_every_n_steps: 1``).
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from tqdm import tqdm

from recipes.compare.pictures import draw_steps, draw_volume, save
from recipes.compare.runs import Choice, Outcome, Runs
from recipes.compare.tables import grid_table, table, write_csv
from recipes.compare.variants import Variant, expanded, labelled, parsed_grid
from recipes.demo import REPOSITORY, read


def main() -> None:
    """Runs what is missing, prints the table, writes the CSV and the pictures."""
    parser, given = _parser(), [*sys.argv[1:], "--"]
    own_end = given.index("--")
    first, common = parser.parse_args(given[:own_end]), given[own_end + 1 : -1]
    listed, defaults = _read_file(first.variants)
    if unknown := defaults.keys() - vars(first).keys():
        parser.error(f"Unknown keys {sorted(unknown)} beside the variants of {first.variants}.")
    parser.set_defaults(**defaults)
    options = parser.parse_args(given[:own_end])
    if options.mode not in ("min", "max"):
        parser.error(f"Invalid mode {options.mode!r}. Must be min or max.")
    if not all(isinstance(some, list) for some in (options.seeds, options.densities)):
        parser.error("seeds and densities of a file must be lists: [1, 2, 3].")
    if options.metric is None:
        parser.error("Give a --metric, as it is logged: val/accuracy.")
    try:
        variants = expanded(dict(map(labelled, options.given_variants)) | listed, options.densities)
    except ValueError as error:
        parser.error(str(error))
    labels = {variant.label for variant in variants} | {variant.name for variant in variants}
    if unknown := set(options.only or ()) - labels:
        parser.error(f"Unknown variants {sorted(unknown)}. There are {', '.join(one.label for one in variants)}.")
    variants = [one for one in variants if options.only is None or {one.label, one.name} & set(options.only)]
    if not 1 <= options.grid_seeds <= len(options.seeds):
        parser.error(f"Invalid --grid-seeds {options.grid_seeds}. Must be 1 to the number of seeds.")
    if not variants:
        parser.error("There is nothing to compare: give a --variant or a file of --variants.")
    if options.against is not None and options.against not in {one.label for one in variants}:
        parser.error(f"Unknown --against {options.against!r}. There are {', '.join(one.label for one in variants)}.")
    grid = None if options.grid is None else parsed_grid(options.grid, options.mode)
    runs = Runs(options.config, options.output, options.metric, common, grid)
    _compare(runs, variants, options)


def _compare(runs: Runs, variants: list[Variant], options: argparse.Namespace) -> None:
    grid, grid_seeds = runs.grid, options.seeds[: options.grid_seeds]
    with _Progress(runs, variants, options.seeds, grid_seeds) as progress:
        choices: dict[Variant, Choice] = {}
        tried: dict[str, dict[str, float]] = {}
        for variant in variants:
            found = {
                value: runs.tuned(variant, value, lambda one, choice: progress.outcome(one, choice, grid_seeds[0]))
                for value in ([None] if grid is None else grid.values)
            }
            best = None
            if grid is not None:
                tried[variant.label] = {
                    value: fmean([progress.outcome(variant, found[value], seed).metric for seed in grid_seeds])
                    for value in grid.values
                }
                best = grid.best(tried[variant.label])
            choices[variant] = found[best]
        outcomes: dict[Variant, list[Outcome]] = {variant: [] for variant in variants}
        # Seed by seed, so that what else the machine does falls on all variants alike.
        for seed in options.seeds:
            for variant, choice in choices.items():
                outcomes[variant].append(progress.outcome(variant, choice, seed))
    print(table({variant.label: some for variant, some in outcomes.items()}, runs.metric, options.against))
    if grid is not None:
        print(f"\n{grid_table(grid, tried, runs.metric, grid_seeds)}")
    folder = runs.output / runs.config.parent.name
    write_csv(folder / "runs.csv", _rows(runs, choices, outcomes, options.seeds))
    save(draw_volume(outcomes, runs.metric), folder / "volume.png")
    kept = {
        variant.label: [read(runs.folder(variant, choice, seed)) for seed in options.seeds]
        for variant, choice in choices.items()
    }
    save(draw_steps(kept, runs.metric), folder / "steps.png")


def _rows(
    runs: Runs, choices: dict[Variant, Choice], outcomes: dict[Variant, list[Outcome]], seeds: list[int]
) -> Iterator[dict[str, object]]:
    for variant, choice in choices.items():
        for seed, one in zip(seeds, outcomes[variant], strict=True):
            folder = runs.folder(variant, choice, seed)
            yield {
                "variant": variant.name,
                "asked_density": variant.density,
                "grid": None if runs.grid is None else f"{runs.grid.argument}={choice.of_grid}",
                "tuned": choice.tuned,
                "seed": seed,
                runs.metric: one.metric,
                "density": one.density,
                "payload_bytes": one.payload_bytes,
                "dense_bytes": one.dense_bytes,
                "median_step_seconds": one.step_time,
                "command": shlex.join(["python", *runs.command(variant, choice, seed, folder)[1:]]),
            }


class _Progress:
    """A bar of the runs that are missing, with an estimate of the time left; none where nothing is missing."""

    def __init__(self, runs: Runs, variants: list[Variant], seeds: list[int], grid_seeds: list[int]) -> None:
        self._runs = runs
        values = 1 if runs.grid is None else len(runs.grid.values)
        planned = len(variants) * (values * len(grid_seeds) + len(seeds) - len(grid_seeds))
        there = sum(1 for variant in variants for _ in runs.kept(variant))
        self._bar = tqdm(total=max(planned - there, 0), unit="run", disable=planned <= there, leave=False)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def outcome(self, variant: Variant, choice: Choice, seed: int) -> Outcome:
        """Returns what a run came to, and says which it is if it is missing."""
        is_there = self._runs.folder(variant, choice, seed).exists()
        if not is_there:
            self._bar.set_description(f"{variant.label}, seed {seed}")
        outcome = self._runs.outcome(variant, choice, seed)
        if not is_there:
            if self._bar.n == self._bar.total:  # tuning took more runs than one
                self._bar.total += 1
            self._bar.update()
        return outcome


def _read_file(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns variants, and options that take the place of those of the command line which are not given."""
    if path is None:
        return {}, {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    if not isinstance(content, dict) or not all(isinstance(label, str) for label in content):
        sys.exit(f"{path} must hold label: arguments, or variants: with such lines in it.")
    if isinstance(content.get("variants"), dict):
        listed = content.pop("variants")
        return listed, content
    return content, {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--metric", help="as it is logged, for example val/accuracy")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: ARGUMENTS'", dest="given_variants")
    parser.add_argument("--variants", type=Path, metavar="FILE", help="YAML with label: arguments")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="of the variants")
    parser.add_argument("--densities", nargs="+", type=float, default=[], help="for {density} and {tuned}")
    parser.add_argument("--grid", metavar="NAME=VALUE,VALUE", help="every variant takes what is best for it")
    parser.add_argument("--grid-seeds", type=int, default=1, help="the grid is tried with so many of the seeds")
    parser.add_argument("--mode", choices=["min", "max"], default="max", help="what is best of the metric")
    parser.add_argument("--against", metavar="LABEL", help="tell differences from this one")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "comparison")
    parser.epilog = "Arguments of all runs follow after --"
    return parser


if __name__ == "__main__":
    main()
