"""Bounds of residuals and of convergence; docs/concepts/theory.md proves them."""

from dataclasses import dataclass
from math import isfinite, sqrt

from lightning_sparse.sparsifiers.checks import require_count, require_density


def squared_error_bound(num_elements: int, threshold: float, learning_rate: float = 1.0) -> float:
    """Return γ² d λ², an upper bound of ‖γ e‖², because residuals stay below λ (Remark 5).

    Args:
        num_elements: d.
        threshold: λ in gradient units.
        learning_rate: γ; 1 bounds ‖e‖², in gradient units.

    Raises:
        ValueError: a number outside its range, as in all following functions.
    """
    require(num_elements=num_elements, threshold=threshold, learning_rate=learning_rate)
    return learning_rate**2 * num_elements * threshold**2


def top_k_squared_error_bound(density: float, squared_gradient_norm: float, learning_rate: float = 1.0) -> float:
    """Return 4 γ² (1 − δ) G² / δ², an upper bound of E‖γ e_i‖² with Top-k of density δ.

    The bound of a threshold depends on λ alone; this bound grows with the workers' own gradients, and so with ζ.

    Args:
        density: δ = k / d, in (0, 1].
        squared_gradient_norm: G² ≥ E‖g_i‖² of a worker's own gradients.
        learning_rate: γ.
    """
    require(density=density, squared_gradient_norm=squared_gradient_norm, learning_rate=learning_rate)
    return 4 * learning_rate**2 * (1 - density) * squared_gradient_norm / density**2


@dataclass(frozen=True)
class Problem:
    """The numbers of a problem, as ``lightning_sparse.theory`` defines them.

    Attributes:
        smoothness: L > 0.
        num_workers: n.
        noise: σ² ≥ 0.
        heterogeneity: ζ² ≥ 0.
        relative_noise: M ≥ 0.
        relative_heterogeneity: C ≥ 0.
        gradients_at_minimiser: D ≥ 0, for convex f.
        strong_convexity: μ ≥ 0, 0 if f is not strongly convex.
    """

    smoothness: float
    num_workers: int
    noise: float
    heterogeneity: float = 0.0
    relative_noise: float = 0.0
    relative_heterogeneity: float = 0.0
    gradients_at_minimiser: float = 0.0
    strong_convexity: float = 0.0

    def __post_init__(self) -> None:
        require(**vars(self))

    @property
    def variance_of_mean(self) -> float:
        """Return (M ζ² + σ²) / n, the noise of the mean gradient without its part proportional to ∇f."""
        return (self.relative_noise * self.heterogeneity + self.noise) / self.num_workers

    @property
    def noise_at_minimiser(self) -> float:
        """Return σ² + M D, the noise of a worker's gradient at the minimiser."""
        return self.noise + self.relative_noise * self.gradients_at_minimiser

    def largest_learning_rate(self, *, is_convex: bool) -> float:
        """Return the largest γ of the bound, 1 / (4 L (1 + M (C + 1) / n)) for convex f, and twice that otherwise."""
        relative = self.relative_noise * (self.relative_heterogeneity + 1) / self.num_workers
        return (1 if is_convex else 2) / (4 * self.smoothness * (1 + relative))


def convex_bound(
    problem: Problem, squared_distance: float, learning_rate: float, num_steps: int, squared_error: float
) -> float:
    """Return an upper bound of (1/T) Σ_t E f(x_t) − f* for convex f, with the rate of Theorem 5.

    2 ‖x_0 − x*‖² / (γ T) + 2 γ (M ζ² + σ²) / n + 4 L B

    Args:
        problem: L, n and the noise.
        squared_distance: ‖x_0 − x*‖² from the first iterate to a minimiser.
        learning_rate: γ.
        num_steps: T.
        squared_error: B, of `squared_error_bound` with the same γ.

    Raises:
        ValueError: a learning rate for which the bound does not hold.
    """
    _require_at_most(learning_rate, problem.largest_learning_rate(is_convex=True))
    require(num_steps=num_steps, squared_distance=squared_distance, squared_error=squared_error)
    return (
        2 * squared_distance / (learning_rate * num_steps)
        + 2 * learning_rate * problem.variance_of_mean
        + 4 * problem.smoothness * squared_error
    )


def nonconvex_bound(
    problem: Problem, suboptimality: float, learning_rate: float, num_steps: int, squared_error: float
) -> float:
    """Return an upper bound of (1/T) Σ_t E‖∇f(x_t)‖² for any f (Theorem 6; Theorem 1 for one worker).

    4 (f(x_0) − f*) / (γ T) + 2 L γ (M ζ² + σ²) / n + 2 L² B

    Args:
        problem: L, n and the noise.
        suboptimality: f(x_0) − f*.
        learning_rate: γ.
        num_steps: T.
        squared_error: B, of `squared_error_bound` with the same γ. Theorem 1 takes (1/T) Σ_t E‖e_t‖² of any compressor.

    Raises:
        ValueError: a learning rate for which the bound does not hold.
    """
    _require_at_most(learning_rate, problem.largest_learning_rate(is_convex=False))
    require(num_steps=num_steps, suboptimality=suboptimality, squared_error=squared_error)
    return (
        4 * suboptimality / (learning_rate * num_steps)
        + 2 * problem.smoothness * learning_rate * problem.variance_of_mean
        + 2 * problem.smoothness**2 * squared_error
    )


def nonconvex_contraction_bound(
    problem: Problem, suboptimality: float, learning_rate: float, num_steps: int, contraction: float
) -> float:
    """Return an upper bound of (1/T) Σ_t E‖∇f(x_t)‖² for any f and a contraction such as Top-k (Theorem 7).

    8 (f(x_0) − f*) / (γ T) + 4 γ L (M ζ² + σ²) / n + (8 γ² L² / δ) ((2/δ + M) ζ² + σ²)

    Args:
        problem: L, n, the noise, ζ² and C.
        suboptimality: f(x_0) − f*.
        learning_rate: γ.
        num_steps: T.
        contraction: δ, in (0, 1], of `top_k_contraction`.

    Raises:
        ValueError: a learning rate for which the bound does not hold.
    """
    require(num_steps=num_steps, suboptimality=suboptimality, contraction=contraction)
    relative = (2 / contraction + problem.relative_noise) * sqrt(problem.relative_heterogeneity + 1)
    largest = min(problem.largest_learning_rate(is_convex=False), 1 / (2 * problem.smoothness * relative))
    _require_at_most(learning_rate, largest)
    error = (2 / contraction + problem.relative_noise) * problem.heterogeneity + problem.noise
    return (
        8 * suboptimality / (learning_rate * num_steps)
        + 4 * learning_rate * problem.smoothness * problem.variance_of_mean
        + 8 * (learning_rate * problem.smoothness) ** 2 / contraction * error
    )


def threshold_from_estimates(
    num_selected: int, num_elements: int, noise: float, heterogeneity: float, relative_noise: float = 0.0
) -> float:
    """Return λ = (2/√k) √((2d/k + M) ζ² + σ²), in gradient units, from estimates of a problem (section 6).

    For this λ the last terms of Theorem 6 and Theorem 7 are equal. ``paper_threshold`` is the simplification of it that
    the paper's Table 1 uses. Both bound an error; neither predicts how many coordinates λ sends.

    Args:
        num_selected: k of Top-k.
        num_elements: d.
        noise: σ², for example of `measured_noise`.
        heterogeneity: ζ².
        relative_noise: M.

    Example:
        >>> threshold_from_estimates(num_selected=100, num_elements=10_000, noise=0.25, heterogeneity=0.0)
        0.1
    """
    require(num_selected=num_selected, num_elements=num_elements)
    require(noise=noise, heterogeneity=heterogeneity, relative_noise=relative_noise)
    error = (2 * num_elements / num_selected + relative_noise) * heterogeneity + noise
    return 2 * sqrt(error / num_selected)


def paper_threshold(density: float, num_elements: int) -> float:
    """Return λ = 1 / (2√k) with k = density · num_elements, in gradient units.

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


def require(**numbers: float) -> None:
    """Raise ValueError if a number is outside the range of its name."""
    for name, value in numbers.items():
        if name.startswith("num_"):
            is_allowed, allowed = value >= 1 and value % 1 == 0, "a whole number of at least 1"
        elif name in ("density", "contraction"):
            is_allowed, allowed = 0 < value <= 1, "within (0, 1]"
        elif name in ("learning_rate", "smoothness"):
            is_allowed, allowed = value > 0, "finite and above 0"
        else:
            is_allowed, allowed = value >= 0, "finite and at least 0"
        if not (is_allowed and isfinite(value)):
            raise ValueError(f"Invalid {name}={value}. Must be {allowed}.")


def _require_at_most(learning_rate: float, largest: float) -> None:
    if not 0 < learning_rate <= largest * (1 + 1e-12):
        raise ValueError(f"Invalid {learning_rate=}. Must be within (0, {largest:g}] for the bound of this problem.")
