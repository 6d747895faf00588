"""Laws and control of a hard threshold that sends p + κ λ sign(p), and its residuals against a simulated walk."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import HardThreshold
from lightning_sparse.engine.density_control import DensityControl
from lightning_sparse.engine.step_stats import LayerStats
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.selection.bucket import keep_residual
from lightning_sparse.sparsifiers.protocol import LayerLayout
from lightning_sparse.theory import residual_statistics

LAYOUT = LayerLayout(("a", "b"), (40, 24))


def exchanged(sparsifier, compensated):
    kept = compensated.clone()
    selection = keep_residual(kept, sparsifier.select(kept, LAYOUT), Wire(kept.dtype))
    return torch.zeros_like(kept).index_put((selection.indices,), selection.values), kept


@given(st.floats(0, 0.99), st.floats(2**-10, 2**10, width=32), st.integers(0, 1000), st.sampled_from([0.01, 1.0, 1e6]))
def test_overshoot_loses_nothing_and_keeps_residuals_below_the_threshold(overshoot, threshold, seed, scale):
    p = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * threshold * scale
    sent, kept = exchanged(HardThreshold(threshold=threshold, overshoot=overshoot), p)
    assert torch.equal(sent.double() + kept.double(), p.double())  # p − sent is exact: sent is within p and 2 p
    # For any p beyond λ, the residual is κ λ up to the rounding error of p.
    is_sent = sent != 0
    assert (kept[~is_sent].abs() < threshold).all()
    assert (kept[is_sent].abs() <= overshoot * threshold * (1 + 1e-6) + 2.0**-23 * p[is_sent].abs()).all()
    assert (kept[is_sent] * p[is_sent] <= 2.0**-23 * p[is_sent].abs() ** 2).all()


def test_non_finite_values_are_sent_unchanged():
    p = torch.tensor([float("nan"), float("inf"), float("-inf"), 2.0] * 16)
    sent, kept = exchanged(HardThreshold(threshold=1.0, overshoot=0.5), p)
    torch.testing.assert_close(sent[:4], torch.tensor([float("nan"), float("inf"), float("-inf"), 2.5]), equal_nan=True)
    assert kept[:4].tolist() == [0.0, 0.0, 0.0, -0.5]


def test_each_layer_overshoots_by_its_own_threshold():
    sparsifier = HardThreshold(threshold=1.0, layer_thresholds={"b": 2.0}, overshoot=0.5)
    sent, _ = exchanged(sparsifier, torch.full((64,), 3.0))
    assert sent[:40].unique().tolist() == [3.5]
    assert sent[40:].unique().tolist() == [4.0]


@pytest.mark.parametrize(
    ("squared_error", "overshoot", "is_all_sent"),
    [(0.0, 0.0, True), (1e-30, 0.0, False), (10 * 0.5**2, 0.5, True), (11 * 0.5**2, 0.5, False)],
)
def test_residuals_of_sent_values_do_not_count_as_unsent(squared_error, overshoot, is_all_sent):
    stats = LayerStats(1, 1000, 1, squared_error)  # too few coordinates of a target of ten
    threshold = DensityControl(0.01).corrected(1.0, stats, 1.0, overshoot=overshoot)
    assert threshold == 1 if is_all_sent else threshold < 1


COORDINATES, STEPS, SETTLED = 4000, 6000, 1000


def walked(threshold, noise, drift, overshoot):
    generator = torch.Generator().manual_seed(0)
    residual = torch.zeros(COORDINATES, dtype=torch.float64)
    sent, mean, square = [], [], []
    for _ in range(STEPS):
        moved = residual + drift + noise * torch.randn(COORDINATES, generator=generator, dtype=torch.float64)
        is_sent = moved.abs() >= threshold
        residual = torch.where(is_sent, -overshoot * threshold * moved.sign(), moved)
        sent.append(is_sent.double().mean())
        mean.append(residual.mean())
        square.append(residual.square().mean())
    return [float(torch.stack(numbers[SETTLED:]).mean()) for numbers in (sent, mean, square)]


@pytest.mark.parametrize("overshoot", [0.0, 0.5, 0.75])
@pytest.mark.parametrize(("noise", "drift"), [(1.0, 0.0), (1.0, 0.02), (0.5, -0.3)])
def test_residual_statistics_match_a_simulated_walk(noise, drift, overshoot):
    density, mean, square = walked(10.0, noise, drift, overshoot)
    expected = residual_statistics(10.0, noise=noise, drift=drift, overshoot=overshoot)
    assert density == pytest.approx(expected.density, rel=0.02)
    # The standard error is 0.02. A walk in whole steps differs from Brownian motion by up to half a step.
    assert mean == pytest.approx(expected.mean, rel=0.05, abs=0.06 + abs(drift) / 2)
    assert square == pytest.approx(expected.mean_square, rel=0.04)


@pytest.mark.parametrize("overshoot", [0.25, 0.5, 0.75])
def test_overshoot_divides_the_lag_at_equal_density(overshoot):
    lags = []
    for kappa in (0.0, overshoot):
        threshold = 1000.0 / (1 - kappa**2) ** 0.5  # far above the noise: the jump beyond λ does not matter
        found = residual_statistics(threshold, noise=1.0, drift=1e-7, overshoot=kappa)
        assert found.density == pytest.approx(1e-6, rel=0.01)
        lags.append(found.mean / 1e-7)
    assert lags[1] / lags[0] == pytest.approx((1 - overshoot) / (1 + overshoot), rel=0.01)


@pytest.mark.parametrize("overshoot", [0.0, 0.5])
def test_a_coordinate_without_noise_is_sent_periodically(overshoot):
    found = residual_statistics(2.0, noise=0.0, drift=-0.01, overshoot=overshoot)
    assert found.density == pytest.approx(0.01 / (2 * (1 + overshoot)))
    assert found.mean == pytest.approx(-(1 - overshoot))
    assert found.mean_square == pytest.approx(4 / 3 * (1 - overshoot + overshoot**2))


def test_limits_for_a_small_drift_join_smoothly():
    limit, exact = (
        residual_statistics(10.0 - 0.5826, noise=1.0, drift=drift, overshoot=0.5) for drift in (0.9999e-4, 1.0001e-4)
    )
    assert exact == pytest.approx(limit, rel=1e-3)


def test_numbers_of_low_precision_do_not_cancel():
    found = residual_statistics(torch.tensor(30.0), noise=torch.tensor(3.0), drift=np.float32(1e-3), overshoot=0.5)
    assert found == residual_statistics(30.0, noise=3.0, drift=float(np.float32(1e-3)), overshoot=0.5)
