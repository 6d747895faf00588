"""The experiments with logistic regression: the objective, the training, curves, bounds, the command."""

import sys
from math import ceil, log2

import numpy as np
import pandas as pd
import pytest
import scipy.io
import torch
from sklearn.datasets import dump_svmlight_file
from torch.nn.functional import softplus

from lightning_sparse import Dense, HardThreshold, TopK
from recipes import MissingDataError
from recipes.logistic_regression import contraction, report
from recipes.logistic_regression.__main__ import main
from recipes.logistic_regression.bounds import compute_bounds, estimate_noise, limit_learning_rate
from recipes.logistic_regression.curves import Setting, compute_curves, tune_threshold_to_density
from recipes.logistic_regression.data import URLS, load
from recipes.logistic_regression.objective import Objective, bound_error, find_minimiser
from recipes.logistic_regression.training import draw_examples, shards, training, tune_threshold
from tests.integration.recipes.recipe_runs import DATA, needs_data

KEYS = ["dataset", "sharding", "method", "seed", "iteration"]


def classified(num_examples=60):
    """Features of different scales and labels that no plane separates."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_examples, 12, generator=generator, dtype=torch.float64)
    features *= torch.linspace(0.5, 2, 12, dtype=torch.float64)
    noise = torch.randn(num_examples, generator=generator, dtype=torch.float64)
    return features, torch.where(features.sum(dim=1) + 3 * noise > 0, 1.0, -1.0).double()


@pytest.fixture(scope="module")
def objective():
    return Objective(*classified())


def points(num_elements, number=5):
    return torch.randn(number, num_elements, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_hand(objective, x, rows=slice(None)):
    margins = objective.labels[rows] * (objective.features[rows] @ x)
    return softplus(-margins).mean() + objective.l2 / 2 * x.square().sum()


class TestObjective:
    def test_value_and_derivatives(self, objective):
        for x in points(objective.num_elements):
            x.requires_grad_()
            value = by_hand(objective, x)
            (gradient,) = torch.autograd.grad(value, x)
            x = x.detach()
            assert objective.value(x) == pytest.approx(value.item(), rel=1e-12)
            torch.testing.assert_close(objective.gradient(x), gradient)
            x.requires_grad_()
            for row, example in zip(objective.gradients(x.detach(), torch.tensor([3, 0, 3])), (3, 0, 3), strict=True):
                (gradient,) = torch.autograd.grad(by_hand(objective, x, slice(example, example + 1)), x)
                torch.testing.assert_close(row, gradient)

    def test_smoothness_equals_the_curvature_at_zero(self, objective):
        zero = torch.zeros(objective.num_elements, dtype=torch.float64)
        at_zero = torch.linalg.eigvalsh(torch.autograd.functional.hessian(lambda y: by_hand(objective, y), zero))
        assert objective.smoothness == pytest.approx(at_zero[-1].item())
        assert objective.l2 == pytest.approx(objective.data_smoothness / 1e4)

    def test_minimum_is_certified(self, objective):
        x = find_minimiser(objective)
        assert bound_error(objective, x) < 1e-12
        for offset in points(objective.num_elements):
            above = objective.value(x + 0.1 * offset) - objective.value(x)
            assert 0 < above <= bound_error(objective, x + 0.1 * offset)


class TestShards:
    def test_each_example_belongs_to_one_worker(self):
        labels = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
        for sharding in ("shuffled", "sorted"):
            assert sorted(shards(labels, 3, sharding).flatten().tolist()) == list(range(6))
        assert labels[shards(labels, 2, "sorted")].tolist() == [[-1.0] * 3, [1.0] * 3]
        many = torch.tensor([1.0, -1.0]).repeat(50)
        assert (many[shards(many, 2, "shuffled")].mean(dim=1).abs() < 0.5).all()

    def test_a_worker_draws_from_its_own_examples(self):
        own = torch.arange(12).view(3, 4)
        drawn = draw_examples(own, 200, seed=1)
        for worker in range(3):
            assert set(drawn[:, worker].tolist()) == set(own[worker].tolist())
        assert torch.equal(drawn, draw_examples(own, 200, seed=1))
        assert not torch.equal(drawn, draw_examples(own, 200, seed=2))


class TestTraining:
    @pytest.fixture
    def drawn(self, objective):
        return draw_examples(shards(objective.labels, 4, "sorted"), 80, seed=1)

    def test_sending_everything_equals_sgd_on_the_mean_gradient(self, objective, drawn):
        x = torch.zeros(objective.num_elements, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=0.1)
        for examples in drawn:
            optimizer.zero_grad()
            by_hand(objective, x, examples).backward()
            optimizer.step()
        *others, last = training(objective, drawn, Dense(), 0.1, every=30)
        torch.testing.assert_close(last.x, x.detach())
        assert [state.iteration for state in (*others, last)] == [0, 30, 60, 80]
        assert last.sent == 80 * 4 * objective.num_elements
        assert not last.residuals.any()

    @pytest.mark.parametrize("sparsifier", [TopK(0.2), HardThreshold(threshold=1.5)], ids=["top_k", "hard_threshold"])
    def test_weights_plus_residuals_contain_all_gradients(self, objective, drawn, sparsifier):
        total = torch.zeros(objective.num_elements, dtype=torch.float64)
        largest = []
        for state, examples in zip(training(objective, drawn, sparsifier, 0.1, every=1), drawn, strict=False):
            torch.testing.assert_close(state.x - 0.1 * state.residuals.mean(dim=0), -0.1 * total)
            total += objective.gradients(state.x, examples).mean(dim=0)
            largest.append(state.residuals.abs().max().item())
        assert max(largest) > 1.0
        assert isinstance(sparsifier, TopK) or max(largest) < 1.5

    def test_vectorized_workers_equal_single_workers(self, objective, drawn):
        # Without ties, Top-k of the model, which selects for each worker in turn, equals Top-k of each layer.
        *_, together = training(objective, drawn, TopK(0.2), 0.1, every=80)
        *_, one_by_one = training(objective, drawn, TopK(0.2, granularity="model"), 0.1, every=80)
        assert together.sent == one_by_one.sent == 80 * 4 * 2
        torch.testing.assert_close(together.x, one_by_one.x)

    @pytest.mark.parametrize("budget", [100, 1000])
    def test_tuned_threshold_sends_the_budget(self, objective, drawn, budget):
        threshold = tune_threshold(objective, drawn, 0.1, budget)
        *_, last = training(objective, drawn, HardThreshold(threshold=threshold), 0.1, every=80)
        assert last.sent == pytest.approx(budget, rel=0.02)  # a single coordinate is 1 %

    def test_an_impossible_budget_raises(self, objective, drawn):
        with pytest.raises(ValueError, match=r"Invalid budget=3840\. Must be at least 1 and below 3840"):
            tune_threshold(objective, drawn, 0.1, drawn.numel() * objective.num_elements)


class TestCurves:
    @pytest.fixture
    def setting(self, objective):
        return Setting(objective, shards(objective.labels, 4, "shuffled"), 1 / objective.smoothness, 200, 20)

    def test_training_records_these_numbers(self, setting):
        d = setting.objective.num_elements
        setting = setting._replace(learning_rate=0.1)
        threshold = tune_threshold_to_density(setting, 0.2)
        frame = compute_curves(setting, ["dense", "top_k", "hard_threshold"], [1, 2], 0.2, threshold)
        assert len(frame) == 3 * 2 * 11
        assert (frame["suboptimality"] > 0).all()
        first = frame[frame["iteration"] == 0]
        assert first["suboptimality"].nunique() == 1
        last = frame[frame["iteration"] == 200].set_index(["method", "seed"])
        assert (last["epoch"] == 200 * 4 / 60).all()
        assert (last["suboptimality"] < first["suboptimality"].iloc[0] / 3).all()
        assert (last.loc["dense", "bits"] == 200 * d * 32).all()
        assert (last.loc["top_k", "bits"] == 200 * 2 * (32 + ceil(log2(d)))).all()
        assert last.loc["top_k", "density"].to_numpy() == pytest.approx(2 / d)
        assert last.loc["hard_threshold", "density"].mean() == pytest.approx(2 / d, rel=0.1)
        own = frame[frame["method"] == "hard_threshold"]
        assert (own["squared_error"] <= own["squared_error_bound"]).all()
        assert (own["squared_error_bound"] == d * threshold**2).all()
        assert frame[frame["method"] == "top_k"]["squared_error_bound"].isna().all()

    def test_measured_errors_stay_below_the_bound(self, setting):
        objective = setting.objective
        slower = setting._replace(learning_rate=limit_learning_rate(objective, setting.learning_rate))
        assert slower.learning_rate == pytest.approx(setting.learning_rate / 4)
        assert limit_learning_rate(objective, 1e-3) == 1e-3
        problem, frame = compute_bounds(slower, [0.0, 0.5], [1, 2])
        final = frame[frame["iteration"] == 200].groupby("threshold")[["density", "squared_shift"]].mean()
        assert final.loc[0.0].tolist() == [1, 0]
        assert 0 < final.loc[0.5, "density"] < 1
        assert 0 < final.loc[0.5, "squared_shift"] < objective.num_elements * 0.5**2
        assert problem.smoothness == objective.smoothness
        assert (frame["average_suboptimality"] <= frame["bound"]).all()
        terms = frame[["start_term", "noise_term", "threshold_term"]]
        assert frame["bound"].to_numpy() == pytest.approx(terms.sum(axis=1).to_numpy())
        start = objective.value(torch.zeros(objective.num_elements, dtype=torch.float64))
        first = frame[frame["iteration"] == 20]["average_suboptimality"]
        assert first.to_numpy() == pytest.approx(start - objective.value(find_minimiser(objective)))
        with pytest.raises(ValueError, match="for the bound of this problem"):
            compute_bounds(setting, [0.0], [1])

    def test_noise_of_single_examples_and_of_classes(self, objective):
        x = points(objective.num_elements, 1)[0]
        each = shards(objective.labels, 60, "shuffled")
        noise, heterogeneity = estimate_noise(objective, each, x, seed=1)
        gradients = objective.gradients(x, torch.arange(60))
        assert noise == pytest.approx(0, abs=1e-12)
        assert heterogeneity == pytest.approx(float((gradients - objective.gradient(x)).square().sum(dim=1).mean()))
        noise, heterogeneity = estimate_noise(objective, shards(objective.labels, 2, "sorted"), x, seed=1)
        own = [gradients[examples] for examples in shards(objective.labels, 2, "sorted")]
        exact = sum(float(gradient.var(dim=0, correction=0).sum()) for gradient in own) / 2
        assert noise == pytest.approx(exact, rel=0.2)  # from 100 draws per worker
        assert heterogeneity == pytest.approx(float((own[0].mean(0) - own[1].mean(0)).square().sum()) / 4, rel=0.3)


def _term(objective, frame, density):
    own = shards(objective.labels, 4, frame["sharding"].iloc[0])
    minimiser = find_minimiser(objective)
    gradients = [objective.gradients(minimiser, examples) for examples in own]
    noise = sum(float(gradient.var(dim=0, correction=0).sum()) for gradient in gradients) / 4
    at_minimiser = sum(float(gradient.mean(dim=0).square().sum()) for gradient in gradients) / 4
    return pytest.approx(at_minimiser / density**2 + noise / density, rel=0.2)  # σ² from 100 draws per worker


def test_residuals_are_compared_with_the_error_term_of_remark_8(objective, monkeypatch):
    monkeypatch.setattr(contraction, "WORKERS", 4)
    frames = {sharding: contraction.measure(objective, sharding, seeds=[1]) for sharding in ("shuffled", "sorted")}
    for frame in frames.values():
        top_k = frame[frame["method"] == "Top-k"]
        assert list(top_k["density"]) == pytest.approx([1 / 12, 2 / 12])
        assert top_k["term"].to_numpy() == _term(objective, frame, top_k["density"].to_numpy())
        assert top_k["squared_error"].is_monotonic_decreasing
    assert len(contraction.draw(pd.concat(frames.values())).axes) == 2


@pytest.fixture
def written(tmp_path):
    """A data folder whose mushrooms file holds 62 examples."""
    features, labels = classified(62)
    (tmp_path / "libsvm").mkdir()
    dump_svmlight_file(features.numpy(), labels.numpy() + 1, str(tmp_path / "libsvm" / "mushrooms"), zero_based=False)
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["recipes.logistic_regression", *map(str, arguments)])
    main()


SMALL = ("--dataset=mushrooms", "--workers=4", "--iterations=40", "--every=10", "--density=0.2")


class TestCommand:
    def test_runs_are_reproducible_and_figures_need_only_csv(self, written, monkeypatch, capsys):
        once, again = written / "once", written / "again"
        arguments = ("--root", written, *SMALL, "--seeds", 1, 2, "--shardings", "sorted")
        run(monkeypatch, *arguments, "--output", once)
        with monkeypatch.context() as without_report:
            without_report.setattr("recipes.logistic_regression.__main__.report", lambda folder: None)
            run(monkeypatch, *arguments, "--output", again)
        printed = capsys.readouterr().out
        for name in ("curves.csv", "bound.csv"):
            assert (once / name).read_bytes() == (again / name).read_bytes()
        frame = pd.read_csv(once / "curves.csv")
        measured = {"epoch", "suboptimality", "bits", "squared_error", "density", "threshold", "squared_error_bound"}
        assert {*frame.columns} == {*KEYS, *measured}
        assert not frame.duplicated(KEYS).any()
        assert len(frame) == 3 * 2 * 5
        assert printed.count("mushrooms: N = 60, d = 12") == 2

        drawn = {name: (once / name).read_bytes() for name in ("curves.png", "bound.png")}
        for name in drawn:
            (once / name).unlink()
        (written / "libsvm" / "mushrooms").unlink()
        monkeypatch.setattr(sys, "argv", ["report", str(once)])
        report.main()
        assert {name: (once / name).read_bytes() for name in drawn} == drawn
        table = capsys.readouterr().out
        assert table in printed
        assert table.count("\n| sorted | ") == 6

    def test_a_given_threshold_is_used(self, written, monkeypatch):
        arguments = ("--threshold", 0.75, "--seeds", 1, "--methods", "hard_threshold")
        monkeypatch.setattr("recipes.logistic_regression.__main__.report", lambda folder: None)
        run(monkeypatch, "--root", written, *SMALL, *arguments, "--output", written / "given")
        frame = pd.read_csv(written / "given" / "curves.csv")
        assert set(frame["threshold"]) == {0.75}
        assert set(frame["sharding"]) == {"shuffled", "sorted"}
        assert set(frame["method"]) == {"hard_threshold"}

    def test_missing_data_exit_with_a_single_line(self, tmp_path, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setitem(URLS, "gisette", "http://127.0.0.1:1/gisette_scale.bz2")
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "--root", tmp_path, "--output", tmp_path / "out")
        assert "\n" not in ended.value.code
        assert f"Put the file from http://127.0.0.1:1/gisette_scale.bz2 at {tmp_path}/libsvm" in ended.value.code
        assert not (tmp_path / "out").exists()


class TestData:
    def test_svmlight(self, written):
        features, labels = classified(62)
        examples = load(written, "mushrooms")
        torch.testing.assert_close(examples.features, features)
        assert torch.equal(examples.labels, labels)  # from 0 and 2

    def test_madelon_is_scaled(self, tmp_path):
        (tmp_path / "libsvm").mkdir()
        values = np.arange(20, dtype=np.uint16).reshape(5, 4) ** 2
        labels = np.array([[1], [-1], [1], [1], [-1]], dtype=np.int16)
        scipy.io.savemat(tmp_path / "libsvm" / "madelon.mat", {"X": values, "Y": labels})
        examples = load(tmp_path, "madelon")
        assert examples.features.dtype == torch.float64
        assert examples.features.mean(dim=0).numpy() == pytest.approx(0, abs=1e-12)
        assert examples.features.var(dim=0, correction=0).numpy() == pytest.approx(1)
        assert examples.labels.tolist() == [1, -1, 1, 1, -1]
        unit = load(tmp_path, "madelon_unit")
        assert unit.features.aminmax(dim=0).min.tolist() == [0] * 4
        assert unit.features.aminmax(dim=0).max.numpy() == pytest.approx(1)
        assert torch.corrcoef(torch.stack([unit.features[:, 2], examples.features[:, 2]]))[0, 1] == pytest.approx(1)

    @pytest.mark.parametrize(
        ("dataset", "content"),
        [
            ("mushrooms", "1 1:0.5\n2 1:word\n"),
            ("mushrooms", "1 1:0.5\n2 1:1\n3 1:1\n"),
            ("madelon", "no such format"),
            ("gisette", "not compressed"),
        ],
    )
    def test_an_unreadable_file_raises(self, tmp_path, dataset, content):
        path = tmp_path / "libsvm" / URLS[dataset].rsplit("/", 1)[1]
        path.parent.mkdir()
        path.write_text(content)
        with pytest.raises(MissingDataError, match=rf"^\S+{path.name} cannot be read: .*Delete it") as raised:
            load(tmp_path, dataset)
        assert "\n" not in str(raised.value)

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("dataset", "shape"),
        [
            pytest.param("madelon", (2600, 500), marks=needs_data("libsvm/madelon.mat")),
            pytest.param("mushrooms", (8124, 112), marks=needs_data("libsvm/mushrooms")),
            pytest.param("a9a", (32561, 123), marks=needs_data("libsvm/a9a")),
        ],
    )
    def test_real_data(self, dataset, shape):
        examples = load(DATA, dataset)
        assert examples.features.shape == shape
        objective = Objective(*examples)
        assert bound_error(objective, find_minimiser(objective)) < 1e-12
