import dataclasses
from math import isfinite, sqrt

import pytest
import torch

from lightning_sparse import HardThreshold, StepStats, paper_threshold
from lightning_sparse.engine.calibrator import Calibrator
from lightning_sparse.engine.step_stats import LayerStats
from lightning_sparse.sparsifiers.threshold_rules import ThresholdCalibration


def test_the_papers_rule_gives_the_papers_threshold_for_resnet18():
    assert paper_threshold(0.001, 11_173_962) == pytest.approx(4.73e-3, rel=1e-3)


def test_calibration_averages_over_its_steps():
    calibration = ThresholdCalibration(density=0.01, steps=2)
    calibration.observe(3.0)
    assert not calibration.is_complete
    with pytest.raises(RuntimeError, match="1 of 2 steps measured"):
        calibration.threshold(100)
    calibration.observe(5.0)
    assert calibration.threshold(100) == pytest.approx(sqrt(4.0 / (0.01 * 100)))


@pytest.mark.parametrize(
    ("norms", "needed"),
    [
        ([4.0] * 20, 3),
        ([1.0, 1.5, 1.2], 3),
        ([100.0, 1.0, 1.0, 1.0, 1.0, 1.0], None),
        ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], None),
        ([float("nan"), 2.0, 2.0, 2.0], 4),
        ([1.0, 2.0] * 10, 4),
        ([1.0, 4.0] * 10, 10),
    ],
)
def test_calibration_ends_when_the_mean_is_known_to_a_fifth(norms, needed):
    calibration = ThresholdCalibration(density=0.01, steps=1000)
    ended = None
    for step, norm in enumerate(norms, 1):
        calibration.observe(norm)
        finite = torch.tensor([norm for norm in norms[:step] if isfinite(norm)])
        is_known = len(finite) >= 3 and finite.std() / len(finite) ** 0.5 <= 0.2 * finite.mean() and finite.sum() > 0
        assert calibration.is_complete == is_known
        ended = ended or (step if calibration.is_complete else None)
        calibration = _saved_and_loaded(calibration)
    assert ended == needed


def _saved_and_loaded(calibration):
    double = ThresholdCalibration(calibration.density, calibration.steps)
    double.load_state_dict(calibration.state_dict())
    return double


def test_a_density_of_one_sends_everything_and_calibrates_nothing():
    sparsifier = HardThreshold(density=1)
    assert (sparsifier.threshold, sparsifier.density) == (0.0, None)
    calibrator = Calibrator(sparsifier, speaks=True, keeps_rest=True)
    assert not calibrator.is_running


@pytest.mark.parametrize("squared_norm", [0.0, float("nan"), float("inf")])
def test_a_calibration_that_cannot_end_says_so_once(squared_norm):
    calibrator = Calibrator(HardThreshold(density=0.01, calibration_steps=4), speaks=True, keeps_rest=True)
    non_finite = 0 if isfinite(squared_norm) else 3
    stats = StepStats(0, 2, 100, 200, 0.0, squared_norm, non_finite, 400, 400, 0.0)
    for _ in range(11):
        calibrator.observe(stats, None)
    with pytest.warns(UserWarning, match=r"no threshold after 12 steps, so everything is sent"):
        calibrator.observe(stats, None)
    for _ in range(30):
        calibrator.observe(stats, None)
    calibrator.observe(dataclasses.replace(stats, squared_gradient_norm=4.0), None)
    assert calibrator.is_running == (squared_norm != 0.0)  # of which zeros are measured, the others not


def test_finite_gradients_whose_squares_overflow_end_a_calibration_with_an_error():
    calibrator = Calibrator(HardThreshold(density=0.01, calibration_steps=4), speaks=False, keeps_rest=True)
    stats = StepStats(0, 2, 100, 200, 0.0, float("inf"), 0, 400, 400, 0.0)
    for _ in range(11):
        calibrator.observe(stats, None)
    with pytest.raises(RuntimeError, match=r"gradients are finite, but ‖g‖² overflowed in 12 steps. Scale the loss"):
        calibrator.observe(stats, None)


def test_squares_of_norms_may_overflow():
    calibration = ThresholdCalibration(0.01, 3)
    for _ in range(3):
        calibration.observe(1e200)
    assert calibration.is_complete


@pytest.mark.parametrize("granularity", ["model", "layer"])
@pytest.mark.parametrize(
    ("selected", "squared_errors", "keeps_rest", "moves"),
    [
        (4, (1.0, 1.0), True, "down"),
        (4, (0.0, 0.0), True, "not"),  # a sparse gradient: a smaller λ would have sent no more
        (0, (1.0, 2.0), True, "down"),
        (0, (1.0, 1.0), True, "not"),  # nothing has moved since
        (0, (0.0, 0.0), True, "not"),  # gradients of zeros
        (200, (0.0, 0.0), True, "up"),
        (4, (0.0, 0.0), False, "down"),  # error_feedback="none": the residual is zero whatever was sent
        (0, (0.0, 0.0), False, "down"),
        (200, (0.0, 0.0), False, "up"),
    ],
)
def test_a_held_density_lowers_the_threshold_only_where_a_smaller_one_would_send_more(
    selected, squared_errors, keeps_rest, moves, granularity
):
    sparsifier = HardThreshold(density=0.1, granularity=granularity)
    calibrator = Calibrator(sparsifier, speaks=False, keeps_rest=keeps_rest)
    calibrator.set_threshold(1.0)
    before, found = None, []
    for step, squared_error in enumerate(squared_errors):
        layers = {"w": LayerStats(100, selected, selected / 200, squared_error)}
        stats = StepStats(step, 2, 100, selected, squared_error, 0.0, 0, 400, 400, 1.0, layers=layers)
        calibrator.observe(stats, before)
        before = stats
        found.append(sparsifier.threshold_of("w"))
    # Of the first step nobody knows whether something has moved.
    assert (found[1] > found[0]) - (found[1] < found[0]) == {"up": 1, "down": -1, "not": 0}[moves]
