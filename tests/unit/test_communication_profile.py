"""What follows from the times of steps: shares, the link's rate, break-even, the verdict."""

from dataclasses import replace

import pytest
import torch

from lightning_sparse import CommunicationProfile
from lightning_sparse.exchange.cost_model import Costs, speeds
from lightning_sparse.sparsifiers.replay import first_densities

MEASURED = CommunicationProfile(0.058, 0.413, 0.076, 0.001, 11_181_642, 2, 6)
"""ResNet-18 between two hosts at 1 Gbit/s (docs/performance.md)."""


def test_the_verdict_in_words():
    assert str(MEASURED) == (
        "a step takes 58 ms without any exchange, 413 ms with a dense one (86 % of it is exchange), and 76 ms at a "
        "density of 0.1 %. Sparse is 5.43 times as fast; break-even is at a density of about 31 %."
    )
    nothing = replace(MEASURED, sparse_seconds=0.41)
    assert str(nothing).endswith("at a density of 0.1 %. Sparse exchange does not pay here: take strategy='ddp'.")
    assert str(replace(MEASURED, sparse_seconds=0.058, dense_seconds=50.0, density=1.0)).endswith("862 times as fast.")
    slow = replace(MEASURED, dense_seconds=2.09)
    assert "58 ms without any exchange, 2.09 s with a dense one" in str(slow)
    missed = replace(MEASURED, density=0.005, asked_density=0.001)
    assert "at a density of 0.5 % (asked for: 0.1 %). Sparse is" in str(missed)
    assert "asked" not in str(replace(missed, density=0.0015))


@pytest.mark.parametrize(
    ("compute", "dense", "spread", "says"),
    [(0.058, 0.413, 0.1, True), (0.058, 0.413, 0.4, False), (0.352, 0.336, 0.001, False), (0.0095, 0.0096, 0.0, True)],
)
def test_out_of_noise_no_verdict_is_made(compute, dense, spread, says):
    profile = replace(MEASURED, compute_seconds=compute, dense_seconds=dense, spread_seconds=spread)
    assert profile.says_something == says
    assert ("too busy to tell" in str(profile)) == (not says)


def test_the_rate_is_that_over_which_a_dense_exchange_would_take_as_long():
    assert MEASURED.link_gbit_s == pytest.approx(1.2, rel=0.05)
    for rate in (0.1, 1.0, 25.0):
        costs = Costs(4, 10_000_000, 4, 4)
        seconds = speeds(rate, on_gpu=False).byte * costs.dense_bytes()
        profile = CommunicationProfile(0.1, 0.1 + seconds, 0.1, 0.001, 10_000_000, 4, 6)
        assert profile.link_gbit_s == pytest.approx(rate, rel=0.03)
        on_gpu = replace(profile, dense_seconds=0.1 + 8e-9 / rate * costs.dense_bytes(), on_gpu=True)
        assert on_gpu.link_gbit_s == pytest.approx(rate, rel=0.02)
    every_eighth = replace(MEASURED, dense_seconds=0.058 + 0.355 / 8, exchanges_per_step=1 / 8)
    assert every_eighth.link_gbit_s == pytest.approx(MEASURED.link_gbit_s)


def test_an_exchange_that_costs_nothing_has_a_fast_link_and_gains_nothing():
    profile = replace(MEASURED, dense_seconds=0.057, sparse_seconds=0.06)
    assert profile.exchange_share == 0
    assert profile.link_gbit_s == 1000
    assert profile.break_even < 0.001


def test_break_even_is_where_both_take_as_long():
    """At 1 Gbit/s and 28 % a step took 0.89 times DDP's (docs/performance.md): so it is a little above that."""
    assert MEASURED.break_even == pytest.approx(0.30, abs=0.04)
    assert replace(MEASURED, sparse_seconds=MEASURED.dense_seconds).break_even == MEASURED.density
    assert replace(MEASURED, dense_seconds=50.0).break_even == pytest.approx(2 / 3, abs=0.01)  # bytes alone: 4 of 6
    assert replace(MEASURED, sparse_seconds=9.0).break_even == 0


def test_densities_of_first_steps_are_counted_from_residuals_of_zero():
    recorded = torch.tensor([[1.0, 0.4], [1.0, 0.4], [1.0, 0.4], [1.0, 0.4]])
    weights = torch.tensor([1.0, 3.0])
    thresholds = torch.tensor([0.0, 0.5, 1.5, 9.0])
    # At 0.5 the first is sent in every step, the other in steps 2 and 4; at 1.5 in 2 and 4, and in step 4.
    assert first_densities(recorded, thresholds, weights, 0).tolist() == [1, (4 + 6) / 16, (2 + 3) / 16, 0]
    assert first_densities(recorded, thresholds, weights, 3).tolist() == [1, 1, 1, 0]
