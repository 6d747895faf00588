"""Formats outcomes as Markdown tables and as a CSV with one row per run."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from recipes.compare.runs import Outcome
from recipes.compare.variants import Grid


def format_table(outcomes: Mapping[str, Sequence[Outcome]], metric: str) -> str:
    """Return a Markdown table of means and standard deviations over the seeds.

    Args:
        outcomes: the outcome for each seed, by label of the variant.
        metric: the metric's name.
    """
    head = [metric, "average density", "MB sent per worker", "times fewer", "median step"]
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for label, runs in outcomes.items():
        sent = fmean([run.payload_bytes for run in runs])
        cells = [
            _cell(label),
            format_mean([run.metric for run in runs], 4),
            f"{format_mean([100 * run.density for run in runs], 2)} %",
            f"{sent / 1e6:,.1f}",
            f"{fmean([run.dense_bytes for run in runs]) / sent:.1f}" if sent else "–",
            f"{1000 * fmean([run.step_time for run in runs]):.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_mean(values: Sequence[float], digits: int) -> str:
    """Return mean and standard deviation as text."""
    if fmean(values) >= 10:  # a perplexity or a percentage, not a fraction
        digits = 1
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def format_grid_table(grid: Grid, grid_metrics: dict[str, dict[str, float]], metric: str, seeds: list[int]) -> str:
    """Return a Markdown table of the metric at each grid value, and advice if a best value is at an end of the grid."""
    of_seeds = f"{'seed' if len(seeds) == 1 else 'mean of seeds'} {', '.join(map(str, seeds))}"
    lines = [
        f"| {metric} by {grid.argument}, {of_seeds} | {' | '.join(grid.values)} |",
        "|---" * (len(grid.values) + 1) + "|",
    ]
    for label, metrics in grid_metrics.items():
        best = grid.best(metrics)
        cells = [f"**{metric:.4f}**" if value == best else f"{metric:.4f}" for value, metric in metrics.items()]
        lines.append(f"| {_cell(label)} | {' | '.join(cells)} |")
    ends = {grid.values[0], grid.values[-1]} if len(grid.values) > 1 else set()
    if at_end := [repr(label) for label, metrics in grid_metrics.items() if grid.best(metrics) in ends]:
        lines.append(f"\nThe best value for {', '.join(at_end)} is the first or last of the grid. Extend the grid.")
    return "\n".join(lines)


def _cell(label: str) -> str:
    return label.replace("|", r"\|")


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV file with one row per run."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
