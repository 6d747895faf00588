"""Controls λ after calibration to reach the density, per model or per layer."""

from collections.abc import Callable, Collection, Mapping
from math import exp, log

from torch import finfo, float32

from lightning_sparse.engine.step_stats import LayerStats, StepStats

RECENT_STEPS = 10
"""The running density is averaged over about this many steps. RECENT_STEPS, HORIZON and GAIN assume a pace of 1."""
HORIZON = 100
"""The controller makes up for a surplus or deficit since calibration in about this many steps."""
GAIN = 0.04
"""λ changes by this share of the ratio, in logarithms. Density is roughly proportional to 1/λ², so gain and average
form a loop with a damping ratio of 1 / sqrt(8 · GAIN · RECENT_STEPS) = 0.56."""
UNHURRIED, FASTEST = 0.01, 5.0
"""The pace is 1 up to this density and then grows in proportion, up to this maximum. A change of λ takes effect in
about 1 / density steps, and a training may have only 40 exchanges. At a higher pace, λ would oscillate if all
coordinates move about equally far, as with Adam."""
FURTHEST = log(16.0)
"""The controller limits the ratio of running to target density to this factor."""
FAR_TOO_MUCH, CATCHING_UP = 2.0, 0.2
"""If both the running and the current density exceed the target by this factor, λ also grows by this share of the
excess: after calibration in the first warmup steps, λ is soon a hundred times too small. At a pace of 1, λ grows by at
most 95 % per step and falls by at most 11 %. At the highest pace, it triples or falls by 43 %."""
MOST_OWED = log(4.0)
"""The controller's aim is within this factor of the target density."""
SMALLEST, LARGEST = finfo(float32).tiny, finfo(float32).max
"""λ stays between these: it is compared with float32 values."""
MOST_FOR_ONE = 0.5
"""The largest target share of a small layer in which the density is less than one coordinate."""


def pace_of(density: float) -> float:
    """Return the pace of λ relative to densities of at most 1 %.

    Example:
        >>> [pace_of(density) for density in (0.001, 0.01, 0.03, 0.3)]
        [1.0, 1.0, 3.0, 5.0]
    """
    return min(FASTEST, max(1.0, density / UNHURRIED))


class DensityControl:
    """Adjusts λ slowly from global densities, so that it is equal on all workers.

    A proportional controller that aims at the target density and compensates for an earlier surplus or deficit::

        owed   = Σ (asked − seen)                          in steps at the target density
        aim    = asked · exp(owed · pace / HORIZON)        within a factor of four
        λ      ← λ · (recent / aim) ^ (GAIN · pace) · max(1, min(recent, seen) / (2 · asked)) ^ CATCHING_UP

    Args:
        density: the share of coordinates to send on average, in (0, 1].
        pace: the pace of λ relative to small densities; see ``pace_of``.
    """

    def __init__(self, density: float, pace: float) -> None:
        self.density = density
        self.squared_error = -1.0  # of a layer after the last step; LayerControl sets it
        self._pace = pace
        self._recent = 1.0
        self._owed = 0.0

    def corrected(self, threshold: float, density: float, *, is_all: bool = False) -> float:
        """Return λ for the next step.

        Args:
            threshold: λ of this step.
            density: the density of this step, in 0…1.
            is_all: whether all nonzero values were sent. A smaller λ would not send more, so λ does not fall, and the
                controller does not compensate for this step.
        """
        seen = density / self.density
        if is_all and seen < 1:
            self._recent += (seen - self._recent) * self._pace / RECENT_STEPS
            return threshold
        most = MOST_OWED * HORIZON / self._pace
        self._owed = min(most, self._owed + 1 - seen)  # bounded, so that a long deficit is not sent at once
        self._recent += (seen - self._recent) * self._pace / RECENT_STEPS
        aim = max(-MOST_OWED, min(MOST_OWED, self._owed * self._pace / HORIZON))
        off = log(self._recent) - aim if self._recent > 0 else -FURTHEST
        excess = log(max(1.0, min(self._recent, seen) / FAR_TOO_MUCH))
        gain = GAIN * self._pace
        change = gain * max(-FURTHEST, min(FURTHEST, off)) + CATCHING_UP * min(FURTHEST, excess)
        return max(SMALLEST, min(LARGEST, threshold * exp(change)))

    def state_dict(self) -> dict[str, float]:
        """Return the running density and the deficit, relative to the target density."""
        return {"recent": self._recent, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the result of ``state_dict``."""
        self._recent, self._owed = state["recent"], state["owed"]


def is_all_sent(stats: StepStats | LayerStats, density: float, excess: float) -> bool:
    """Return whether the residual is too small for a smaller λ to send more.

    With overshoot, a sent value leaves a residual of κ λ. Such residuals are ignored, up to the number that the density
    allows. Otherwise λ would fall forever if the density cannot be reached.

    Args:
        stats: the statistics of a step, or of a layer in a step.
        density: the target density.
        excess: κ λ; without overshoot, every residual must be zero.
    """
    return stats.squared_error <= density * stats.num_elements * excess**2


def share_of_layer(density: float, num_elements: int) -> float:
    """Return the target share of a layer with this many elements.

    Example:
        >>> [share_of_layer(0.01, size) for size in (1, 10, 1000)]
        [0.5, 0.1, 0.01]
    """
    return max(density, min(MOST_FOR_ONE, 1 / num_elements))


class LayerControl:
    """Adjusts λ of every layer from global densities, so that all workers agree.

    The target of a layer with fewer than 1 / density elements is one coordinate per step, but at most half of its
    coordinates. A layer with a target of 100 % could never compensate for a step that sent less, so λ would fall
    forever. If a layer sent nothing and its residual did not change, the layer was not used, and λ does not change.

    Args:
        density: the share of each layer to send on average, in (0, 1].
        keeps_rest: whether unsent values stay in the residual. If not, λ also falls while a layer is not used, because
            the statistics do not show whether its gradient was zero or below λ.
        overshoot: κ of the hard threshold.
    """

    def __init__(self, density: float, *, keeps_rest: bool = True, overshoot: float = 0.0) -> None:
        self.density = density
        self._keeps_rest = keeps_rest
        self._overshoot = overshoot
        # Not the pace of a layer's target: λ of a layer that sends a coordinate in every second step would jump.
        self._pace = pace_of(density)
        self._layers: dict[str, DensityControl] = {}

    def corrected(
        self,
        layers: Mapping[str, LayerStats],
        threshold_of: Callable[[str], float],
        names: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Return λ of every layer for the next step.

        The step adjusts λ of layers in ``names``, or of all layers if ``names`` is None. Other layers keep their λ.
        """
        thresholds = {name: threshold_of(name) for name, stats in layers.items() if stats.num_elements}
        return {
            name: self._correct_layer(name, layers[name], threshold) if names is None or name in names else threshold
            for name, threshold in thresholds.items()
        }

    def _correct_layer(self, name: str, stats: LayerStats, threshold: float) -> float:
        asked = share_of_layer(self.density, stats.num_elements)
        layer = self._layers.get(name)
        if layer is None or layer.density != asked:  # the checkpoint's layer had another size
            layer = self._layers[name] = DensityControl(asked, self._pace)
        has_moved = stats.selected or stats.squared_error != layer.squared_error
        layer.squared_error = stats.squared_error
        if not has_moved and self._keeps_rest:
            return threshold
        is_all = self._keeps_rest and is_all_sent(stats, asked, self._overshoot * threshold)
        return layer.corrected(threshold, stats.density, is_all=is_all)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the controller state of every layer."""
        return {
            name: layer.state_dict() | {"density": layer.density, "squared_error": layer.squared_error}
            for name, layer in self._layers.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the result of ``state_dict``."""
        self._layers.clear()
        for name, saved in state.items():
            layer = self._layers[name] = DensityControl(saved["density"], self._pace)
            layer.load_state_dict(saved)
            layer.squared_error = saved["squared_error"]
