"""Trains on a data set with several sparsifiers and compares the results with the theory.

    python -m recipes.logistic_regression --root data --dataset mushrooms --output DIR

Writes curves.csv, bound.csv and their figures to DIR and prints two tables. To repeat only the figures and tables, run
``python -m recipes.logistic_regression.report DIR``.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch

from recipes import MissingDataError
from recipes.logistic_regression.bounds import SHARES_OF_THRESHOLD, compute_bounds, limit_learning_rate
from recipes.logistic_regression.curves import METHODS, Setting, compute_curves, tune_threshold_to_density
from recipes.logistic_regression.data import make_parser
from recipes.logistic_regression.report import BOUND, CURVES, report
from recipes.logistic_regression.training import load_objective, shards


def main() -> None:
    """Run all trainings and write the report."""
    parser = make_parser("recipes.logistic_regression", __doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--shardings", nargs="+", choices=["shuffled", "sorted"], default=["shuffled", "sorted"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["dense", "top_k", "hard_threshold"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--every", type=int, default=30, help="iterations between records")
    parser.add_argument("--density", type=float, default=0.002, help="density of Top-k; k is at least 1")
    parser.add_argument("--threshold", type=float, help="λ in gradient units (tuned to Top-k's volume if omitted)")
    parser.add_argument("--relative-rate", type=float, default=1.0, help="learning rate times smoothness")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except MissingDataError as error:
        sys.exit(str(error))
    report(arguments.output)


def run(arguments: argparse.Namespace) -> None:
    """Write both CSV files and print the constants of the problem."""
    objective = load_objective(arguments.root, arguments.dataset, arguments.workers)
    rate = arguments.relative_rate / objective.smoothness
    print(
        f"{arguments.dataset}: N = {len(objective.labels)}, d = {objective.num_elements}, "
        f"L = {objective.smoothness:.4g}, γ = {rate:.4g}"
    )
    curve_frames, bound_frames = [], []
    for sharding in arguments.shardings:
        own = shards(objective.labels, arguments.workers, sharding)
        setting = Setting(objective, own, rate, arguments.iterations, arguments.every)
        threshold = arguments.threshold
        if threshold is None:
            threshold = tune_threshold_to_density(setting, arguments.density)
        frame = compute_curves(setting, arguments.methods, arguments.seeds, arguments.density, threshold)
        curve_frames.append(_add_labels(frame, arguments.dataset, sharding))

        slower = setting._replace(learning_rate=limit_learning_rate(objective, rate))
        bounded = compute_bounds(slower, [share * threshold for share in SHARES_OF_THRESHOLD], arguments.seeds)
        bound_frames.append(_add_labels(bounded.frame, arguments.dataset, sharding))
        print(
            f"{sharding} shards: λ = {threshold:.4g}; σ² = {bounded.problem.noise:.4g} and "
            f"ζ² = {bounded.problem.heterogeneity:.4g} measured, bound for γ = {slower.learning_rate:.4g}"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    pd.concat(curve_frames).to_csv(arguments.output / f"{CURVES}.csv", index=False)
    pd.concat(bound_frames).to_csv(arguments.output / f"{BOUND}.csv", index=False)


def _add_labels(frame: pd.DataFrame, dataset: str, sharding: str) -> pd.DataFrame:
    return frame.assign(dataset=dataset, sharding=sharding)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
