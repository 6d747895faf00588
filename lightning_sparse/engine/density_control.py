"""Control of λ after calibration, so that the average volume meets the density, per model or per layer."""

from collections.abc import Callable, Collection, Mapping
from math import exp, log

from torch import finfo, float32

from lightning_sparse.engine.step_stats import LayerStats, StepStats

RECENT_STEPS = 10
"""The running density is averaged over about this many steps. This and the next two hold at a pace of 1."""
HORIZON = 100
"""The controller makes up for a surplus or deficit since calibration in about this many steps."""
GAIN = 0.04
"""λ changes by this share of the ratio, in logarithms. Density goes about with 1/λ², so gain and average make a loop of
damping ratio 1 / sqrt(8 · GAIN · RECENT_STEPS) = 0.56."""
UNHURRIED, FASTEST = 0.01, 5.0
"""Up to this density the pace is 1. Above it, the pace grows in proportion, up to this many times: a change of λ takes
effect in about 1 / density steps, and a training may have only 40 exchanges. At a higher pace λ would swing if all
coordinates move about equally far, as Adam's do."""
FURTHEST = log(16.0)
"""A running density that is further off than this factor counts as this far off."""
FAR_TOO_MUCH, CATCHING_UP = 2.0, 0.2
"""While both the running and the present density exceed the wanted one by more than this factor, λ grows by this share
of the excess as well: after calibration on the first steps of a warmup, λ is soon a hundred times too small. At a pace
of 1 λ grows by at most 95 % per step and falls by at most 11 %; at the highest pace it triples, or falls by 43 %."""
MOST_OWED = log(4.0)
"""The density aimed at is never further from the wanted density than this factor."""
SMALLEST, LARGEST = finfo(float32).tiny, finfo(float32).max
"""λ stays between these: it is compared with float32 values."""
MOST_FOR_ONE = 0.5
"""The largest share that a small layer is held to because its density is less than one coordinate."""


def pace_of(density: float) -> float:
    """Return how many times faster λ changes than at densities of 1 % and less.

    Example:
        >>> [pace_of(density) for density in (0.001, 0.01, 0.03, 0.3)]
        [1.0, 1.0, 3.0, 5.0]
    """
    return min(FASTEST, max(1.0, density / UNHURRIED))


class DensityControl:
    """Adjusts λ slowly from densities that all workers saw, to the same value on all of them.

    A proportional controller that aims at the density asked for, and makes up for a surplus or deficit so far::

        owed   = Σ (asked − seen)                          in steps at the density asked for
        aim    = asked · exp(owed · pace / HORIZON)        within a factor of four
        λ      ← λ · (recent / aim) ^ (GAIN · pace) · max(1, min(recent, seen) / (2 · asked)) ^ CATCHING_UP

    Args:
        density: the share of coordinates to send on average, in (0, 1].
        pace: how many times faster λ changes than at small densities; see ``pace_of``.
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
            is_all: whether all values but zeros were sent. A smaller λ would have sent no more, so λ does not fall, and
                the controller does not make up for this step.
        """
        seen = density / self.density
        if is_all and seen < 1:
            self._recent += (seen - self._recent) * self._pace / RECENT_STEPS
            return threshold
        most = MOST_OWED * HORIZON / self._pace
        self._owed = min(most, self._owed + 1 - seen)  # bounded: a long deficit is not sent at once
        self._recent += (seen - self._recent) * self._pace / RECENT_STEPS
        aim = max(-MOST_OWED, min(MOST_OWED, self._owed * self._pace / HORIZON))
        off = log(self._recent) - aim if self._recent > 0 else -FURTHEST
        excess = log(max(1.0, min(self._recent, seen) / FAR_TOO_MUCH))
        gain = GAIN * self._pace
        change = gain * max(-FURTHEST, min(FURTHEST, off)) + CATCHING_UP * min(FURTHEST, excess)
        return max(SMALLEST, min(LARGEST, threshold * exp(change)))

    def state_dict(self) -> dict[str, float]:
        """Return the running density and the deficit, both relative to the density asked for."""
        return {"recent": self._recent, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the result of ``state_dict``."""
        self._recent, self._owed = state["recent"], state["owed"]


def is_all_sent(stats: StepStats | LayerStats, density: float, excess: float) -> bool:
    """Return whether a smaller λ would have sent no more: no residual is left but what sent values leave behind.

    A sent value leaves κ λ. So many residuals of that size as the density asks for do not count: λ would fall for ever
    where a density cannot be reached.

    Args:
        stats: of a step, or of a layer in it.
        density: the density asked for.
        excess: κ λ; without overshoot every residual must be zero.
    """
    return stats.squared_error <= density * stats.num_elements * excess**2


def share_of_layer(density: float, num_elements: int) -> float:
    """Return the share of a layer with this many elements that is sent on average.

    Example:
        >>> [share_of_layer(0.01, size) for size in (1, 10, 1000)]
        [0.5, 0.1, 0.01]
    """
    return max(density, min(MOST_FOR_ONE, 1 / num_elements))


class LayerControl:
    """Adjusts λ of every layer from densities that all workers saw, to the same values on all of them.

    A layer of fewer than 1 / density elements is held to one coordinate per step, and to at most half of its
    coordinates. A layer to be sent whole could never make up for a step that sent less, and λ would fall for ever. If
    a layer sent nothing and its residual did not change, the layer was not used, and λ stays.

    Args:
        density: the share of each layer to send on average, in (0, 1].
        keeps_rest: whether unsent values stay in the residual. If not, λ also falls while a layer is not used: the
            numbers of a layer that sent nothing are the same whether its gradient was zero or below λ.
        overshoot: κ of the hard threshold.
    """

    def __init__(self, density: float, *, keeps_rest: bool = True, overshoot: float = 0.0) -> None:
        self.density = density
        self._keeps_rest = keeps_rest
        self._overshoot = overshoot
        # Not the pace of a layer's own density: λ of a layer that sends one coordinate every second step would jump.
        self._pace = pace_of(density)
        self._layers: dict[str, DensityControl] = {}

    def corrected(
        self,
        layers: Mapping[str, LayerStats],
        threshold_of: Callable[[str], float],
        names: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Return λ of every layer for the next step, from this step's numbers and λ of each layer.

        Layers for which this step does not count keep their λ; it counts for ``names``, or for all if that is None.
        """
        return {
            name: self._of(name, stats, threshold_of(name)) if names is None or name in names else threshold_of(name)
            for name, stats in layers.items()
            if stats.num_elements
        }

    def _of(self, name: str, stats: LayerStats, threshold: float) -> float:
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
