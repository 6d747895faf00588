import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import compare, plot
from recipes.compare import Grid, Outcome, grid_table, labelled, parsed_grid, table

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def call(monkeypatch, capsys):
    """Calls a module's ``main`` with arguments; returns what it printed and what it said."""
    monkeypatch.chdir(PROJECT)

    def call_main(main, *arguments):
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
        main()
        return capsys.readouterr()

    return call_main


def arguments_of_comparison(output):
    arguments = ["recipes/resnet18_cifar10/demo.yaml", "--seeds", "1", "--metric", "val/accuracy", "--output", output]
    arguments += ["--variant", "dense: --trainer.strategy=ddp"]
    (output / "variants.yaml").write_text("hard threshold, λ = 1: --trainer.strategy.threshold=1.0\nother: --wrong=1")
    arguments += ["--variants", output / "variants.yaml", "--only", "dense", "hard threshold, λ = 1"]
    arguments += ["--grid", "model.width=4", "--"]
    return [*arguments, "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_comparison_runs_every_variant_once_and_can_be_drawn(tmp_path, call):
    first = call(compare.main, *arguments_of_comparison(tmp_path))
    chosen, tried = first.out.split("\n\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in chosen.splitlines()]
    assert [row[0] for row in rows] == ["", "---", "dense", "hard threshold, λ = 1"]
    dense, sparse = rows[2:]
    assert dense[2:5:2] == ["100.0 %", "1.0"]
    assert float(sparse[2].split()[0]) < 5
    assert float(sparse[4]) > 5
    for row, line in zip(rows[2:], tried.splitlines()[2:], strict=True):  # the best of the grid is what is shown
        assert re.search(r"\*\*(.*)\*\*", line).group(1) == row[1]

    again = call(compare.main, *arguments_of_comparison(tmp_path))
    assert again.out == first.out
    assert again.err == ""  # nothing was run

    folders = [next(tmp_path.rglob(f"{name}*/4/1")) for name in ("dense", "hard")]
    picture = tmp_path / "curves.png"
    runs = [f"{label}={folder}" for label, folder in zip(("dense", "λ = 1"), folders, strict=True)]
    call(plot.main, "--output", picture, *runs)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_variant_that_fails_shows_what_the_run_said_and_leaves_nothing(tmp_path):
    command = [
        sys.executable,
        "-m",
        "recipes.compare",
        "recipes/resnet18_cifar10/demo.yaml",
        "--metric",
        "val/accuracy",
    ]
    command += ["--output", str(tmp_path), "--variant", "wrong: --trainer.strategy.threshold=-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.returncode == 1
    assert re.search(r"threshold=-1.*Must be a finite number of at least 0", done.stderr)
    assert not list(tmp_path.rglob("1"))


def test_a_table_has_mean_and_deviation_over_seeds():
    runs = [Outcome(0.5, 0.01, 2e6, 100e6, 0.030), Outcome(0.7, 0.03, 2e6, 100e6, 0.050)]
    last = table({"sparse": runs}, "accuracy").splitlines()[-1]
    assert last == "| sparse | 0.6000 ± 0.1414 | 2.00 ± 1.41 % | 2.0 | 50.0 | 40 ms |"


@pytest.mark.parametrize(("mode", "best"), [("min", "0.01"), ("max", "0.1")])
def test_a_grid_takes_the_best_and_never_a_run_that_diverged(mode, best):
    grid = parsed_grid("--model.learning_rate=0.01,0.1,1", mode)
    assert grid == Grid("model.learning_rate", ["0.01", "0.1", "1"], mode)
    metrics = {"1": float("nan"), "0.01": 1.5, "0.1": 2.0}
    assert grid.best(metrics) == best
    first, _, last = grid_table(
        grid, {"dense": {"0.01": 1.5, "0.1": 2.0, "1": float("nan")}}, "loss", [1, 2]
    ).splitlines()
    assert first == "| loss by model.learning_rate, mean of seeds 1, 2 | 0.01 | 0.1 | 1 |"
    assert last == (
        "| dense | **1.5000** | 2.0000 | nan |" if mode == "min" else "| dense | 1.5000 | **2.0000** | nan |"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dense: --trainer.strategy=ddp", ("dense", ["--trainer.strategy=ddp"])),
        ("λ = 1: --a=1 '--b=[1, 2]'", ("λ = 1", ["--a=1", "--b=[1, 2]"])),
    ],
)
def test_a_variant_is_a_label_and_arguments(text, expected):
    assert labelled(text) == expected
