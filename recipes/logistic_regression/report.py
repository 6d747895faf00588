"""Draws figures and prints tables from existing CSV files: ``python -m recipes.logistic_regression.report DIR``."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.plot import add_shared_legend, finish

LABELS = {
    "dense": "dense",
    "top_k": "Top-k of each layer",
    "top_k_model": "Top-k of the model",
    "hard_threshold": "hard threshold",
}
CURVES, BOUND = "curves", "bound"
TENTH = 0.1
DOTS_PER_INCH = 72


def main() -> None:
    """Report on the given folder."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.logistic_regression.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="output folder of python -m recipes.logistic_regression"
    )
    folder = parser.parse_args().folder
    if missing := [name for name in (CURVES, BOUND) if not (folder / f"{name}.csv").exists()]:
        sys.exit(
            f"{folder} has no {missing[0]}.csv. Run python -m recipes.logistic_regression --output {folder} first."
        )
    report(folder)


def report(folder: Path) -> None:
    """Write ``curves.png`` and ``bound.png`` beside ``curves.csv`` and ``bound.csv``, and print the tables."""
    curves, bound = (pd.read_csv(folder / f"{name}.csv") for name in (CURVES, BOUND))
    draw_curves(curves).savefig(folder / f"{CURVES}.png", dpi=DOTS_PER_INCH)
    draw_bound(bound).savefig(folder / f"{BOUND}.png", dpi=DOTS_PER_INCH)
    print(curves_table(curves), bound_table(bound), sep="\n\n")


def draw_curves(frame: pd.DataFrame) -> Figure:
    """Return a row of axes per sharding, with the mean over seeds and the range over seeds as a pale band."""
    shardings = list(frame["sharding"].unique())
    figure = Figure(figsize=(11, 3.1 * len(shardings) + 0.6), layout="constrained")
    figure.suptitle(frame["dataset"].iloc[0], fontsize="medium")
    frame = frame.assign(
        error_norm=frame["squared_error"] ** 0.5,
        kilobits=frame["bits"] / 1e3,
        bound=frame["squared_error_bound"] ** 0.5,
    )
    for sharding, row in zip(shardings, figure.subplots(len(shardings), 3, squeeze=False), strict=True):
        subset = frame[frame["sharding"] == sharding]
        for number, method in enumerate(subset["method"].unique()):
            rows = subset[subset["method"] == method]
            colour, label = f"C{number}", LABELS[method]
            # Dashed and on top, because other curves may coincide with it.
            style = {"linestyle": (0, (4, 3)), "zorder": 3} if method == "dense" else {}
            _plot_band(row[0], rows, "epoch", "suboptimality", colour, label, **style)
            # The axes on the left show the range over seeds.
            across, means = _mean(rows[rows["iteration"] > 0], "kilobits", "suboptimality")
            row[1].plot(across, means, color=colour, label=label, linewidth=1.2, **style)
            if method != "dense":
                _plot_band(row[2], rows, "iteration", "error_norm", colour, label)
            if method == "hard_threshold":
                row[2].axhline(rows["bound"].iloc[0], color=colour, linestyle="--", label="λ √d")
        row[0].set(xlabel="epochs", ylabel=f"f(x) − f*, {sharding} shards", yscale="log")
        row[1].set(xlabel="kilobits sent by a worker", ylabel="f(x) − f*", yscale="log", xscale="log")
        row[2].set(xlabel="iterations", ylabel="‖e‖, gradient units")
        for axes in row:
            finish(axes)
    add_shared_legend(figure)
    return figure


def draw_bound(frame: pd.DataFrame) -> Figure:
    """Return axes per sharding with the running mean of f(x_t) − f* and its bound, dashed."""
    shardings = list(frame["sharding"].unique())
    figure = Figure(figsize=(4.8 * len(shardings) + 1, 3.8), layout="constrained")
    figure.suptitle(frame["dataset"].iloc[0], fontsize="medium")
    for sharding, axes in zip(
        shardings, figure.subplots(1, len(shardings), sharey=True, squeeze=False)[0], strict=True
    ):
        subset = frame[frame["sharding"] == sharding]
        for number, threshold in enumerate(subset["threshold"].unique()):
            rows = subset[subset["threshold"] == threshold]
            _plot_band(axes, rows, "iteration", "average_suboptimality", f"C{number}", f"λ = {threshold:.3g}")
            axes.plot(*_mean(rows, "iteration", "bound"), color=f"C{number}", linestyle="--")
        axes.set(xlabel="iterations", title=f"{sharding} shards", yscale="log")
        axes.legend(fontsize="small")
        finish(axes)
    figure.axes[0].set_ylabel("mean of f(x_t) − f*, and its bound (dashed)")
    return figure


def curves_table(frame: pd.DataFrame) -> str:
    """Return a Markdown table of means over the seeds.

    f(x) − f* is the mean of the last tenth of a run, with the standard deviation over seeds. Error norms are root mean
    squares over workers and seeds. Their columns are: after a tenth of the iterations, after the last iteration, the
    largest of all records, and the root mean square of all records.
    """
    last = frame["iteration"].max()
    lines = [
        "| shards | method | f(x) − f* at the end | density | kbit per worker | ‖e‖ at a tenth | at the end | largest "
        "| of all | λ √d |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (sharding, method), rows in frame.groupby(["sharding", "method"], sort=False):
        at_end = rows[rows["iteration"] > (1 - TENTH) * last].groupby("seed")["suboptimality"].mean()
        final = rows[rows["iteration"] == last]
        errors = rows.groupby("iteration")["squared_error"].mean()
        tenth = (errors.index - TENTH * last).to_series().abs().argmin()
        norms = [error**0.5 for error in (errors.iloc[tenth], errors.iloc[-1], errors.max(), errors.mean())]
        bound = rows["squared_error_bound"].iloc[0] ** 0.5
        lines.append(
            f"| {sharding} | {LABELS[method]} | {_format_mean(at_end)} | {100 * final['density'].mean():.2f} % "
            f"| {final['bits'].mean() / 1e3:,.0f} | {' | '.join(map(_format_number, norms))} "
            f"| {'–' if pd.isna(bound) or not bound else _format_number(bound)} |"
        )
    return "\n".join(lines)


def bound_table(frame: pd.DataFrame) -> str:
    """Return a Markdown table of the mean of f(x_t) − f* over a training, the bound and its terms."""
    final = frame[frame["iteration"] == frame["iteration"].max()]
    lines = [
        "| shards | λ | density | mean of f(x_t) − f* | bound | start term | noise term | threshold term | ‖ē‖ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (sharding, threshold), rows in final.groupby(["sharding", "threshold"], sort=False):
        parts = " | ".join(
            _format_number(rows[name].mean()) for name in ("bound", "start_term", "noise_term", "threshold_term")
        )
        lines.append(
            f"| {sharding} | {threshold:.3g} | {100 * rows['density'].mean():.2f} % "
            f"| {_format_mean(rows['average_suboptimality'])} | {parts} | {rows['squared_shift'].mean() ** 0.5:.3g} |"
        )
    return "\n".join(lines)


def _format_mean(values: pd.Series) -> str:
    deviation = f" ± {values.std():.2g}" if len(values) > 1 else ""
    return f"{values.mean():.3g}{deviation}"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _mean(frame: pd.DataFrame, x: str, y: str) -> tuple[pd.Series, pd.Series]:
    means = frame.groupby("iteration").mean(numeric_only=True).reset_index()
    return means[x], means[y]


def _plot_band(axes: Axes, frame: pd.DataFrame, x: str, y: str, colour: str, label: str, **style: Any) -> None:
    across, means = _mean(frame, x, y)
    seeds = frame.groupby("iteration")[y]
    axes.plot(across, means, color=colour, label=label, linewidth=1.2, **style)
    axes.fill_between(across, seeds.min(), seeds.max(), color=colour, alpha=0.2, linewidth=0)


if __name__ == "__main__":
    main()
