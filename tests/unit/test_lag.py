"""Density, lag and size of a residual with overshoot, against a simulated walk."""

import pytest
import torch

from lightning_sparse.theory import residual_statistics

COORDINATES, STEPS, SETTLED = 4000, 6000, 1000


def simulated(threshold, noise, drift, overshoot):
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
def test_it_is_that_of_a_simulated_walk(noise, drift, overshoot):
    density, mean, square = simulated(10.0, noise, drift, overshoot)
    expected = residual_statistics(10.0, noise=noise, drift=drift, overshoot=overshoot)
    assert density == pytest.approx(expected.density, rel=0.02)
    # The standard error is 0.02. A walk in whole steps differs from Brownian motion by up to half a step.
    assert mean == pytest.approx(expected.mean, rel=0.05, abs=0.06 + abs(drift) / 2)
    assert square == pytest.approx(expected.mean_square, rel=0.04)


@pytest.mark.parametrize("overshoot", [0.0, 0.25, 0.5, 0.75])
def test_at_equal_density_the_lag_falls_by_one_less_over_one_more(overshoot):
    lags = []
    for kappa in (0.0, overshoot):
        threshold = 1000.0 / (1 - kappa**2) ** 0.5  # far above the noise: the jump beyond λ does not matter
        found = residual_statistics(threshold, noise=1.0, drift=1e-7, overshoot=kappa)
        assert found.density == pytest.approx(1e-6, rel=0.01)
        lags.append(found.mean / 1e-7)
    assert lags[1] / lags[0] == pytest.approx((1 - overshoot) / (1 + overshoot), rel=0.01)


@pytest.mark.parametrize("overshoot", [0.0, 0.5])
def test_without_noise_a_coordinate_takes_turns_of_equal_length(overshoot):
    found = residual_statistics(2.0, noise=0.0, drift=-0.01, overshoot=overshoot)
    assert found.density == pytest.approx(0.01 / (2 * (1 + overshoot)))
    assert found.mean == pytest.approx(-(1 - overshoot))
    assert found.mean_square == pytest.approx(4 / 3 * (1 - overshoot + overshoot**2))


def test_limits_for_a_small_drift_join_smoothly():
    limit, exact = (
        residual_statistics(10.0 - 0.5826, noise=1.0, drift=drift, overshoot=0.5) for drift in (0.9999e-4, 1.0001e-4)
    )
    assert exact == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0.0}, r"Invalid threshold=0\.0\. Must be finite and above 0"),
        ({"noise": -1.0}, r"Invalid noise=-1\.0"),
        ({"noise": 0.0}, r"Invalid drift=0\.0\. Must be finite, and not 0 without noise"),
        ({"overshoot": 1.0}, r"Invalid overshoot=1\.0\. Must be within \[0, 1\)"),
    ],
)
def test_numbers_outside_their_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        residual_statistics(**({"threshold": 1.0, "noise": 1.0} | arguments))
