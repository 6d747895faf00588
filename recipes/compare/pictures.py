"""Draws a comparison in the style of the paper's Fig. 2 and 3."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, stdev

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from recipes.compare.runs import Outcome
from recipes.compare.variants import Variant
from recipes.logs import Run
from recipes.plot import finish

LOG_SCALE_RATIO = 20.0
"""An axis is logarithmic if its largest value exceeds this multiple of the smallest, as after divergence."""
MAX_POINTS = 200
"""Points of a curve; longer curves show means over neighbouring steps."""


def draw_volume(outcomes: Mapping[Variant, Sequence[Outcome]], metric: str) -> Figure:
    """Return a picture of the metric against the bytes sent: means, and standard deviations as bars."""
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(variant.name for variant in outcomes))
    for number, name in enumerate(names):
        curve = [runs for variant, runs in outcomes.items() if variant.name == name]
        curve.sort(key=lambda runs: fmean([run.payload_bytes for run in runs]))
        axes.errorbar(
            [fmean([run.payload_bytes for run in runs]) / 1e6 for runs in curve],
            [fmean([run.metric for run in runs]) for runs in curve],
            [stdev([run.metric for run in runs]) if len(runs) > 1 else 0.0 for runs in curve],
            color=f"C{number}",
            marker="o",
            capsize=3,
            label=name,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    axes.set_xlabel("MB sent per worker in the whole training")
    axes.set_ylabel(metric)
    axes.set_yscale(_scale([fmean([run.metric for run in runs]) for runs in outcomes.values()]))
    finish(axes)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_steps(runs: Mapping[str, Sequence[Run]], metric: str) -> Figure:
    """Return a picture of metric, error norm, total error and density by step, averaged over runs.

    Omits metrics that no run logged.
    """
    rows: tuple[tuple[str, str, str | None, Callable[[list[float]], list[float]]], ...] = (
        (metric, metric, None, list),
        ("sparse/error_norm", "error norm ‖e‖\n(units of sent values)", None, list),
        (
            "sparse/error_norm",
            "total error Σ ‖e‖²",
            "log",
            lambda norms: list(accumulate(norm * norm for norm in norms)),
        ),
        ("sparse/density", "density k / d", "log", list),
    )
    logged = {name for variant_runs in runs.values() for run in variant_runs for name in run.values}
    rows = tuple(row for row in rows if row[0] in logged)
    figure = Figure(figsize=(8.5, 1 + 2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for axes, (name, title, scale, transform) in zip(panels, rows, strict=True):
        curves = {label: _mean_curve(variant_runs, name, transform) for label, variant_runs in runs.items()}
        scale = scale or _scale([mean for _, means in curves.values() for mean in means if mean])
        for number, (label, (steps, means)) in enumerate(curves.items()):
            if means and (scale == "linear" or any(means)):
                axes.plot(steps, means, color=f"C{number}", linewidth=1.2, label=label)
        axes.set_ylabel(title)
        axes.set_yscale(scale)
        finish(axes)
    axes.set_xlabel("step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _scale(values: Sequence[float]) -> str:
    return "log" if values and min(values) > 0 and max(values) > LOG_SCALE_RATIO * min(values) else "linear"


def _mean_curve(
    runs: Sequence[Run], name: str, transform: Callable[[list[float]], list[float]]
) -> tuple[list[float], list[float]]:
    """Return steps and values, averaged over runs and, in long runs, over neighbouring steps."""
    curves = [(run.steps[name], transform(run.values[name])) for run in runs if name in run.values]
    if not curves:
        return [], []
    length = min(len(values) for _, values in curves)
    steps = curves[0][0][:length]
    means = [fmean(at) for at in zip(*(values[:length] for _, values in curves), strict=True)]
    width = max(1, length // MAX_POINTS)
    starts = range(0, length, width)
    return [fmean(steps[at : at + width]) for at in starts], [fmean(means[at : at + width]) for at in starts]
