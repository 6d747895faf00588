import dataclasses
from math import sqrt

import pytest

from lightning_sparse import Dense, ExchangeOptions, GradientOptions, HardThreshold, StepStats, TopK, paper_threshold
from lightning_sparse.engine.calibrator import Calibrator
from lightning_sparse.engine.step_stats import LayerStats


def test_the_papers_rule_gives_the_papers_threshold_for_resnet18():
    assert paper_threshold(0.001, 11_173_962) == pytest.approx(4.73e-3, rel=1e-3)


@pytest.mark.parametrize("overshoot", [0.0, 0.5])
def test_the_first_norm_that_is_finite_and_not_0_gives_the_threshold(overshoot):
    sparsifier = HardThreshold(density=0.01, overshoot=overshoot)
    calibrator = Calibrator(sparsifier, ExchangeOptions(), logs=True)
    stats = StepStats(2, 100, 200, 0.0, 0, 0.0, 0, 400, 400, 0.0)
    for squared_norm in (float("nan"), 0.0, float("inf"), 3.0):
        assert calibrator.is_running
        calibrator.observe(dataclasses.replace(stats, squared_gradient_norm=squared_norm), counts=False)
    assert not calibrator.is_running
    assert sparsifier.threshold == pytest.approx(sqrt(3 / (0.01 * 100 * (1 - overshoot**2))))


def test_a_density_of_one_sends_everything_and_calibrates_nothing():
    sparsifier = HardThreshold(density=1)
    assert (sparsifier.threshold, sparsifier.density) == (0.0, None)
    calibrator = Calibrator(sparsifier, ExchangeOptions(), logs=True)
    assert not calibrator.is_running


@pytest.mark.parametrize("options", [{"threshold": 1.0}, {"density": 0.1}])
def test_a_reset_forgets_a_threshold_that_was_set(options):
    calibrator = Calibrator(HardThreshold(**options), ExchangeOptions(), logs=False)
    before = calibrator.state_dict()
    calibrator.set_threshold(5.0)
    calibrator.begin()
    assert calibrator.state_dict() == before


def test_a_late_calibration_warns_once():
    calibrator = Calibrator(HardThreshold(density=0.01), ExchangeOptions(), logs=True)
    stats = StepStats(2, 100, 200, 0.0, 0, 0.0, 0, 400, 400, 0.0)
    for _ in range(49):
        calibrator.observe(stats)
    with pytest.warns(UserWarning, match=r"50 exchanges sent everything: λ is unknown, because ‖g‖² was 0 or not fin"):
        calibrator.observe(stats)
    for _ in range(100):
        calibrator.observe(stats)


@pytest.mark.parametrize("granularity", ["model", "layer"])
@pytest.mark.parametrize(
    ("selected", "squared_errors", "moves"),
    [
        (4, (1.0, 1.0), "down"),
        (4, (0.0, 0.0), "not"),  # a sparse gradient: a smaller λ sends no more
        (0, (1.0, 2.0), "down"),
        (0, (1.0, 1.0), "not"),  # the residual has not changed
        (0, (0.0, 0.0), "not"),  # gradients of zeros
        (200, (0.0, 0.0), "up"),
    ],
)
def test_the_threshold_falls_only_if_a_smaller_threshold_sends_more(selected, squared_errors, moves, granularity):
    sparsifier = HardThreshold(density=0.1, granularity=granularity)
    calibrator = Calibrator(sparsifier, GradientOptions(), logs=False)
    calibrator.set_threshold(1.0)
    found = []
    for step, squared_error in enumerate(squared_errors):
        layers = {"w": LayerStats(2, 100, selected, squared_error)}
        calibrator.observe(StepStats(2, 100, selected, squared_error, step, 0.0, 0, 400, 400, 1.0, layers=layers))
        found.append(sparsifier.threshold_of("w"))
    # The first step has no previous residual to compare with.
    assert (found[1] > found[0]) - (found[1] < found[0]) == {"up": 1, "down": -1, "not": 0}[moves]


@pytest.mark.parametrize("sparsifier", [Dense(), TopK(0.1)], ids=["Dense", "TopK"])
def test_other_sparsifiers_than_hard_thresholds_have_no_threshold_to_set(sparsifier):
    calibrator = Calibrator(sparsifier, ExchangeOptions(), logs=False)
    with pytest.raises(TypeError, match=f"{type(sparsifier).__name__} has no λ to set"):
        calibrator.set_threshold(1.0)
