"""Lemma 3 and the bounds as laws of sequences and of trainings in plain tensors with known noise."""

from math import exp, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse import HardThreshold, LayerLayout, TopK
from lightning_sparse.theory import (
    Problem,
    convex_bound,
    convex_contraction_rate,
    convex_rate,
    measured_noise,
    nonconvex_bound,
    nonconvex_contraction_bound,
    optimal_threshold,
    residual_statistics,
    squared_error_bound,
    strongly_convex_contraction_rate,
    strongly_convex_rate,
    threshold_from_estimates,
    top_k_contraction,
    top_k_squared_error_bound,
)


@st.composite
def sequences(draw):
    steps, size = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    numbers = st.floats(-100, 100, width=32)
    flat = draw(st.lists(numbers, min_size=steps * size, max_size=steps * size))
    return torch.tensor(flat).view(steps, size)


def selected_by(sparsifier, sequence):
    layout = LayerLayout(("all",), (sequence.shape[1],))
    sent = torch.zeros_like(sequence, dtype=torch.bool)
    for step, row in enumerate(sequence):
        sent[step, sparsifier.select(row, layout).indices] = True
    return sent


def total_error(sequence, sent):
    return float((sequence.double() ** 2)[~sent].sum())


@given(sequences(), st.data())
def test_lemma_3_the_threshold_leaves_the_least_of_all_choices_of_equal_budget(sequence, data):
    budget = data.draw(st.integers(1, sequence.numel()))
    sent = selected_by(HardThreshold(threshold=optimal_threshold(sequence, budget)), sequence)
    assert int(sent.sum()) >= budget
    error = total_error(sequence, sent)
    # Coordinates of the last magnitude beyond the budget stay.
    last = optimal_threshold(sequence, budget)
    within = error + (int(sent.sum()) - budget) * last**2
    other = torch.zeros(sequence.numel(), dtype=torch.bool)
    other[data.draw(st.permutations(range(sequence.numel())))[:budget]] = True
    assert within <= total_error(sequence, other.view_as(sequence)) * (1 + 1e-9) + 1e-9


class Quadratic:
    """f_i(x) = ½ (x − c_i)ᵀ A (x − c_i), A diagonal, and Gaussian noise of known variance on every gradient."""

    n, d = 4, 30

    def __init__(self, seed, noise=0.2):
        self.generator = generator = torch.Generator().manual_seed(seed)
        self.deviation = sqrt(noise / self.d)
        self.curvature = torch.rand(self.d, generator=generator, dtype=torch.float64) + 0.05
        self.centres = 0.5 * torch.randn(self.n, self.d, generator=generator, dtype=torch.float64)
        self.minimiser = self.centres.mean(dim=0)
        apart = ((self.curvature * (self.centres - self.minimiser)) ** 2).sum(dim=1).mean()
        self.problem = Problem(float(self.curvature.max()), self.n, noise, float(apart))

    def excess(self, x):
        """f(x) − f*."""
        return 0.5 * float((self.curvature * (x - self.minimiser) ** 2).sum())

    def gradient(self, x):
        return self.curvature * (x - self.minimiser)

    def draws(self, x):
        noise = torch.randn(self.n, self.d, generator=self.generator, dtype=torch.float64) * self.deviation
        return self.curvature * (x - self.centres) + noise

    def train(self, sparsifier, rate, steps, start=3.0):
        x = self.minimiser + start / sqrt(self.d)
        errors, layout = torch.zeros(self.n, self.d, dtype=torch.float64), LayerLayout(("x",), (self.d,))
        excess = squared_gradient = worst_error = largest = 0.0
        for _ in range(steps):
            excess += self.excess(x) / steps
            squared_gradient += float((self.gradient(x) ** 2).sum()) / steps
            gradients = self.draws(x)
            largest = max(largest, float((gradients**2).sum(dim=1).max()))
            errors += gradients
            average = torch.zeros(self.d, dtype=torch.float64)
            for error in errors:
                indices, values = sparsifier.select(error, layout)
                average[indices] += values / self.n
                error[indices] = 0
            worst_error = max(worst_error, float((errors**2).sum(dim=1).max()))
            x = x - rate * average
        return excess, squared_gradient, worst_error, largest


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.05, 1), st.floats(0.0, 3.0), st.sampled_from([20, 200]))
def test_no_training_exceeds_its_bounds(seed, share_of_rate, threshold, steps):
    quadratic = Quadratic(seed)
    for is_convex in (True, False):
        rate = share_of_rate * quadratic.problem.largest_learning_rate(is_convex=is_convex)
        excess, squared_gradient, worst_error, _ = quadratic.train(HardThreshold(threshold=threshold), rate, steps)
        assert worst_error <= squared_error_bound(quadratic.d, threshold)
        bound = squared_error_bound(quadratic.d, threshold, rate)

        if is_convex:
            assert excess <= convex_bound(quadratic.problem, 9.0, rate, steps, bound)
        else:
            start = quadratic.minimiser + 3.0 / sqrt(quadratic.d)
            assert squared_gradient <= nonconvex_bound(quadratic.problem, quadratic.excess(start), rate, steps, bound)


def test_measurements_match_the_known_noise():
    quadratic = Quadratic(3, noise=2.0)
    x = quadratic.minimiser + 1
    draws = torch.stack([quadratic.draws(x) for _ in range(4000)], dim=1)  # (workers, draws, d)
    noise, heterogeneity = measured_noise(list(draws))
    assert noise == pytest.approx(2.0, rel=0.02)
    assert heterogeneity == pytest.approx(quadratic.problem.heterogeneity, rel=0.05)
    few = [measured_noise(list(draws[:, 2 * place : 2 * place + 2]))[1] for place in range(2000)]
    assert sum(few) / len(few) == pytest.approx(quadratic.problem.heterogeneity, rel=0.05)  # without bias
    with pytest.raises(ValueError, match=r"Got 1 draws of a worker\. Must be at least 2"):
        measured_noise([draws[0, :1]])


def test_bounds_have_the_constants_of_the_docs():
    """The constants are those of docs/concepts/theory.md; V, the variance of the mean of four workers, is 2."""
    problem = Problem(smoothness=2.0, num_workers=4, noise=3.0, heterogeneity=5.0, relative_noise=1.0)
    # "What is kept": B = γ² d λ², and γ² 4 (1 − δ) G² / δ² for Top-k.
    assert squared_error_bound(7, 0.5, 0.1) == pytest.approx(0.01 * 7 * 0.25)
    assert top_k_squared_error_bound(0.5, 3.0, 0.1) == pytest.approx(4 * 0.01 * 0.5 * 3 / 0.25)
    # "Convex f": 2 ‖x_0 − x*‖² / (γ T) + 2 γ V + 4 L B.
    assert convex_bound(problem, 7.0, 0.05, 10, 0.3) == pytest.approx(2 * 7 / 0.5 + 2 * 0.05 * 2 + 4 * 2 * 0.3)
    # "Any f": 4 (f(x_0) − f*) / (γ T) + 2 L γ V + 2 L² B.
    assert nonconvex_bound(problem, 7.0, 0.05, 10, 0.3) == pytest.approx(4 * 7 / 0.5 + 2 * 2 * 0.05 * 2 + 2 * 4 * 0.3)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.05, 1), st.sampled_from([0.1, 0.3, 0.7, 1.0]), st.sampled_from([20, 200]))
def test_no_training_with_top_k_exceeds_theorem_7_and_the_bound_of_its_residual(seed, share_of_rate, density, steps):
    quadratic = Quadratic(seed)
    rate = share_of_rate * density / (4 * quadratic.problem.smoothness)  # M = C = 0
    _, squared_gradient, worst_error, largest = quadratic.train(TopK(density), rate, steps)
    assert worst_error <= top_k_squared_error_bound(density, largest) + 1e-12
    start = quadratic.excess(quadratic.minimiser + 3.0 / sqrt(quadratic.d))
    assert squared_gradient <= nonconvex_contraction_bound(quadratic.problem, start, rate, steps, density)


@given(st.integers(1, 100), st.floats(0, 10), st.floats(0, 10), st.floats(0, 3))
def test_theorems_6_and_7_agree_on_the_error_at_the_threshold_from_estimates(k, noise, heterogeneity, relative_noise):
    d, rate = 100, 1e-4
    problem = Problem(2.0, 4, noise, heterogeneity, relative_noise)
    threshold = threshold_from_estimates(k, d, noise, heterogeneity, relative_noise)
    of_noise = 2 * rate * problem.smoothness * problem.variance_of_mean
    absolute = nonconvex_bound(problem, 0.0, rate, 1, squared_error_bound(d, threshold, rate)) - of_noise
    contraction = nonconvex_contraction_bound(problem, 0.0, rate, 1, k / d) - 2 * of_noise
    assert absolute == pytest.approx(contraction, rel=1e-6, abs=1e-12)


WITH_ALL = Problem(2.0, 4, noise=3.0, relative_noise=1.0, gradients_at_minimiser=5.0, strong_convexity=0.5)


def test_rates_are_those_of_the_paper():
    """σ² + M D is 8, R₀ is 9, T is 100, v² is 6, δ is 0.5."""
    # Theorem 4: 2 · 9 · 1.25 exp(−50 / 24) + 8 / 200 + 12 / 2500.
    assert strongly_convex_rate(WITH_ALL, 9.0, 100, 6.0) == pytest.approx(22.5 * exp(-50 / 24) + 0.04 + 0.0048)
    # Remark 6: 2 · 9 · 2 √1.5 exp(−25 / (32 √7.5)) + 0.04 + 2 (5 · 1.5 + 1.5) / (0.25 · 2500).
    expected = 36 * sqrt(1.5) * exp(-25 / (32 * sqrt(7.5))) + 0.04 + 0.0288
    assert strongly_convex_contraction_rate(WITH_ALL, 9.0, 100, 0.5) == pytest.approx(expected)
    # Theorem 5: √(72 / 400) + (48 / 8 + 2 · 1.25) · 0.09.
    assert convex_rate(WITH_ALL, 9.0, 100, 6.0) == pytest.approx(sqrt(0.18) + 8.5 * 0.09)
    # Remark 7: (2 √6 · 0.09)^(2/3) + 2 · 0.09.
    expected = (0.18 * sqrt(6)) ** (2 / 3) + 0.18
    assert convex_rate(Problem(2.0, 4, noise=0.0), 9.0, 100, 6.0) == pytest.approx(expected)
    # Remark 8: √0.18 + (2 √1.5 / 0.5 + 8 · 9 / (0.25 · 8)) · 0.09.
    expected = sqrt(0.18) + (4 * sqrt(1.5) + 36) * 0.09
    assert convex_contraction_rate(WITH_ALL, 9.0, 100, 0.5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("problem", "growth"),
    [
        (Problem(1.0, 4, noise=1.0), 2),
        (Problem(1.0, 4, noise=1e-9, relative_noise=1.0, gradients_at_minimiser=5.0), 4),
    ],
)
def test_a_contraction_pays_twice_for_its_density_where_workers_differ(problem, growth):
    rates = [convex_contraction_rate(problem, 1e12, 1, delta) for delta in (1e-4, 5e-5)]
    assert rates[1] / rates[0] == pytest.approx(growth, rel=1e-3)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), st.floats(0.01, 1))
def test_top_k_contracts_any_vector_and_bell_shaped_ones_more(values, density):
    def rest(vector):
        selected = TopK(density).select(vector, LayerLayout(("all",), (len(vector),)))
        return float(vector.square().sum() - selected.values.square().sum()), len(selected.indices) / len(vector)

    vector = torch.tensor(values, dtype=torch.float64)
    left, share = rest(vector)
    assert left <= (1 - top_k_contraction(share)) * float(vector.square().sum()) * (1 + 1e-9) + 1e-9
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, share = rest(normal)
    assert left <= (1 - top_k_contraction(share, bell_shaped=True)) * float(normal.square().sum()) * (1 + 1e-9)


PAIR, NOISY = torch.ones(2, 2), Problem(1.0, 1, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_threshold(PAIR / 0 * 0, 1), "Got a sequence with NaN"),
        (lambda: squared_error_bound(0, 1.0), r"Invalid num_elements=0\. Must be a whole number of at least 1"),
        (lambda: top_k_squared_error_bound(2.0, 1.0), r"Invalid density=2\.0\. Must be within \(0, 1\]"),
        (lambda: Problem(0.0, 1, 1.0), r"Invalid smoothness=0\.0\. Must be finite and above 0"),
        (lambda: Problem(1.0, 0, 1.0), "Invalid num_workers=0"),
        (lambda: Problem(1.0, 1, -1.0), r"Invalid noise=-1\.0\. Must be finite and at least 0"),
        (lambda: convex_bound(NOISY, 1.0, 0.1, 0, 0.0), "Invalid num_steps=0"),
        (lambda: strongly_convex_rate(NOISY, 1.0, 1, 1.0), "Got strong_convexity=0. Must be above 0"),
        (lambda: convex_contraction_rate(Problem(1.0, 1, 0.0), 1.0, 1, 0.5), "Must be above 0 for Remark 8"),
        (lambda: convex_contraction_rate(NOISY, 1.0, 1, 0.0), r"Invalid contraction=0\.0\. Must be within"),
        (lambda: nonconvex_contraction_bound(NOISY, 1.0, 0.2, 1, 0.5), r"Invalid learning_rate=0\.2"),
        (lambda: threshold_from_estimates(0, 10, 1.0, 1.0), "Invalid num_selected=0"),
        (lambda: optimal_threshold(PAIR, 1.5), "Invalid budget=1.5. Must be a whole number from 1 to 4"),
        (lambda: optimal_threshold(PAIR + 1j, 1), "Got torch.complex64. Must be real"),
        (lambda: measured_noise([]), r"Got draws of shapes \[\]. Must be \(draws, d\) for every worker"),
        (lambda: residual_statistics(0.0, noise=1.0), r"Invalid threshold=0\.0\. Must be finite and above 0"),
        (lambda: residual_statistics(1.0, noise=0.0), r"Invalid drift=0\.0\. Must be finite, and not 0 without noise"),
        (lambda: residual_statistics(1, noise=1, overshoot=1), r"Invalid overshoot=1\.0\. Must be within \[0, 1\)"),
    ],
)
def test_theory_rejects_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("rate", [0.0, 0.26, float("nan")])
def test_a_bound_rejects_learning_rates_out_of_its_range(rate):
    problem = Problem(smoothness=1.0, num_workers=4, noise=1.0)
    with pytest.raises(ValueError, match=r"Must be within \(0, 0\.25\] for the bound of this problem"):
        convex_bound(problem, 1.0, rate, 10, 0.0)
    assert nonconvex_bound(problem, 1.0, 0.5, 8, 0.0) == pytest.approx(4 / 4 + 2 * 0.5 * 0.25)


def test_relative_noise_adds_heterogeneity_to_the_variance():
    quiet, loud = (Problem(2.0, 4, 1.0, 3.0, relative) for relative in (0.0, 4.0))
    assert (quiet.variance_of_mean, loud.variance_of_mean) == (0.25, 13 / 4)
    assert quiet.largest_learning_rate(is_convex=True) == 2 * loud.largest_learning_rate(is_convex=True) == 1 / 8
