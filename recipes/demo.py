"""Demo: ``python -m recipes.demo`` trains a small ResNet with a hard threshold, then with plain DDP, and compares.

Both trainings run the recipe ``resnet18_cifar10/demo.yaml`` from the command line. All numbers are from
their TensorBoard files.
"""

import os
import subprocess
import sys
import time
from math import sqrt
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

from recipes.logs import Run, read
from recipes.plot import finish

REPOSITORY = Path(__file__).parents[1]
RECIPE = REPOSITORY / "recipes" / "resnet18_cifar10" / "demo.yaml"
DENSE_COLOUR, SPARSE_COLOUR, MEAN_COLOUR = "0.45", "tab:blue", "navy"
STEPS_OF_MEAN = 25


def main() -> None:
    """Run both trainings, print a table and draw a picture."""
    started = time.monotonic()
    output = REPOSITORY / "demo_output" / time.strftime("%Y-%m-%d_%H-%M-%S")
    sparse = train("hard threshold", output / "hard_threshold", number=1)
    dense = train("plain DDP", output / "dense", "--trainer.strategy=ddp", number=2)

    print("\n" + format_table(sparse, dense))
    picture = output / "demo.png"
    draw(sparse, dense).savefig(picture, dpi=150)
    show = os.path.relpath
    tensorboard = Path(sys.executable).with_name("tensorboard")
    print(f"\nPicture  {show(picture)}")
    print(f"Logs     {show(output)}; to look at them: {show(tensorboard)} --logdir {show(output)}")
    print(f"Done in {time.monotonic() - started:.0f} s.")


def train(title: str, folder: Path, *arguments: str, number: int) -> Run:
    """Run the recipe in a child process and return its logged scalars."""
    print(f"\n=== {number} of 2: {title}, two workers on the CPU ===\n", flush=True)
    command = [sys.executable, "-m", "recipes", "fit", f"--config={RECIPE}", f"--trainer.logger.save_dir={folder}"]
    # One thread per worker; thread pools of all cores would compete on one machine.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    finished = subprocess.run([*command, *arguments], cwd=REPOSITORY, env=environment, check=False)
    if finished.returncode:
        sys.exit(f"The training ended with exit code {finished.returncode}; its messages are above.")
    return read(folder)


def format_table(sparse: Run, dense: Run) -> str:
    """Return a text table that compares both trainings."""
    num_steps = len(sparse.values["sparse/payload_bytes"])
    sent = sum(sparse.values["sparse/payload_bytes"])
    sent_dense = num_steps * dense.values["gradient_bytes"][0]

    def percent(run: Run) -> str:
        return f"{100 * run.values['val/accuracy'][-1]:.1f} %"

    def milliseconds(run: Run) -> str:
        return f"{1000 * median(run.values['step_time']):.0f} ms"

    rows = [
        ("", "hard threshold", "plain DDP"),
        ("validation accuracy, last epoch", percent(sparse), percent(dense)),
        ("average density", f"{100 * fmean(sparse.values['sparse/density']):.2f} %", "100 %"),
        ("gradient bytes sent per worker", f"{sent / 1e6:,.1f} MB", f"{sent_dense / 1e6:,.1f} MB"),
        ("times fewer than dense", f"{sent_dense / sent:.0f}", "1"),
        ("median step time", milliseconds(sparse), milliseconds(dense)),
    ]
    title = f"A narrow ResNet-18 ({sparse.num_elements:,} parameters) on digits, {num_steps} steps"
    note = (
        "Both workers run on this machine, where sending is almost free. The step times show the cost of selecting\n"
        "coordinates and of logging every step. They do not show the time that a slow network would save."
    )
    return "\n".join([title, "", *(f"  {name:<33}{left:>16}{right:>14}" for name, left, right in rows), "", note])


def draw(sparse: Run, dense: Run) -> Figure:
    """Return a figure with accuracy, density and error norm by step."""
    figure = Figure(figsize=(8, 8.5), layout="constrained")
    figure.suptitle("Sending only the gradient coordinates that reach a threshold: two workers, a small ResNet")
    accuracy, density, error = figure.subplots(3, sharex=True)

    for run, label, colour in ((dense, "plain DDP", DENSE_COLOUR), (sparse, "hard threshold", SPARSE_COLOUR)):
        percent = [100 * value for value in run.values["val/accuracy"]]
        accuracy.plot(run.steps["val/accuracy"], percent, "o-", color=colour, label=label)
    accuracy.set_ylabel("validation accuracy (%)")
    accuracy.legend(loc="lower right")

    steps, values = sparse.steps["sparse/density"], sparse.values["sparse/density"]
    # A logarithmic axis cannot show a step with an empty payload; the mean over many steps includes it.
    density.plot(steps, [value or None for value in values], ".", color=SPARSE_COLOUR, alpha=0.35, label="each step")
    starts = range(0, len(values), STEPS_OF_MEAN)
    means = [fmean(values[start : start + STEPS_OF_MEAN]) for start in starts]
    density.stairs(
        means,
        [*(steps[start] for start in starts), steps[-1] + 1],
        baseline=None,
        color=MEAN_COLOUR,
        label=f"mean of {STEPS_OF_MEAN} steps",
    )
    density.axhline(1.0, color=DENSE_COLOUR, label="plain DDP")
    average = fmean(values)
    density.axhline(average, color=MEAN_COLOUR, linestyle=":", label=f"average, {100 * average:.2f} %")
    density.set_yscale("log")
    density.set_ylabel("density k/d")
    density.legend(loc="lower left", ncols=4, fontsize="small", columnspacing=1.2)

    error.plot(
        sparse.steps["sparse/error_norm"],
        sparse.values["sparse/error_norm"],
        color=SPARSE_COLOUR,
        label="hard threshold",
    )
    # Every unsent coordinate is below λ, so the norm of d coordinates is below λ √d.
    bound = sparse.values["sparse/threshold"][-1] * sqrt(sparse.num_elements)
    error.axhline(bound, color=MEAN_COLOUR, linestyle=":", label=f"bound λ √d = {bound:.3g}")
    error.legend(loc="center right")
    error.set_ylabel("error norm (gradient units)")
    error.set_ylim(bottom=0)
    error.set_xlabel("step")
    for axes in (accuracy, density, error):
        finish(axes)
    return figure


if __name__ == "__main__":
    main()
