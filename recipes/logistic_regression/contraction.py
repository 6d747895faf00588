"""Compares the residual of Top-k with Remark 8's error term, which grows as 1/δ or, if workers differ, as 1/δ².

    python -m recipes.logistic_regression.contraction --root data --dataset mushrooms --output contraction.png

δ = k/d is the density. The term is (D + δ σ²) / δ² with M = 0, where D = (1/n) Σ_i ‖∇f_i(x*)‖². Prints a table of the
mean of (1/n) Σ_i ‖e_i‖² over the second half of each training, for Top-k and for hard thresholds, and draws it.
"""

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from matplotlib.figure import Figure

from lightning_sparse import HardThreshold, Sparsifier, TopK
from recipes import MissingDataError
from recipes.logistic_regression.bounds import estimate_noise
from recipes.logistic_regression.curves import Setting, tune_threshold_to_density
from recipes.logistic_regression.data import make_parser
from recipes.logistic_regression.objective import Objective, find_minimiser
from recipes.logistic_regression.training import load_objective, shards

WORKERS, ITERATIONS, EVERY = 20, 3000, 30
SEEDS = (1, 2, 3)
METHODS = ("Top-k", "hard threshold")


def main() -> None:
    """Run all trainings, print the table and draw the picture."""
    parser = make_parser("recipes.logistic_regression.contraction", __doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    arguments = parser.parse_args()
    try:
        objective = load_objective(arguments.root, arguments.dataset, WORKERS)
    except MissingDataError as error:
        sys.exit(str(error))
    frame = pd.concat([measure(objective, sharding) for sharding in ("shuffled", "sorted")])
    print(frame.to_string(index=False, float_format="{:.4g}".format))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(frame).savefig(arguments.output, dpi=100)


def measure(objective: Objective, sharding: str, seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """Return a row per training: ``sharding``, ``method``, ``density``, ``squared_error`` and ``term``."""
    own = shards(objective.labels, WORKERS, sharding)
    setting = Setting(objective, own, 1 / (4 * objective.smoothness), ITERATIONS, EVERY)
    minimiser, d = find_minimiser(objective), objective.num_elements
    noise, _ = estimate_noise(objective, own, minimiser, seed=0)
    means = [objective.gradients(minimiser, examples).mean(dim=0) for examples in own]
    at_minimiser = float(torch.stack(means).square().sum(dim=1).mean())
    largest = tune_threshold_to_density(setting, 1 / d)
    sparsifiers: list[Sparsifier] = [TopK(k / d) for k in takewhile(lambda k: 4 * k < d, (2**n for n in range(20)))]
    sparsifiers += [HardThreshold(threshold=largest / 2**n) for n in range(len(sparsifiers))]
    rows = []
    for sparsifier in sparsifiers:
        for seed in seeds:
            late = []
            for state in setting.training(sparsifier, seed):
                if state.iteration > ITERATIONS // 2:
                    late.append(float(state.residuals.square().sum(dim=1).mean()))
            density = state.sent / (ITERATIONS * state.residuals.numel())
            term = at_minimiser / density**2 + noise / density
            rows.append((sharding, METHODS[isinstance(sparsifier, HardThreshold)], density, fmean(late), term))
    return pd.DataFrame(rows, columns=["sharding", "method", "density", "squared_error", "term"])


def draw(frame: pd.DataFrame) -> Figure:
    """Return axes per sharding, on logarithmic scales."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for sharding, axes in zip(("shuffled", "sorted"), figure.subplots(1, 2, sharey=True), strict=True):
        subset = frame[frame["sharding"] == sharding]
        for method in METHODS:
            rows = subset[subset["method"] == method]
            axes.plot(1 / rows["density"], rows["squared_error"], "o", label=method, markersize=4)
        rows = subset[subset["method"] == METHODS[0]].sort_values("density")
        axes.plot(1 / rows["density"], rows["term"], "--", label="D/δ² + σ²/δ", color="grey")
        axes.set(xscale="log", yscale="log", xlabel="1/δ", title=f"{sharding} shards")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("(1/n) Σ ‖e‖², gradient units squared")
    figure.axes[0].legend(fontsize="small")
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
