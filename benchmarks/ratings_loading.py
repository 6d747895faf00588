"""Measures the time and memory to load a MovieLens ratings file of 20 million rows.

    python -m benchmarks.ratings_loading [--rows 20000000]

Generates a file with MovieLens-20M's users, items and columns in a temporary folder (0.5 GB). Reads it without and with
the cache, and prints seconds and the peak memory of this process.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from recipes.ncf_movielens.ratings import load_ratings

USERS, ITEMS = 138_493, 26_744


def main() -> None:
    """Generate the file, load it twice and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratings.csv"
        write_ratings(path, rows)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, about {rows:,} rows")
        for name in ("from the file", "from the cache"):
            started = time.perf_counter()
            ratings = load_ratings(path)
            seconds = time.perf_counter() - started
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(f"{name}: {seconds:.1f} s, {len(ratings.users):,} training interactions, peak {peak / 1e9:.2f} GB")


def write_ratings(path: Path, rows: int) -> None:
    """Write ratings of distinct (user, movie) pairs with at least two per user."""
    users = min(USERS, rows // 20)
    per_user = rows // users
    generator = np.random.default_rng(0)
    for number, part in enumerate(np.array_split(np.arange(users), 10)):
        # Nearly all step sizes are coprime to the number of items; duplicates of the others are dropped.
        starts, steps = generator.integers(ITEMS, size=(2, len(part), 1))
        items = (starts + (2 * (steps % 500) * 1671 + 1) * np.arange(per_user)) % ITEMS
        table = pd.DataFrame(
            {
                "userId": np.repeat(part + 1, per_user),
                "movieId": items.ravel() + 1,
                "rating": generator.integers(1, 11, size=items.size) / 2,
                "timestamp": generator.integers(800_000_000, 1_500_000_000, size=items.size),
            }
        ).drop_duplicates(["userId", "movieId"])
        table.to_csv(path, mode="a", header=number == 0, index=False)


if __name__ == "__main__":
    main()
