"""The statistics of a residual coordinate: its send rate, lag and size.

If a coordinate's gradients are independent with mean μ and standard deviation σ, its residual e is a random walk. The
coordinate is sent when |e| reaches λ, and e restarts at −κ λ sign(e), where κ is the overshoot. The
formulas are exact for a Brownian motion with that drift and variance, between boundaries that account for the mean
jump of a discrete walk beyond λ (0.583 σ; Siegmund, Advances in Applied Probability, 1979).
"""

from math import expm1, inf, isfinite
from typing import NamedTuple

MEAN_JUMP = 0.5826
"""−ζ(1/2) / √(2π): the mean distance in σ by which a Gaussian walk exceeds a boundary that it crosses."""
SMALLEST_DRIFT = 1e-3
"""Below this μ b / σ² (b: the boundary), the limits for small μ apply, accurate to 1e-6."""


class ResidualStatistics(NamedTuple):
    """Long-run statistics of a coordinate.

    Attributes:
        density: share of the steps in which the coordinate is sent, in 0…1.
        mean: E[e], in gradient units. Divided by μ it is the lag in steps.
        mean_square: E[e²], in gradient units squared.
    """

    density: float
    mean: float
    mean_square: float


def residual_statistics(
    threshold: float, *, noise: float, drift: float = 0.0, overshoot: float = 0.0
) -> ResidualStatistics:
    """Return density, E[e] and E[e²] of a coordinate under a hard threshold with overshoot.

    Accurate for λ of several σ. At equal density an overshoot of κ divides the lag by (1 + κ) / (1 − κ).

    Args:
        threshold: λ > 0.
        noise: σ ≥ 0, the standard deviation of a gradient.
        drift: μ, the mean of a gradient; not 0 if σ is 0.
        overshoot: κ, in [0, 1).

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> plain, ahead = (residual_statistics(10.0, noise=1.0, overshoot=kappa) for kappa in (0.0, 0.5))
        >>> round(plain.density, 4), round(ahead.density, 4)
        (0.0089, 0.0115)
    """
    # Tensors of one element and numpy's numbers may have float32, in which differences below cancel.
    threshold, noise, drift, overshoot = float(threshold), float(noise), float(drift), float(overshoot)
    for name, value, is_allowed, allowed in (
        ("threshold", threshold, 0 < threshold < inf, "finite and above 0"),
        ("noise", noise, 0 <= noise < inf, "finite and at least 0"),
        ("drift", drift, isfinite(drift) and (drift != 0 or noise > 0), "finite, and not 0 without noise"),
        ("overshoot", overshoot, 0 <= overshoot < 1, "within [0, 1)"),
    ):
        if not is_allowed:
            raise ValueError(f"Invalid {name}={value}. Must be {allowed}.")
    start, boundary, variance = overshoot * threshold, threshold + MEAN_JUMP * noise, noise**2
    sign, drift = (-1.0, -drift) if drift < 0 else (1.0, drift)
    if drift * boundary < SMALLEST_DRIFT * variance:
        # The limits for a small drift: linear in it, or independent of it.
        mean = drift * (boundary - start) ** 2 / (6 * variance)
        return ResidualStatistics(variance / (boundary**2 - start**2), sign * mean, (boundary**2 + start**2) / 6)
    above_from_low, above_from_high = (_exit_above(position, boundary, variance, drift) for position in (-start, start))
    above = above_from_high / (1 - above_from_low + above_from_high)  # share of exits above, after which e restarts low

    def per_passage(cubic: float, quadratic: float, linear: float) -> float:
        """Return the mean change of a polynomial of e from a restart to the next exit."""
        ends = ((boundary, above), (-boundary, 1 - above), (-start, -above), (start, above - 1))
        return sum(share * (cubic * e**3 + quadratic * e**2 + linear * e) for e, share in ends)

    # Itô: these polynomials grow on average by 1, e and e² per step.
    steps = per_passage(0, 0, 1 / drift)
    sum_of_e = per_passage(0, 1 / (2 * drift), -variance / (2 * drift**2))
    sum_of_squares = per_passage(1 / (3 * drift), -variance / (2 * drift**2), variance**2 / (2 * drift**3))
    return ResidualStatistics(1 / steps, sign * sum_of_e / steps, sum_of_squares / steps)


def _exit_above(position: float, boundary: float, variance: float, drift: float) -> float:
    """Return the probability that a walk from this position leaves (−boundary, boundary) at the top."""
    if variance == 0:
        return 1.0
    return expm1(-2 * drift * (position + boundary) / variance) / expm1(-4 * drift * boundary / variance)
