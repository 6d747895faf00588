"""What other thresholds would have sent: the replay against theory and a plain loop, and the curve made of it."""

import pytest
import torch
from torch import nn

from lightning_sparse import LayerLayout, ThresholdCurve
from lightning_sparse.engine import FlatBucket
from lightning_sparse.engine.recorder import MOST_COORDINATES, GradientRecorder
from lightning_sparse.exchange.cost_model import Costs, speeds
from lightning_sparse.selection.residual import Residual
from lightning_sparse.sparsifiers.replay import replayed_densities


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def densities(recorded: torch.Tensor, thresholds: list[float], **options) -> list[float]:
    return replayed_densities(recorded, torch.tensor(thresholds), generator(), **options).mean(1).tolist()


def in_the_long_run(gradients, threshold: float, num_steps: int) -> float:
    """The density that n walks come to, one after the other, in steps that never come again."""
    residual = torch.zeros(2000)
    sent = 0
    for _ in range(num_steps):
        residual += gradients(residual.shape)
        is_sent = residual.abs() >= threshold
        sent += int(is_sent.sum())
        residual[is_sent] = 0
    return sent / (num_steps * residual.numel())


@pytest.mark.parametrize("num_steps", [20, 50, 100])
def test_noise_is_sent_as_theory_has_it(num_steps):
    """About every (λ/σ + 0.583)² steps: 0.583 = −ζ(1/2)/√(2π) is the mean overshoot of a Gaussian walk.

    Far from λ = 0, where the exact value is less.
    """
    recorded = 0.3 * torch.randn(num_steps, 4000, generator=generator())
    ratios = [1.0, 2.0, 5.0, 10.0, 30.0]
    torch.manual_seed(3)
    expected = [in_the_long_run(torch.randn, 1.0, 200), *((ratio + 0.583) ** -2 for ratio in ratios[1:])]
    assert densities(recorded, [0.3 * ratio for ratio in ratios]) == pytest.approx(expected, rel=0.1)


def test_rare_and_large_gradients_are_sent_when_they_come():
    """σ says nothing of them: 1 % of the steps bring 30, and any λ below that sends 1 %."""

    def rare(shape):
        return 30.0 * (torch.rand(shape) < 0.01) * torch.sign(torch.rand(shape) - 0.5)

    torch.manual_seed(3)
    recorded = rare((50, 4000))
    for threshold, by_formula in ((0.5, 1.79), (5.0, 0.20), (15.0, 0.032)):
        assert densities(recorded, [threshold]) == pytest.approx([0.01], rel=0.15)
        assert (threshold / recorded.std().item() + 0.583) ** -2 == pytest.approx(by_formula, rel=0.1)
    assert densities(recorded, [70.0]) == pytest.approx([in_the_long_run(rare, 70.0, 2000)], rel=0.15)


def test_a_gradient_that_turns_back_each_step_is_hardly_sent():
    recorded = torch.randn(1, 4000, generator=generator()) * torch.tensor([1.0, -1.0] * 25).unsqueeze(1)
    [density] = densities(recorded, [5.0])
    assert density < 0.1 * (5.0 + 0.583) ** -2


def test_zero_sends_everything_and_layers_keep_a_threshold_of_their_own():
    recorded = torch.randn(20, 6, generator=generator())
    own = torch.tensor([float("nan")] * 3 + [0.0, 1e9, 1e9])
    sent = replayed_densities(recorded, torch.tensor([0.0, 1e9]), generator(), own=own)
    assert sent.tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0]]


CURVE = ThresholdCurve((0.1, 1.0, 10.0, 100.0), (1.0, 0.1, 0.001, 0.0), 0.01, 1000, 50, 6, 4, 0.2)


def test_a_curve_is_read_both_ways():
    assert CURVE.suggestion() == pytest.approx(10**0.5)
    assert CURVE.suggestion(0.1) == pytest.approx(1.0)
    assert CURVE.density_at(10**0.5) == pytest.approx(0.01)
    for density in (1.0, 0.5, 0.03, 0.001):
        assert CURVE.density_at(CURVE.suggestion(density)) == pytest.approx(density)
    assert CURVE.density_at(0.0) == CURVE.density_at(1e-9) == pytest.approx(1.0)
    assert CURVE.density_at(1e9) == pytest.approx(0.001)


@pytest.mark.parametrize("density", [0.0001, 1.01])
def test_a_density_that_the_curve_does_not_come_to_is_refused(density):
    with pytest.raises(ValueError, match=rf"density of {density:g}: those tried send 0.001 to 1\."):
        CURVE.suggestion(density)


def test_above_break_even_bytes_are_those_of_the_gradient():
    assert [CURVE.payload_bytes(density) for density in (0.001, 0.2, 0.21, 1.0)] == [6, 1200, 4000, 4000]


def test_the_picture_marks_the_suggestion_and_break_even():
    figure = CURVE.plot()
    density, amount = figure.axes
    assert [line.get_label() for line in density.get_lines()] == [
        "density",
        "break-even: above it, all is sent whole",
        "λ = 3.16",
    ]
    assert density.get_lines()[2].get_xydata().tolist() == [[pytest.approx(10**0.5), 0.01]]
    assert amount.get_lines()[0].get_ydata().tolist() == [4000, 600, 6]


@pytest.mark.parametrize("num_workers", [2, 8, 64])
@pytest.mark.parametrize("link", [0.2, 10.0, 100.0])
def test_at_break_even_the_cheapest_route_changes(num_workers, link):
    costs, rates = Costs(num_workers, 6_553_600, 4, 4), speeds(link, on_gpu=False)
    density = costs.break_even_density(rates)
    assert 0 < density < 1
    for factor, is_dense in ((0.99, False), (1.01, True)):
        selected = factor * density * costs.num_elements
        assert (costs.cheapest(selected, selected / num_workers, rates) == "dense") == is_dense


def test_where_dense_always_wins_break_even_is_nothing():
    costs = Costs(8, 6_553_600, 4, 4)
    assert costs.break_even_density(speeds(1e9, on_gpu=True)) == pytest.approx(0, abs=1e-6)


def bucket(layout, gradient, **options) -> FlatBucket:
    residual = Residual(torch.zeros_like(gradient), torch.zeros_like(gradient))
    return FlatBucket(0, layout, gradient, residual, **({"is_last": True} | options))


def test_each_layer_is_watched_by_its_share_and_stands_for_all_of_it():
    layout = LayerLayout(("weight", "bias", "empty", "one"), (10 * MOST_COORDINATES, 40, 0, 1))
    recorder = GradientRecorder(layout.num_elements, rank=0)
    values = torch.arange(layout.num_elements).float()
    recorder(bucket(layout, values))
    recorder(bucket(layout, -values))
    recorder(bucket(layout, values * torch.nan))
    recorded, weights = recorder.recorded()
    assert recorder.num_steps == 3
    assert recorded.shape == (2, len(weights))  # the step that is not finite is left out
    assert torch.equal(recorded[0], -recorded[1])
    assert recorded[0].unique().numel() == len(weights)  # each once
    in_weight = recorded[0] < 10 * MOST_COORDINATES
    assert weights[in_weight].sum().item() == pytest.approx(10 * MOST_COORDINATES, rel=1e-5)
    assert weights[~in_weight].sum().item() == pytest.approx(41)
    other = GradientRecorder(layout.num_elements, rank=1)
    other(bucket(layout, values))
    assert not torch.equal(other.recorded()[0][0], recorded[0])


def test_scaled_losses_left_out_layers_and_several_buckets():
    first, second = LayerLayout(("a", "b"), (2, 3)), LayerLayout(("c",), (2,))
    recorder = GradientRecorder(7, rank=0)
    ones = torch.ones
    recorder(bucket(first, 8 * ones(5), is_last=False, left_out=[(2, 5)], loss_scale=torch.tensor([4.0])))
    recorder(bucket(second, ones(2).bfloat16()))
    recorder(bucket(second, 3 * ones(2)))  # of a step in which the other had no part
    recorded, weights = recorder.recorded()
    assert recorded.tolist() == [[2, 2, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 3, 3]]
    assert weights.tolist() == [1] * 7
    own = recorder.own_thresholds({"b": 0.0, "?": 2.0})
    assert own.tolist() == [2, 2, 0, 0, 0, 2, 2]
    assert recorder.own_thresholds({}).isnan().all()


def test_nothing_was_recorded():
    recorded, weights = GradientRecorder(7, rank=0).recorded()
    assert recorded.numel() == weights.numel() == recorder_own().numel() == 0


def recorder_own() -> torch.Tensor:
    return GradientRecorder(sum(one.numel() for one in nn.Linear(2, 2).parameters()), 0).own_thresholds({"*": 1.0})
