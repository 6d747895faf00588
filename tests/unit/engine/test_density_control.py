"""After calibration, λ of the model or of each layer keeps random walks at the requested density."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from lightning_sparse import ExchangeOptions, HardThreshold, StepStats
from lightning_sparse.engine.calibrator import Calibrator
from lightning_sparse.engine.density_control import DensityControl, pace_of
from lightning_sparse.engine.step_stats import LayerStats
from lightning_sparse.exchange.wire import wire_of

CALIBRATION_STEPS = 50


def corrected(control, threshold, density):
    """Return the next λ after a step that left half of λ² per element."""
    stats = LayerStats(1, 1000, round(1000 * density), 500 * threshold**2)
    return control.corrected(threshold, stats, pace_of(control.density))


def walk(threshold, increments, control=None, overshoot=0.0):
    """Return the density of each exchange; λ stays constant without a control."""
    residuals, densities = 0.0, []
    for increment in increments:
        residuals = residuals + increment
        selected = np.abs(residuals) >= threshold
        residuals[selected] = -overshoot * threshold * np.sign(residuals[selected])
        densities.append(selected.mean())
        if control is not None:
            stats = LayerStats(1, residuals.size, int(selected.sum()), float(np.square(residuals).sum()))
            threshold = control.corrected(threshold, stats, pace_of(control.density), overshoot=overshoot)
    return np.array(densities)


def cosine(steps, step):
    return 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01


SCALES = {
    "constant": lambda steps, step: 1.0,
    "warm-up": lambda steps, step: min(1.0, (step + 1) / 200),
    "cosine": cosine,
    "warm-up and cosine": lambda steps, step: min(1.0, (step + 1) / 100) * cosine(steps, step),
    "growing": lambda steps, step: 1 + step / 100,
}


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("name", SCALES)
def test_the_volume_stays_within_a_fifth_of_the_requested_density(name, density, drift):
    generator = np.random.default_rng(0)
    directions = generator.standard_normal(10_000) * drift
    scales = [SCALES[name](1000, step) for step in range(1000)]
    threshold = math.sqrt(np.mean(np.square(scales[:CALIBRATION_STEPS])) * np.mean(1 + directions**2) / density)
    increments = [scale * (generator.standard_normal(10_000) + directions) for scale in scales[CALIBRATION_STEPS:]]
    assert 1 / 1.2 < walk(threshold, increments, DensityControl(density)).mean() / density < 1.2
    if name == "warm-up" and density == 0.01:
        assert walk(threshold, increments).mean() / density > 5


@pytest.mark.parametrize("factor", [0.1, 0.3, 3, 10])
def test_the_controller_compensates_a_wrong_first_threshold(factor):
    generator = np.random.default_rng(0)
    increments = (generator.standard_normal(10_000) for _ in range(1000))
    assert walk(factor / math.sqrt(0.01), increments, DensityControl(0.01)).mean() == pytest.approx(0.01, rel=0.01)


def test_the_controller_moves_slowly():
    control = DensityControl(0.01)
    assert 1 < corrected(control, 1.0, 1.0) < 1.6  # everything was sent: 100 times the target
    assert 1 < corrected(DensityControl(0.01), 1.0, 0.02) < 1.02
    assert 1 > corrected(DensityControl(0.01), 1.0, 0.0) > 1 / 1.12


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_a_threshold_calibrated_at_the_start_of_warmup_catches_up(density):
    generator = np.random.default_rng(0)
    increments = (min(1.0, (step + 1) / 50) * generator.standard_normal(20_000) for step in range(1, 100))
    sent = walk(1 / 50 / math.sqrt(density), increments, DensityControl(density)).sum()
    assert sent / density < 165  # of 100 steps; 400 and 560 without the control


INCREMENTS = {
    "normal": lambda generator: generator.standard_normal(10_000),
    "alike": lambda generator: (
        np.sign(generator.standard_normal(10_000)) * (1 + 0.1 * generator.standard_normal(10_000))
    ),
    "unlike": lambda generator: generator.standard_normal(10_000) * 10 ** np.linspace(-1, 1, 10_000),
}


@pytest.mark.parametrize("kind", INCREMENTS)
@pytest.mark.parametrize("name", ["constant", "rate falls", "cosine", "warm-up"])
@pytest.mark.parametrize("density", [0.3, 0.08])
def test_few_exchanges_reach_the_requested_density(density, name, kind):
    scale = {
        "constant": lambda _: 1.0,
        "rate falls": lambda exchange: 1.0 if exchange < 40 else 0.1,
        "cosine": partial(cosine, 60),
        "warm-up": lambda exchange: min(1.0, (exchange + 1) / 5),
    }[name]
    generator = np.random.default_rng(0)
    first, *others = [scale(exchange) * INCREMENTS[kind](generator) for exchange in range(60)]
    densities = walk(math.sqrt(np.mean(first**2) / density), others, DensityControl(density))
    assert 1 / 1.25 < densities.mean() / density < 1.25
    if (name, kind) == ("constant", "alike"):
        assert np.std(densities[-20:]) < 0.03  # at ten times that pace it swings by more than 0.1


def test_the_controller_does_not_compensate_an_unreachable_density_later():
    control, threshold = DensityControl(0.1), 1.0
    for _ in range(5000):
        threshold = corrected(control, threshold, 0.004)
    thresholds = [threshold := corrected(control, threshold, 0.16) for _ in range(200)]
    assert thresholds[-1] > 10 * min(thresholds)


@pytest.mark.parametrize(("density", "moving"), [(0.7, 1.0), (0.3, 0.1), (0.01, 0.0025)])
def test_overshoot_does_not_stop_the_control(density, moving):
    generator, moves = np.random.default_rng(0), np.arange(4000) < moving * 4000
    increments = (generator.standard_normal(4000) * moves for _ in range(1000))
    densities = walk(1 / math.sqrt(density), increments, DensityControl(density), overshoot=0.75)
    assert 0.8 * min(density, moving) < densities[500:].mean() < 1.25 * density


def test_float8_keeps_its_range_while_a_density_cannot_be_reached():
    """Float8 limits sent values to a multiple of λ, so training would stop with a far smaller λ."""
    generator, residual = torch.Generator().manual_seed(0), torch.zeros(10_000)
    control, threshold, densities = DensityControl(0.01), 3.0, []
    for step in range(2000):
        moving = residual[:25] if step < 1000 else residual
        moving += torch.randn(moving.shape, generator=generator)
        selected = residual.abs() >= threshold
        wire = wire_of("float8", torch.float32, HardThreshold(threshold=threshold))
        residual[selected] -= wire.rounded(residual[selected])
        stats = LayerStats(1, residual.numel(), int(selected.sum()), float(residual.square().sum()))
        threshold = control.corrected(threshold, stats, pace_of(control.density), is_float8=True)
        densities.append(stats.density)
        assert residual.square().mean() < 100
    assert densities[999] > 0.9 * 0.0025  # nearly all that can be sent
    assert 0.002 < np.mean(densities[-300:]) < 0.015  # still makes up for the first of these steps


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_a_threshold_stays_finite_and_positive(density):
    control, threshold = DensityControl(0.001), 1.0
    for _ in range(5000):
        threshold = corrected(control, threshold, density)
    assert torch.tensor(threshold).isfinite()
    assert torch.tensor(threshold) > 0


DENSITY = 0.01
LAYERS = {"large": (3_000, 10.0), "small": (3_000, 0.01), "drifting": (3_000, 1.0), "bias": (5, 1.0), "one": (1, 1.0)}
"""Number of elements, and standard deviation of a step of each."""


def layered(threshold, **options):
    sparsifier = HardThreshold(density=DENSITY, **({"granularity": "layer"} | options))
    calibrator = Calibrator(sparsifier, ExchangeOptions(), logs=False)
    calibrator.set_threshold(threshold)
    return sparsifier, calibrator


def step_of(layers):
    return StepStats(2, 6006, 0, 0.0, 0, 0.0, 0, 0, 0, layers=layers)


class Walks:
    """Residuals of two workers, which send the elements at or above the λ of their layer."""

    def __init__(self, threshold, **options):
        self.sparsifier, self.calibrator = layered(threshold, **options)
        self.generator = np.random.default_rng(0)
        self.residuals = {name: np.zeros((2, size)) for name, (size, _) in LAYERS.items()}

    @property
    def thresholds(self):
        return {name: self.sparsifier.threshold_of(name) for name in LAYERS}

    def step(self, used=frozenset(LAYERS)):
        stats = {}
        for name, (size, scale) in LAYERS.items():
            residual = self.residuals[name]
            if name in used:
                residual += scale * (self.generator.standard_normal((2, size)) + (name == "drifting"))
            selected = np.abs(residual) >= self.sparsifier.threshold_of(name)
            residual[selected] = 0
            count = int(selected.sum())
            stats[name] = LayerStats(2, size, count, float((residual**2).sum() / 2))
        self.calibrator.observe(step_of(stats))
        return {name: layer.density for name, layer in stats.items()}


def test_each_layer_sends_its_share_and_a_small_layer_one_coordinate_per_step():
    walks = Walks(30.0)
    densities = [walks.step() for _ in range(1000)]
    average = {name: np.mean([step[name] for step in densities[100:]]) for name in LAYERS}
    for name in ("large", "small", "drifting"):
        assert average[name] == pytest.approx(DENSITY, rel=0.1)
    assert average["bias"] == pytest.approx(1 / 5, rel=0.2)
    assert average["one"] == pytest.approx(1 / 2, rel=0.2)
    assert 0.1 < walks.thresholds["one"] < 10  # and it does not fall forever
    assert walks.thresholds["large"] > 100 * walks.thresholds["small"]


def test_layers_with_a_threshold_of_their_own_do_not_count_in_the_density():
    walks = Walks(3.0, granularity="model", layer_thresholds={"large": 5.0, "bias": 0.0})  # these alone send 35 %
    others = {name: LAYERS[name][0] for name in ("small", "drifting", "one")}
    densities = [walks.step() for _ in range(1000)]
    sent = np.mean([sum(step[name] * size for name, size in others.items()) for step in densities[100:]])
    assert sent / sum(others.values()) == pytest.approx(DENSITY, rel=0.1)
    walks = Walks(3.0, granularity="model", layer_thresholds={"*": 5.0})
    walks.step()
    assert walks.sparsifier.current_threshold == 3.0  # belongs to no layer


def test_an_unused_layer_keeps_its_threshold():
    walks = Walks(1.0)
    for _ in range(100):
        walks.step()
    walks.step(used={"large"})  # other layers may still send elements that had reached the previous λ
    before = walks.thresholds
    for _ in range(20):
        walks.step(used={"large"})
    assert {name for name in LAYERS if walks.thresholds[name] == before[name]} == LAYERS.keys() - {"large"}


def test_an_empty_layer_has_no_threshold():
    sparsifier, calibrator = layered(1.0)
    calibrator.observe(step_of({"empty": LayerStats(2, 0, 0, 0.0)}))
    assert sparsifier.calibrated_layers == {}


def test_a_resized_layer_gets_its_new_share():
    _, calibrator = layered(1.0)
    calibrator.observe(step_of({"bias": LayerStats(2, 1, 1, 1.0)}))
    calibrator.observe(step_of({"bias": LayerStats(2, 20, 20, 1.0)}))
    assert calibrator.state_dict()["controls"]["bias"]["density"] == 1 / 20
