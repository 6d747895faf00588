"""Calibrates λ for a density, and then controls λ to reach the density, per model or per layer."""

from dataclasses import dataclass
from math import exp, log, sqrt

from torch import finfo, float32

from lightning_sparse.engine.step_stats import LayerStats

RECENT_STEPS = 10
"""The running density is averaged over about this many steps. RECENT_STEPS, HORIZON and GAIN assume a pace of 1."""
HORIZON = 100
"""The controller makes up for a surplus or deficit since calibration in about this many steps."""
GAIN = 0.04
"""log λ changes by this share of log(recent / aim). Density is roughly proportional to 1/λ², so gain and average form a
loop with a damping ratio of 1 / sqrt(8 · GAIN · RECENT_STEPS) = 0.56."""
DENSITY_OF_PACE_1, MAX_PACE = 0.01, 5.0
"""The pace is 1 up to DENSITY_OF_PACE_1, then grows in proportion to the density, up to MAX_PACE. A change of λ
takes effect in about 1 / density steps, and a training may have only 40 exchanges. At a higher pace, λ would oscillate
if all coordinates move about equally far, as with Adam."""
LOG_RATIO = log(16.0)
"""The limit of |log(recent / aim)| and of the logarithm of the excess."""
EXCESS_FACTOR, EXCESS_GAIN = 2.0, 0.2
"""If the running and the current density both exceed the target by the factor, log λ also grows by the gain times the
log of the excess: a λ calibrated during learning rate warmup is soon a hundred times too small. At a pace of 1, λ grows
by at most 95 % per step and falls by at most 11 %. At the highest pace, it triples or falls by 43 %."""
LOG_AIM = log(4.0)
"""The largest distance of the controller's aim from the target density, in logarithms."""
FLOAT8_ERROR = 300.0
"""If the root mean square of unsent values exceeds this many λ, λ is too small for float8, which sends at most 14,000
to 28,000 λ. The rounding errors of values within that range stay below it."""
SMALLEST, LARGEST = finfo(float32).tiny, finfo(float32).max
"""λ stays between these: it is compared with float32 values."""
MAX_SMALL_LAYER_SHARE = 0.5
"""The largest target share of a layer whose density asks for less than one coordinate per step."""


def first_threshold(squared_gradient_norm: float, num_elements: int, density: float, overshoot: float = 0.0) -> float:
    """Return λ = sqrt(E‖g‖² / (density · d · (1 − κ²))), in gradient units.

    The residual of a coordinate with gradient noise of variance σ² is a random walk that restarts when it leaves
    (−λ, λ), after about λ²/σ² steps. So the average density is about E‖g‖² / (λ² d). At densities below 1 %, this
    estimate is within 20 % on a small ResNet on CIFAR-10. Above about 10 %, it is too high, because the walk overshoots
    a λ close to σ. At a constant λ, the density changes with the scale of the gradients.

    Args:
        squared_gradient_norm: (1/n) Σ_i ‖g_i‖² of a step, in gradient units squared.
        num_elements: d.
        density: the density to aim at, in (0, 1].
        overshoot: κ of the hard threshold.
    """
    return sqrt(squared_gradient_norm / (density * num_elements * (1 - overshoot**2)))


def pace_of(density: float) -> float:
    """Return the pace of λ relative to densities of at most 1 %.

    Example:
        >>> [pace_of(density) for density in (0.001, 0.01, 0.03, 0.3)]
        [1.0, 1.0, 3.0, 5.0]
    """
    return min(MAX_PACE, max(1.0, density / DENSITY_OF_PACE_1))


@dataclass
class DensityControl:
    """Adjusts λ of a model or layer slowly, equally on all workers.

    A proportional controller that aims at the target density and compensates for an earlier surplus or deficit. It uses
    global densities relative to the target; ``seen`` is that of the last step::

        owed   = Σ (1 − seen)                              in steps at the target density
        aim    = exp(owed · pace / HORIZON)                within a factor of four
        λ      ← λ · (recent / aim) ^ (GAIN · pace) · max(1, min(recent, seen) / 2) ^ EXCESS_GAIN

    Attributes:
        density: the share of coordinates to send on average, in (0, 1].
        recent: the running density, relative to the target.
        owed: the deficit since calibration, in steps at the target density.
        squared_error: (1/n) Σ_i ‖e_i‖² after the last step; -1 before the first.
    """

    density: float
    recent: float = 1.0
    owed: float = 0.0
    squared_error: float = -1.0

    def corrected(
        self,
        threshold: float,
        stats: LayerStats,
        pace: float,
        *,
        is_float8: bool = False,
        overshoot: float = 0.0,
    ) -> float:
        """Return λ for the next step.

        λ does not change if nothing was sent and the residual has not changed: the layer was not used, or the learning
        rate of a drift is 0. λ also stays if too little was sent although all nonzero values were sent, or are too
        large for float8. A smaller λ would then not send more, and the controller does not compensate for the step.

        Args:
            threshold: λ of this step.
            stats: the statistics of this step.
            pace: the pace of λ relative to small densities; see ``pace_of``.
            is_float8: whether sent values are limited to a multiple of λ.
            overshoot: κ of the hard threshold.
        """
        has_moved = stats.selected or stats.squared_error != self.squared_error
        self.squared_error = stats.squared_error
        if not has_moved:
            return threshold
        seen = stats.density / self.density
        self.recent += (seen - self.recent) * pace / RECENT_STEPS
        # Residuals of κ λ, which sent values leave, do not count. Else λ would fall forever at an unreachable target.
        num_sent = min(1.0, 1.25 * self.recent) * self.density * stats.num_elements
        left_by_sent = num_sent * (overshoot * threshold) ** 2
        is_out_of_range = is_float8 and stats.squared_error > stats.num_elements * (FLOAT8_ERROR * threshold) ** 2
        if seen < 1 and (stats.squared_error <= left_by_sent or is_out_of_range):
            return threshold
        most = LOG_AIM * HORIZON / pace
        self.owed = min(most, self.owed + 1 - seen)  # bounded, so that a long deficit is not sent at once
        aim = max(-LOG_AIM, min(LOG_AIM, self.owed * pace / HORIZON))
        off = log(self.recent) - aim if self.recent > 0 else -LOG_RATIO
        excess = log(max(1.0, min(self.recent, seen) / EXCESS_FACTOR))
        change = GAIN * pace * max(-LOG_RATIO, min(LOG_RATIO, off)) + EXCESS_GAIN * min(LOG_RATIO, excess)
        return max(SMALLEST, min(LARGEST, threshold * exp(change)))


def share_of_layer(density: float, num_elements: int) -> float:
    """Return a layer's target: ``density``, or one coordinate per step if more.

    This minimum is at most half of the coordinates: a layer with a target of 100 % could never compensate for a step
    that sent less, so λ would fall forever.

    Example:
        >>> [share_of_layer(0.01, size) for size in (1, 10, 1000)]
        [0.5, 0.1, 0.01]
    """
    return max(density, min(MAX_SMALL_LAYER_SHARE, 1 / num_elements))
