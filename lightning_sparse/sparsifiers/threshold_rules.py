"""λ from a density: the paper's rule, and calibration on the gradients of the first steps."""

from dataclasses import dataclass
from math import isfinite, sqrt

from lightning_sparse.sparsifiers.protocol import require_count, require_density

FEWEST_STEPS = 3
STABLE = 0.2
"""Calibration ends once the standard error of the mean ‖g‖² is this share of the mean."""


def paper_threshold(density: float, num_elements: int) -> float:
    """Returns λ = 1 / (2√k) with k = density · num_elements, in gradient units.

    The rule of Sahu et al. (NeurIPS 2021, arXiv:2108.00951, section 5). It ignores the scale of the gradients: on a
    small ResNet on CIFAR-10 it missed the density by a factor of 6. Prefer ``density=…``, which calibrates.

    Args:
        density: the share of coordinates to be sent on average, in (0, 1].
        num_elements: d, the elements of all trained parameters, at least 1.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> round(paper_threshold(0.001, 11_173_962), 5)
        0.00473
    """
    require_density(density, "one of a thousand coordinates")
    require_count("num_elements", num_elements)
    return 1 / (2 * sqrt(density * num_elements))


@dataclass
class ThresholdCalibration:
    """Measures E‖g‖² over the first steps and turns a density into λ = sqrt(E‖g‖² / (density · d)).

    The residual of a coordinate with gradient noise of variance σ² is a random walk that restarts when it leaves
    (−λ, λ), after about λ²/σ² steps. So the average density is about E‖g‖² / (λ² d). The estimate is within 20 % below
    1 % density on a small ResNet on CIFAR-10. Above some 10 % it is too high, because the walk overshoots a λ of the
    order of σ. The density follows changes of the gradients' scale during training.

    Args:
        density: the density to aim at, in (0, 1].
        steps: the largest number of steps to average over; fewer if the mean is stable earlier.
        overshoot: κ of the hard threshold, with which the density is E‖g‖² / (λ² d (1 − κ²)).
        measured_steps: the number of observed norms.
        sum: Σ_t ‖g_t‖² of these.
        sum_of_squares: Σ_t ‖g_t‖⁴ of these.
    """

    density: float
    steps: int
    overshoot: float = 0.0
    measured_steps: int = 0
    sum: float = 0.0
    sum_of_squares: float = 0.0

    def observe(self, squared_gradient_norm: float) -> None:
        """Adds a step's (1/n) Σ_i ‖g_i‖² (gradient units squared), unless it is NaN or infinite."""
        if isfinite(squared_gradient_norm):
            self.measured_steps += 1
            self.sum += squared_gradient_norm
            self.sum_of_squares += squared_gradient_norm * squared_gradient_norm  # ** raises on overflow

    @property
    def is_complete(self) -> bool:
        """Whether enough steps were measured, at least one of them with a nonzero gradient."""
        return self.sum > 0 and (self.measured_steps >= self.steps or self._is_stable())

    def _is_stable(self) -> bool:
        steps, mean = self.measured_steps, self.sum / self.measured_steps
        if steps < FEWEST_STEPS:
            return False
        variance = max(0.0, self.sum_of_squares / steps - mean**2) * steps / (steps - 1)
        return variance / steps <= (STABLE * mean) ** 2

    def threshold(self, num_elements: int) -> float:
        """Returns λ in gradient units, for a model of d = num_elements, once the calibration is complete."""
        return sqrt(self.sum / self.measured_steps / (self.density * num_elements * (1 - self.overshoot**2)))
