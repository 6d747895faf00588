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
import signal
import sys
from collections.abc import Iterator
from statistics import fmean

from tqdm import tqdm

from recipes.compare.options import asked
from recipes.compare.pictures import draw_steps, draw_volume, save
from recipes.compare.runs import Choice, Outcome, Runs
from recipes.compare.tables import grid_table, table, write_csv
from recipes.compare.variants import Variant
from recipes.demo import read


def main() -> None:
    """Runs what is missing, prints the table, writes the CSV and the pictures."""
    options, variants, grid, common = asked(__doc__ or "", sys.argv[1:])
    runs = Runs(options.config, options.output, options.metric, common, grid)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a running training ends, too
    try:
        with runs.alone():
            _compare(runs, variants, options)
    except KeyboardInterrupt:
        sys.exit("\nStopped. Runs that are finished are kept: the same command goes on with the next.")


def _compare(runs: Runs, variants: list[Variant], options: argparse.Namespace) -> None:
    grid, grid_seeds = runs.grid, options.seeds[: options.grid_seeds]
    with _Progress(runs, variants, options.seeds, grid_seeds) as progress:
        choices: dict[Variant, Choice] = {}
        tried: dict[str, dict[str, float]] = {}
        for variant in variants:
            found = {
                value: runs.tuned(variant, value, lambda tuned, choice: progress.outcome(tuned, choice, grid_seeds[0]))
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
    print(table({variant.label: some for variant, some in outcomes.items()}, runs.metric))
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
        for seed, outcome in zip(seeds, outcomes[variant], strict=True):
            yield {
                "variant": variant.name,
                "asked_density": variant.density,
                "grid": None if runs.grid is None else f"{runs.grid.argument}={choice.of_grid}",
                "tuned": choice.tuned,
                "seed": seed,
                runs.metric: outcome.metric,
                "density": outcome.density,
                "payload_bytes": outcome.payload_bytes,
                "dense_bytes": outcome.dense_bytes,
                "median_step_seconds": outcome.step_time,
                "command": runs.command_again(variant, choice, seed),
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


if __name__ == "__main__":
    main()
