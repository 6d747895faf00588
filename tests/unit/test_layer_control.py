"""λ of each layer, held to the density, on coordinates that are random walks of very different sizes."""

import numpy as np
import pytest

from lightning_sparse.engine.density_control import LayerControl
from lightning_sparse.engine.step_stats import LayerStats

DENSITY = 0.01
LAYERS = {"large": (3_000, 10.0), "small": (3_000, 0.01), "drifting": (3_000, 1.0), "bias": (5, 1.0), "one": (1, 1.0)}
"""Elements, and how far each moves in a step."""


class Walks:
    """Residuals of two workers, of which what reaches its layer's λ is sent."""

    def __init__(self, control, thresholds):
        self.control, self.thresholds = control, thresholds
        self.generator = np.random.default_rng(0)
        self.residuals = {name: np.zeros((2, size)) for name, (size, _) in LAYERS.items()}

    def step(self, used=frozenset(LAYERS)):
        stats = {}
        for name, (size, scale) in LAYERS.items():
            residual = self.residuals[name]
            if name in used:
                residual += scale * (self.generator.standard_normal((2, size)) + (name == "drifting"))
            selected = np.abs(residual) >= self.thresholds[name]
            residual[selected] = 0
            count = int(selected.sum())
            stats[name] = LayerStats(size, count, count / (2 * size), float((residual**2).sum() / 2))
        self.thresholds = self.control.corrected(stats, self.thresholds.__getitem__)
        return {name: layer.density for name, layer in stats.items()}


def test_each_layer_sends_its_share_and_small_ones_about_one_coordinate_a_step():
    walks = Walks(LayerControl(DENSITY), dict.fromkeys(LAYERS, 30.0))
    densities = [walks.step() for _ in range(1000)]
    average = {name: np.mean([step[name] for step in densities[100:]]) for name in LAYERS}
    for name in ("large", "small", "drifting"):
        assert average[name] == pytest.approx(DENSITY, rel=0.1)
    assert average["bias"] == pytest.approx(1 / 5, rel=0.2)
    assert average["one"] == pytest.approx(1 / 2, rel=0.2)
    assert 0.1 < walks.thresholds["one"] < 10  # and it does not fall for ever
    assert walks.thresholds["large"] > 100 * walks.thresholds["small"]


def test_a_layer_that_is_not_used_keeps_its_threshold():
    walks = Walks(LayerControl(DENSITY), dict.fromkeys(LAYERS, 1.0))
    for _ in range(100):
        walks.step()
    walks.step(used={"large"})  # in which others may still send what had reached λ as it was before
    before = walks.thresholds
    for _ in range(20):
        walks.step(used={"large"})
    assert {name for name in LAYERS if walks.thresholds[name] == before[name]} == LAYERS.keys() - {"large"}


def test_it_goes_on_from_its_state():
    straight = Walks(LayerControl(DENSITY), dict.fromkeys(LAYERS, 1.0))
    for _ in range(30):
        straight.step()
    resumed = Walks(LayerControl(DENSITY), dict(straight.thresholds))
    resumed.control.load_state_dict(straight.control.state_dict())
    resumed.residuals = {name: residual.copy() for name, residual in straight.residuals.items()}
    resumed.generator = np.random.default_rng(1)
    straight.generator = np.random.default_rng(1)
    for step in range(30):
        used = set(LAYERS) if step else {"large"}
        assert straight.step(used) == resumed.step(used)
        assert straight.thresholds == resumed.thresholds


def test_an_empty_layer_has_none():
    assert LayerControl(DENSITY).corrected({"empty": LayerStats(0, 0, 0.0, 0.0)}, lambda _: 1.0) == {}


def test_only_layers_for_which_a_step_counts_are_corrected():
    control = LayerControl(DENSITY)
    stats = {name: LayerStats(1000, 1000, 1.0, 1.0) for name in ("stepped", "dropped")}
    found = control.corrected(stats, lambda _: 1.0, {"stepped"})
    assert found["stepped"] > 1
    assert found["dropped"] == 1


def test_a_layer_of_another_size_is_held_to_its_new_share():
    control = LayerControl(DENSITY)
    control.corrected({"bias": LayerStats(1, 1, 0.5, 1.0)}, lambda _: 1.0)
    control.corrected({"bias": LayerStats(20, 10, 0.5, 1.0)}, lambda _: 1.0)
    assert control.state_dict()["bias"]["density"] == 1 / 20
