r"""Compares strategies on one recipe and prints a table: ``python -m recipes.compare <recipe>.yaml …``.

A variant is a label and command-line arguments, which override or extend the YAML::

    python -m recipes.compare recipes/resnet18_cifar10/laptop.yaml --metric val/accuracy \
        --variant "dense: --trainer.strategy=ddp" \
        --variant "hard threshold: --trainer.strategy.threshold=0.01" -- --data.root=data

For many variants, write ``label: arguments`` lines in a YAML file and pass it as ``--variants``. With ``--grid``, every
variant runs with every value for the first ``--grid-seeds`` seeds. The value with the best mean metric then runs with
the other seeds::

    python -m recipes.compare recipes/gpt_wikitext/laptop.yaml --metric val/loss --mode min \
        --variants recipes/gpt_wikitext/comparison.yaml --grid model.learning_rate=0.001,0.003,0.01

``{density}`` in arguments stands for each of ``--densities``. If another number determines the density, for example a
constant λ, write ``{tuned}`` for it and give its first value. The comparison tunes it with the first seed until the
average density is within 10 % of the target. The file may also hold the options::

    metric: val/perplexity
    mode: min
    densities: [0.01, 0.001]
    variants:
      dense: --trainer.strategy.threshold=0
      threshold: {arguments: "--trainer.strategy.threshold={tuned}", tuned: 0.0012}
      Top-k: --trainer.strategy=ddp_topk --trainer.strategy.sparsifier.density={density}

Finished runs stay in ``--output`` and are not repeated: the same command continues an interrupted comparison. It also
writes ``runs.csv``, with one row and the command per run, and two pictures. ``volume.png`` shows the metric against the
bytes sent. ``steps.png`` shows the metric, error norm, total error and density by step.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from statistics import fmean

from tqdm import tqdm

from recipes.compare.options import parse_options
from recipes.compare.pictures import draw_steps, draw_volume
from recipes.compare.runs import Choice, Outcome, Runs
from recipes.compare.tables import format_grid_table, format_table, write_csv
from recipes.compare.variants import Variant
from recipes.logs import read


def main() -> None:
    """Run the missing trainings, print the table, and write the CSV and the pictures."""
    options, variants, grid, common = parse_options(__doc__ or "", sys.argv[1:])
    runs = Runs(options.config, options.output, options.metric, common, grid)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # also stops the training
    try:
        with runs.locked():
            _compare(runs, variants, options)
    except KeyboardInterrupt:
        sys.exit("\nStopped. Finished runs are kept: the same command continues with the next run.")


def _compare(runs: Runs, variants: list[Variant], options: argparse.Namespace) -> None:
    grid, grid_seeds = runs.grid, options.seeds[: options.grid_seeds]
    with _Progress(runs, variants, options.seeds, grid_seeds) as progress:
        choices: dict[Variant, Choice] = {}
        grid_metrics: dict[str, dict[str, float]] = {}
        for variant in variants:
            found_choices = {
                value: runs.tune(variant, value, lambda tuned, choice: progress.run(tuned, choice, grid_seeds[0]))
                for value in ([None] if grid is None else grid.values)
            }
            best = None
            if grid is not None:
                grid_metrics[variant.label] = {
                    value: fmean([progress.run(variant, found_choices[value], seed).metric for seed in grid_seeds])
                    for value in grid.values
                }
                best = grid.best(grid_metrics[variant.label])
            choices[variant] = found_choices[best]
        outcomes: dict[Variant, list[Outcome]] = {variant: [] for variant in variants}
        # Seed by seed, so that other load on the machine affects all variants equally.
        for seed in options.seeds:
            for variant, choice in choices.items():
                outcomes[variant].append(progress.run(variant, choice, seed))
    print(format_table({variant.label: results for variant, results in outcomes.items()}, runs.metric))
    if grid is not None:
        print(f"\n{format_grid_table(grid, grid_metrics, runs.metric, grid_seeds)}")
    folder = runs.output / runs.config.parent.name
    write_csv(folder / "runs.csv", _rows(runs, choices, outcomes, options.seeds))
    draw_volume(outcomes, runs.metric).savefig(folder / "volume.png", dpi=120)
    curves = {
        variant.label: [read(runs.folder(variant, choice, seed)) for seed in options.seeds]
        for variant, choice in choices.items()
    }
    draw_steps(curves, runs.metric).savefig(folder / "steps.png", dpi=120)


def _rows(
    runs: Runs, choices: dict[Variant, Choice], outcomes: dict[Variant, list[Outcome]], seeds: list[int]
) -> Iterator[dict[str, object]]:
    for variant, choice in choices.items():
        for seed, outcome in zip(seeds, outcomes[variant], strict=True):
            yield {
                "variant": variant.name,
                "target_density": variant.density,
                "grid": None if runs.grid is None else f"{runs.grid.argument}={choice.grid_value}",
                "tuned": choice.tuned,
                "seed": seed,
                runs.metric: outcome.metric,
                "density": outcome.density,
                "payload_bytes": outcome.payload_bytes,
                "dense_bytes": outcome.dense_bytes,
                "median_step_seconds": outcome.step_time,
                "command": runs.command_to_repeat(variant, choice, seed),
            }


class _Progress:
    """A progress bar over the missing runs; hidden if no run is missing."""

    def __init__(self, runs: Runs, variants: list[Variant], seeds: list[int], grid_seeds: list[int]) -> None:
        self._runs = runs
        values = 1 if runs.grid is None else len(runs.grid.values)
        planned = len(variants) * (values * len(grid_seeds) + len(seeds) - len(grid_seeds))
        finished = sum(runs.count_finished(variant, seeds) for variant in variants)
        self._bar = tqdm(total=max(planned - finished, 0), unit="run", disable=planned <= finished, leave=False)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def run(self, variant: Variant, choice: Choice, seed: int) -> Outcome:
        """Return the outcome of a run, and name the run in the bar while it trains."""
        is_finished = self._runs.folder(variant, choice, seed).exists()
        if not is_finished:
            self._bar.set_description(f"{variant.label}, seed {seed}")
        outcome = self._runs.run(variant, choice, seed)
        if not is_finished:
            if self._bar.n == self._bar.total:  # tuning took more than one run
                self._bar.total += 1
            self._bar.update()
        return outcome


if __name__ == "__main__":
    main()
