"""Draws several trainings in one picture: ``python -m recipes.plot dense=<folder> sparse=<folder> --output x.png``.

A folder holds the logs of a recipe's TensorBoardLogger. The picture shows rank 0's training loss, the density and the
error norm by step. A run that did not log a metric is missing from that metric's axes.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.logs import Run, read

STEPS_OF_MEAN = 10
ROWS = (
    ("train/local_loss", "training loss", "linear"),
    ("sparse/density", "density k/d", "log"),
    ("sparse/error_norm", "error norm\n(gradient units)", "linear"),
)


def main() -> None:
    """Read the given runs and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m recipes.plot", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", type=labelled_folder)
    parser.add_argument("--output", type=Path, required=True, help="the picture to write, for example curves.png")
    arguments = parser.parse_args()
    runs = {label: read(folder) for label, folder in arguments.runs}
    draw(runs).savefig(arguments.output, dpi=120)


def labelled_folder(text: str) -> tuple[str, Path]:
    """Return label and folder of ``LABEL=FOLDER``.

    Raises:
        ArgumentTypeError: the label is empty or the folder does not exist.
    """
    label, _, folder = text.rpartition("=")  # a label may hold an equals sign: λ = 0.01
    if not label or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"expected LABEL=FOLDER with an existing folder, got {text!r}")
    return label, Path(folder)


def draw(runs: dict[str, Run]) -> Figure:
    """Return a row of axes per metric, single steps pale, means over ten steps in full colour."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    for axes, (name, label, scale) in zip(figure.subplots(len(ROWS), sharex=True), ROWS, strict=True):
        for number, (run_label, run) in enumerate(runs.items()):
            if name in run.values:
                _curve(axes, run.steps[name], run.values[name], f"C{number}", run_label)
        axes.set_ylabel(label)
        axes.set_yscale(scale)
        finish(axes)
    axes.set_xlabel("step")
    add_shared_legend(figure, columns=2)
    return figure


def finish(axes: Axes) -> None:
    """Add a grid, and remove the frame above and on the right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def add_shared_legend(figure: Figure, columns: int | None = None) -> None:
    """Add a legend of all axes, below them; None puts all lines into one row."""
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]}
    figure.legend(
        handles=list(lines.values()), loc="outside lower center", ncols=columns or len(lines), fontsize="small"
    )


def _curve(axes: Axes, steps: list[int], values: list[float], colour: str, label: str) -> None:
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    edges = [*range(0, len(values), STEPS_OF_MEAN), len(values)]
    parts = list(pairwise(edges))
    means = [fmean(values[start:end]) for start, end in parts]
    axes.plot([fmean(steps[start:end]) for start, end in parts], means, color=colour, label=label)


if __name__ == "__main__":
    main()
