"""``recipes.compare``: variants, grids, tuned values, kept runs, tables and pictures."""

import csv
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from recipes import plot
from recipes.compare import __main__ as compare
from recipes.compare.pictures import draw_steps, draw_volume
from recipes.compare.runs import Choice, Outcome, Runs, read_outcome
from recipes.compare.tables import format_grid_table, format_table
from recipes.compare.variants import Grid, Variant, expand_variants, parse_grid
from recipes.logs import Run, read
from tests.integration.faults.unwatched_workers import is_running, wait_until
from tests.markdown import PROJECT

DEMO = "recipes/resnet18_cifar10/demo.yaml"
VALUES = {"dense": (0.9, 1.0, 1.1), "other": (1.4, 1.5, 1.6), "same": (0.9, 1.0, 1.1)}


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that calls ``main`` of a module with arguments and returns its stdout and stderr."""
    monkeypatch.chdir(PROJECT)

    def call_main(main, *arguments):
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
        main()
        return capsys.readouterr()

    return call_main


def arguments_of_comparison(output):
    arguments = [DEMO, "--seeds", "1", "--metric", "val/accuracy", "--output", output]
    arguments += ["--variant", "dense: --trainer.strategy=ddp_fork"]
    hard = "--trainer.strategy.threshold=1.0 --trainer.strategy.start_method=fork"
    (output / "variants.yaml").write_text(f"hard threshold, λ = 1: {hard}\nother: --wrong=1")
    arguments += ["--variants", output / "variants.yaml", "--only", "dense", "hard threshold, λ = 1"]
    arguments += ["--grid", "model.width=4", "--"]
    return [*arguments, "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]


# Each run is a `python -m recipes fit` of its own, which starts two workers.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_comparison_runs_every_variant_once_and_draws_it(tmp_path, call):
    first = call(compare.main, *arguments_of_comparison(tmp_path))
    chosen, tried = first.out.split("\n\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in chosen.splitlines()]
    assert [row[0] for row in rows] == ["", "---", "dense", "hard threshold, λ = 1"]
    dense, sparse = rows[2:]
    assert dense[2:5:2] == ["100.0 %", "1.0"]
    assert float(sparse[2].split()[0]) < 5
    assert float(sparse[4]) > 5
    for row, line in zip(rows[2:], tried.splitlines()[2:], strict=True):  # the table shows the best of the grid
        assert re.search(r"\*\*(.*)\*\*", line).group(1) == row[1]

    again = call(compare.main, *arguments_of_comparison(tmp_path))
    assert again.out == first.out
    assert again.err == ""  # runs nothing again
    with (tmp_path / "resnet18_cifar10" / "runs.csv").open() as file:
        listed = list(csv.DictReader(file))
    assert [row["variant"] for row in listed] == ["dense", "hard threshold, λ = 1"]
    assert float(listed[1]["payload_bytes"]) < float(listed[1]["dense_bytes"]) / 5
    assert "--trainer.strategy.threshold=1.0" in listed[1]["command"]
    assert "--model.width=4" in listed[1]["command"]
    for name in ("volume.png", "steps.png"):
        assert (tmp_path / "resnet18_cifar10" / name).read_bytes().startswith(b"\x89PNG")

    folders = [next(tmp_path.rglob(f"{name}*/4/seed_1")) for name in ("dense", "hard")]
    picture = tmp_path / "curves.png"
    runs = [f"{label}={folder}" for label, folder in zip(("dense", "λ = 1"), folders, strict=True)]
    call(plot.main, "--output", picture, *runs)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.long
def test_a_failing_variant_shows_its_output_and_leaves_no_files(tmp_path, call):
    variant = ("--variant", "wrong: --trainer.strategy.threshold=-1")
    with pytest.raises(SystemExit, match=r"threshold=-1.*Must be a finite number of at least 0"):
        call(compare.main, DEMO, "--metric", "val/accuracy", "--output", tmp_path, *variant)
    assert not list(tmp_path.rglob("seed_1"))


def test_outcomes_count_compressed_bytes_and_a_table_has_mean_and_deviation_over_seeds(monkeypatch):
    values = {"m": [1.0], "train/local_loss": [1.0] * 2, "gradient_bytes": [100.0], "compressed_bytes": [10.0] * 2}
    run = Run({}, values | {"step_time": [0.1]})
    monkeypatch.setattr("recipes.compare.runs.read", lambda _: run)
    assert read_outcome(Path(), "m") == Outcome(1.0, 0.1, 20.0, 200.0, 0.1)
    runs = [Outcome(0.5, 0.01, 2e6, 100e6, 0.030), Outcome(0.7, 0.03, 2e6, 100e6, 0.050)]
    last = format_table({"spar|se": runs}, "accuracy").splitlines()[-1]
    assert last == r"| spar\|se | 0.6000 ± 0.1414 | 2.00 ± 1.41 % | 2.0 | 50.0 | 40 ms |"
    assert "| 0.0 | – |" in format_table({"one worker": [Outcome(0.5, 1.0, 0.0, 100e6, 0.03)]}, "accuracy")


@pytest.mark.parametrize(("mode", "best"), [("min", "0.01"), ("max", "0.1")])
def test_a_grid_takes_the_best_run_that_did_not_diverge(mode, best):
    grid = parse_grid("--model.learning_rate=0.01,0.1,1", mode)
    assert grid == Grid("model.learning_rate", ["0.01", "0.1", "1"], mode)
    metrics = {"1": float("nan"), "0.01": 1.5, "0.1": 2.0}
    assert grid.best(metrics) == best
    table = format_grid_table(grid, {"dense": dict(sorted(metrics.items()))}, "loss", [1, 2])
    first, _, last, *advice = table.splitlines()
    assert "".join(advice) == (
        "" if mode == "max" else "The best value for 'dense' is the first or last of the grid. Extend the grid."
    )
    assert first == "| loss by model.learning_rate, mean of seeds 1, 2 | 0.01 | 0.1 | 1 |"
    assert last == f"| dense | {'**1.5000** | 2.0000' if mode == 'min' else '1.5000 | **2.0000**'} | nan |"


def test_a_variant_with_a_density_placeholder_expands_to_one_per_density():
    listed = {"a": "--x={density}", "b": {"arguments": "--y={tuned}", "tuned": 0.02}, "c": "--z"}
    variants = expand_variants(listed, [0.01, 0.0001])
    assert [variant.label for variant in variants] == ["a, 1 %", "a, 0.01 %", "b, 1 %", "b, 0.01 %", "c"]
    assert [variant.name for variant in variants] == ["a", "a", "b", "b", "c"]
    assert [variant.arguments for variant in variants[:2]] == [("--x=0.01",), ("--x=0.0001",)]
    assert [variant.start for variant in variants] == [None, None, 0.02, pytest.approx(0.2), None]
    assert variants[2].with_tuned("0.5") == ["--y=0.5"]
    assert [variant.label for variant in expand_variants(listed, [0.01])] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"a": "--x={density}"}, "'a' needs a density. Give --densities"),
        ({"a": "--x={tuned}"}, "must have both {tuned} and its first value"),
        ({"a": {"arguments": "--x=1", "tuned": 1}}, "must have both {tuned} and its first value"),
        ({"a": 3}, "Variant 'a' is 3. Give its arguments as text"),
        ({"a": {"tuned": 1}}, "Give 'arguments', and a number above 0 as 'tuned'"),
        ({"a": {"arguments": "--x={tuned}", "tuned": -1}}, "Give 'arguments', and a number above 0 as 'tuned'"),
    ],
)
def test_an_invalid_variant_raises(listed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        expand_variants(listed, [])


@pytest.mark.parametrize("power", [-2.0, -1.0, -5.0])
def test_tuning_reaches_the_requested_density_and_keeps_its_runs(power, tmp_path):
    made = []

    def outcome(variant, choice):
        made.append(choice.tuned)
        return Outcome(0.0, min(0.3 * float(choice.tuned) ** power, 1.0), 1.0, 1.0, 1.0)

    runs = Runs(tmp_path / "x.yaml", tmp_path, "loss", [], None)
    variant = Variant("a", "a", ("--x={tuned}",), density=0.01, start=1.0)
    choice = runs.tune(variant, "0.1", outcome)
    assert choice.grid_value == "0.1"
    assert 0.3 * float(choice.tuned) ** power == pytest.approx(0.01, rel=0.1)
    assert choice.tuned == made[-1]
    assert len(made) <= 5
    assert runs.folder(variant, choice, 3).parts[-3:] == ("0.1", f"tuned_{choice.tuned}", "seed_3")


def test_failed_tuning_lists_its_attempts(tmp_path):
    variant = Variant("a", "a", ("--x={tuned}",), density=0.01, start=1.0)
    made = []
    runs = Runs(tmp_path / "x.yaml", tmp_path, "loss", [], None)
    with pytest.raises(SystemExit, match=r"a: no value reaches 0.01 within 10% \(1: 0.5, 7.071: 0.5, .*: 0.5\)"):
        runs.tune(variant, None, lambda *_: made.append(1) or Outcome(0.0, 0.5, 1.0, 1.0, 1.0))
    assert len(made) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must hold lines 'label: arguments'"),
        ("a: [", "cannot be read"),
        ("mode: Min\nvariants: {a: --x}", "Invalid mode 'Min'. Must be min or max"),
        ("seeds: 1\nvariants: {a: --x}", "Invalid seeds 1. Must be a list of numbers"),
        ("seeds: []\nvariants: {a: --x}", r"Got no seeds\. Give at least one"),
        ("only: a\nvariants: {a: --x}", r"Invalid only 'a'\. Must be a list of variants: \[dense\]"),
        ("densities: [2]\nvariants: {a: --x}", r"Invalid densities \[2\]"),
        ("wrong: 1\nvariants: {a: --x}", "Unknown keys"),
        ("seeds: [1, 1, 2]\nvariants: {a: --x}", r"The seeds \[1\] are given more than once"),
        ("densities: [0.1, 0.1]\nvariants: {a: --x}", r"The densities \[0.1\] are given more than once"),
        ("metric: [a]\nvariants: {a: --x}", r"Got metric \['a'\]"),
        ("grid: {model.rate: [1, 2]}\nvariants: {a: --x}", "Invalid grid {'model.rate': "),
        ("grid: foo=1,1\nvariants: {a: --x}", "Invalid grid 'foo=1,1'"),
        ("grid: foo=1,2\nmetric: val/perplexity\nvariants: {a: --x}", "The best value of val/perplexity is unclear"),
        ("a: --x\na: --y", r"\['a'\] are given more than once"),
        ("'a,b': --x\na b: --y", "The runs of 'a,b', 'a b' would share one folder"),
        ("a: --seed_everything=5", "Got '--seed_everything=5', which the comparison sets itself"),
        ("a: --trainer.logger.save_dir=x", "which the comparison sets itself"),
        ("a: --trainer.log_every_n_steps=5", "which the comparison sets itself"),
        ("λ: --x".encode("utf-16"), "cannot be read"),
    ],
)
def test_an_invalid_file_raises(content, message, tmp_path, call, capsys):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "variants.yaml").write_bytes(content)
    given = [] if b"metric:" in content else ["--metric", "accuracy"]
    with pytest.raises(SystemExit) as ended:
        call(compare.main, DEMO, *given, "--variants", tmp_path / "variants.yaml")
    assert re.search(message, f"{ended.value}\n{capsys.readouterr().err}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "a"], "Invalid variant 'a'. Must be 'LABEL: ARGUMENTS'"),
        (["--variant", "a: --x", "--variant", "a: --y"], "['a'] are given more than once"),
        (["--only", "b"], "Got no variants. Give a --variant"),
        (["--variant", "a: --x", "--only", "b"], "Unknown variants ['b']"),
        (["--variant", "a: --x", "--", "--seed_everything=1"], "which the comparison sets itself"),
        (["--variant", "a: --x.y=B", "--", "--x.y.z=1"], "which the class of the variant 'a' would discard"),
        (["nowhere.yaml", "--variant", "a: --x"], "There is no recipe nowhere.yaml"),
    ],
)
def test_an_invalid_command_exits_with_a_message(arguments, message, call, capsys):
    recipe = [] if arguments[0].endswith(".yaml") else [DEMO]
    with pytest.raises(SystemExit):
        call(compare.main, "--metric", "accuracy", *recipe, *arguments)
    assert message in capsys.readouterr().err


CHOICE = Choice(None, None)


@pytest.fixture
def without_training(monkeypatch, tmp_path):
    """Return runs of a recipe that only create their log folder, and the list of their commands."""
    made = []

    def fit(command):
        (folder,) = [word.partition("=")[2] for word in command if word.startswith("--trainer.logger.save_dir=")]
        [recipe] = [word.partition("=")[2] for word in command if word.startswith("--config=")]
        assert Path(recipe).parent == Path(folder)  # a copy, which later changes of the recipe do not reach
        made.append([*command, Path(recipe).read_text()])
        return 0, ""

    monkeypatch.setattr("recipes.compare.runs.read_outcome", lambda folder, metric: folder)
    monkeypatch.setattr("recipes.compare.runs._run", fit)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "x.yaml").write_text("model: {rate: 0.1} # a recipe")
    return Runs(tmp_path / "recipe" / "x.yaml", tmp_path, "loss", [], None), made


def test_a_kept_run_of_another_recipe_is_not_reused(without_training):
    (runs, made), variant = without_training, Variant("a", "a", ("--x=1",))
    folder = runs.run(variant, CHOICE, 1)
    assert made[0][-1] == (folder / "recipe.yaml").read_text()
    runs.config.write_text("model: {rate: 0.1} # said otherwise")
    assert runs.run(variant, CHOICE, 1) == folder
    runs.config.write_text("model: {rate: 0.2}")
    with pytest.raises(SystemExit, match=r"holds a run of another x.yaml \(see its recipe.yaml\)"):
        runs.run(variant, CHOICE, 1)


def test_a_kept_run_with_other_arguments_is_not_reused(without_training, tmp_path):
    runs, _ = without_training
    first, other = Variant("c d", "c d", ("--x=1",)), Variant("c-d", "c-d", ("--x=2",))
    folder = runs.run(first, CHOICE, 1)
    assert runs.run(first, CHOICE, 1) == folder
    assert "--x=1" in (folder / "arguments.txt").read_text()
    with pytest.raises(SystemExit, match="holds a run with other arguments"):
        runs.run(other, CHOICE, 1)
    away = runs.run(Variant("..", "..", ("--x=3",)), CHOICE, 1)
    assert away.is_relative_to(tmp_path / "recipe")
    assert away != folder
    assert runs.folder(first, Choice("/x,/y", None), 1).is_relative_to(tmp_path / "recipe")
    assert runs.folder(first, Choice("1", None), 1).parent != folder  # a grid value that equals a seed


def test_files_of_a_killed_comparison_do_not_disturb(without_training, tmp_path):
    (runs, made), variant = without_training, Variant("a", "a", ("--x=1",))
    orphan = tmp_path / "recipe" / "a" / "seed_1.unfinished-00000000"
    orphan.mkdir(parents=True)
    folder = runs.run(variant, CHOICE, 1)
    assert orphan.name not in str(made[0])
    orphan.mkdir()  # the training continues and writes to the folder again
    assert runs.run(variant, CHOICE, 1) == folder
    assert len(made) == 1
    assert sorted(file.name for file in folder.iterdir()) == ["arguments.txt", "recipe.yaml"]
    assert [runs.count_finished(variant, seeds) for seeds in ([1, 2], [2])] == [1, 0]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_a_comparison_stops_its_training(number, tmp_path):
    (tmp_path / "x.yaml").touch()
    (tmp_path / "recipes.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        f"others = pathlib.Path({str(tmp_path)!r}) / 'pids'\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "others.with_suffix('.new').write_text(f'{os.getpid()} {child.pid}')\n"
        "others.with_suffix('.new').rename(others)\n"
        "time.sleep(100)\n"
    )
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # ignored under nohup
        "import recipes.compare.runs as runs\n"
        f"runs.Runs.command = lambda *_: [sys.executable, {str(tmp_path / 'recipes.py')!r}]\n"
        "from recipes.compare.__main__ import main\n"
        f"sys.argv = ['compare', {str(tmp_path / 'x.yaml')!r}, '--metric', 'a', '--variant', 'a: --x',\n"
        f"            '--output', {str(tmp_path / 'out')!r}]\n"
        "main()\n"
    )
    compared = subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "pids").exists, "the training starts")
    compared.send_signal(number)
    _, printed = compared.communicate(timeout=60)
    assert "Stopped. Finished runs are kept" in printed
    assert "Traceback" not in printed
    for process in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda process=process: not is_running(process), "the training ends")


def test_two_comparisons_do_not_make_runs_in_one_folder(tmp_path):
    first, second = (Runs(tmp_path / "x.yaml", tmp_path / "out", "loss", [], None) for _ in range(2))
    with first.locked(), pytest.raises(SystemExit, match="Another comparison is running in"), second.locked():
        pass
    with second.locked():
        pass


def test_the_command_of_a_run_does_not_write_to_the_folder_of_kept_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    runs = Runs(Path("recipes/a/x.yaml"), tmp_path, "loss", ["--data.root=d"], None)
    command = runs.command_to_repeat(Variant("a b", "a b", ("--x=[1, 2]",)), CHOICE, 3)
    assert command == (
        "OMP_NUM_THREADS=2 python -m recipes fit --config=recipes/a/x.yaml --seed_everything=3 "
        "--data.root=d '--x=[1, 2]'"
    )


def test_a_resumed_run_has_several_files(tmp_path):
    for step in range(2):
        with SummaryWriter(tmp_path / "version_0", filename_suffix=f".{step}") as writer:
            writer.add_scalar("loss", 0.5, step)
    assert read(tmp_path).steps == {"loss": [0, 1]}


def test_a_folder_with_several_runs_is_rejected(tmp_path):
    for name in ("version_0", "version_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").touch()
    with pytest.raises(SystemExit, match=r"holds 2 runs \(version_0, version_1\). It must hold one run"):
        read(tmp_path)


def test_pictures_have_a_line_per_variant_and_labels():
    outcomes = {
        Variant(f"{name}, {density:g}", name, (), density): [
            Outcome(loss, density, 1e8 * density, 1e8, 0.03) for loss in some
        ]
        for name, some in VALUES.items()
        for density in (0.01, 0.1)
    }
    (axes,) = draw_volume(outcomes, "val/loss").axes
    assert [container.get_label() for container in axes.containers] == list(VALUES)
    for container, (_, some) in zip(axes.containers, VALUES.items(), strict=True):
        mean = pytest.approx(sum(some) / 3)
        assert container.lines[0].get_xydata().tolist() == [[1.0, mean], [10.0, mean]]
    values = {"val/loss": [2.0, 1.0], "sparse/error_norm": [3.0] * 1000, "sparse/density": [0.1] * 1000}
    sparse = Run({name: list(range(1000)) for name in values} | {"val/loss": [9, 19]}, values)
    dense = Run({"val/loss": [9, 19]}, {"val/loss": [1.5, 0.5]})
    figure = draw_steps({"sparse": [sparse, sparse], "dense": [dense]}, "val/loss")
    metric, norm, total, density = figure.axes
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 1, 1]
    assert metric.lines[0].get_xydata().tolist() == [[9.0, 2.0], [19.0, 1.0]]
    assert norm.lines[0].get_ydata().tolist() == [3.0] * 200
    assert total.lines[0].get_ydata()[-1] == pytest.approx(9 * 998)  # the mean of the last five steps
    assert density.get_xlabel() == "step"
    assert len(draw_steps({"dense": [dense]}, "val/loss").axes) == 1
