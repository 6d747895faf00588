"""A hard threshold that sends p + κ λ sign(p): its laws, its calibration, and where it is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import DDPHardThresholdStrategy, HardThreshold, LocalHardThresholdStrategy
from lightning_sparse.engine.calibrator import Calibrator
from lightning_sparse.engine.density_control import is_all_sent
from lightning_sparse.engine.step_stats import LayerStats, StepStats
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.selection.bucket import keep_rest
from lightning_sparse.sparsifiers import LayerLayout
from lightning_sparse.sparsifiers.threshold_rules import ThresholdCalibration
from lightning_sparse.theory import residual_statistics

LAYOUT = LayerLayout(("a", "b"), (40, 24))


def exchanged(sparsifier, compensated):
    kept = compensated.clone()
    selection = keep_rest(kept, sparsifier.select(kept, LAYOUT), Wire(kept.dtype))
    return torch.zeros_like(kept).index_put((selection.indices,), selection.values), kept


@given(st.floats(0, 0.99), st.floats(2**-10, 2**10, width=32), st.integers(0, 1000), st.sampled_from([0.01, 1.0, 1e6]))
def test_nothing_is_lost_and_a_residual_stays_below_the_threshold(overshoot, threshold, seed, scale):
    p = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * threshold * scale
    sent, kept = exchanged(HardThreshold(threshold=threshold, overshoot=overshoot), p)
    assert torch.equal(sent.double() + kept.double(), p.double())  # p − sent is exact: sent is within p and 2 p
    # However far p is beyond λ, what is left is κ λ, up to the rounding of a value as large as p.
    is_sent = sent != 0
    assert (kept[~is_sent].abs() < threshold).all()
    assert (kept[is_sent].abs() <= overshoot * threshold * (1 + 1e-6) + 2.0**-23 * p[is_sent].abs()).all()
    assert (kept[is_sent] * p[is_sent] <= 2.0**-23 * p[is_sent].abs() ** 2).all()


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_zero_changes_no_bit(threshold):
    p = torch.tensor([0.5, -0.5, 0.1, -0.0, float("nan"), float("inf"), -3.0, 0.4999] * 8)
    plain, given_zero = (HardThreshold(threshold=threshold, **options) for options in ({}, {"overshoot": 0.0}))
    for one, other in zip(exchanged(plain, p), exchanged(given_zero, p), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_values_that_are_not_finite_are_sent_as_they_are():
    p = torch.tensor([float("nan"), float("inf"), float("-inf"), 2.0] * 16)
    sent, kept = exchanged(HardThreshold(threshold=1.0, overshoot=0.5), p)
    torch.testing.assert_close(sent[:4], torch.tensor([float("nan"), float("inf"), float("-inf"), 2.5]), equal_nan=True)
    assert kept[:4].tolist() == [0.0, 0.0, 0.0, -0.5]


def test_a_layer_has_the_excess_of_its_own_threshold():
    sparsifier = HardThreshold(threshold=1.0, layer_thresholds={"b": 2.0}, overshoot=0.5)
    sent, _ = exchanged(sparsifier, torch.full((64,), 3.0))
    assert sent[:40].unique().tolist() == [3.5]
    assert sent[40:].unique().tolist() == [4.0]


def test_calibration_takes_the_overshoot_into_account():
    thresholds = []
    for overshoot in (0.0, 0.6):
        calibration = ThresholdCalibration(0.01, 3, overshoot=overshoot)
        for _ in range(3):
            calibration.observe(100.0)  # σ² of 1 for each of 100 coordinates
        thresholds.append(calibration.threshold(100))
        statistics = residual_statistics(thresholds[-1], noise=1.0, overshoot=overshoot)
        assert statistics.density == pytest.approx(0.01, rel=0.2)
    assert thresholds[1] == pytest.approx(thresholds[0] / 0.8)


def test_residuals_that_sent_values_leave_do_not_count_as_unsent():
    def layer(squared_error):
        return LayerStats(1000, 10, 0.01, squared_error)

    assert is_all_sent(layer(0.0), 0.01, 0.0)
    assert not is_all_sent(layer(1e-30), 0.01, 0.0)
    assert is_all_sent(layer(10 * 0.5**2), 0.01, 0.5)
    assert not is_all_sent(layer(11 * 0.5**2), 0.01, 0.5)


def test_a_density_is_held():
    sparsifier = HardThreshold(density=0.05, overshoot=0.5, calibration_steps=3)
    calibrator = Calibrator(sparsifier, speaks=False, keeps_rest=True)
    layout, generator = LayerLayout(("a",), (4000,)), torch.Generator().manual_seed(0)
    residual, densities, before = torch.zeros(4000), [], None
    for step in range(600):
        gradient = torch.randn(4000, generator=generator) * (1 + step / 600)
        residual += gradient
        selection = keep_rest(residual, sparsifier.select(residual, layout), Wire(torch.float32))
        densities.append(selection.indices.numel() / 4000)
        stats = StepStats(
            step=step,
            num_workers=1,
            num_elements=4000,
            selected=selection.indices.numel(),
            squared_error=float(residual.square().sum()),
            squared_gradient_norm=float(gradient.square().sum()),
            non_finite=0,
            payload_bytes=0,
            dense_bytes=0,
            threshold=sparsifier.threshold,
        )
        calibrator.observe(stats, before)
        before = stats
    assert sum(densities[100:]) / 500 == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("overshoot", [-0.1, 1.0, 2, float("nan"), "half", True, None])
def test_a_number_outside_its_range_is_refused(overshoot):
    with pytest.raises(ValueError, match=r"Invalid overshoot=.* Must be within \[0, 1\)"):
        HardThreshold(threshold=1.0, overshoot=overshoot)


def test_it_is_refused_where_it_would_do_harm():
    with pytest.raises(ValueError, match=r"Got overshoot=0.5 for drifts.*Use overshoot=0"):
        LocalHardThresholdStrategy(density=0.01, overshoot=0.5)
    with pytest.raises(ValueError, match=r"Got overshoot=0.5 with error_feedback='none'"):
        DDPHardThresholdStrategy(density=0.01, overshoot=0.5, error_feedback="none")
    assert DDPHardThresholdStrategy(density=0.01, overshoot=0.5).sparsifier.overshoot == 0.5
