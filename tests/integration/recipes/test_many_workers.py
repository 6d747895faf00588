"""``recipes.many_workers`` on a few images."""

import csv
import sys

from recipes import many_workers
from tests.integration.recipes.recipe_runs import DATA, needs_data


@needs_data("cifar-10-batches-py")
def test_sparse_sums_receive_fewer_bytes_than_exact_sums(tmp_path, monkeypatch):
    output = tmp_path / "rows.csv"
    options = ["--workers=8", "--steps=8", "--seeds", "1", "--densities", "0.01", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", ["many_workers", f"--root={DATA}", *options])
    many_workers.main()
    rows = {row["exchange"]: row for row in csv.DictReader(output.read_text().splitlines())}
    assert rows.keys() == {"dense", "reduce_scatter", "sparse_sums"}
    received = {name: float(row["received_bytes_per_parameter"]) for name, row in rows.items()}
    # The others begin with a dense step.
    assert received["dense"] == 8
    assert 1 < received["sparse_sums"] < received["reduce_scatter"] < 3
    assert all(0 < float(row["accuracy"]) < 1 for row in rows.values())
