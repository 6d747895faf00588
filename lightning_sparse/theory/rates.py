"""The paper's rates for convex f, without the constants and logarithms that its O and Õ leave out.

An absolute compressor leaves ‖p − out‖² ≤ v² in every step: v² = d λ² for a hard threshold. A contraction leaves at
most (1 − δ) ‖p‖²: see `top_k_contraction`. Compare how rates grow; do not compare their values with measurements.
"""

from math import exp, sqrt

from lightning_sparse.theory.bounds import Problem, require


def strongly_convex_rate(problem: Problem, squared_distance: float, num_steps: int, absolute_error: float) -> float:
    """Return the rate of E f(x̃_T) − f* for an absolute compressor and strongly convex f (Theorem 4).

    L R₀ (1 + M/n) exp(−μ T / (8 L (1 + 2M/n))) + (σ² + M D) / (μ n T) + L v² / (μ² T²)

    Args:
        problem: L, n, M, σ², D and μ > 0.
        squared_distance: R₀ = ‖x_0 − x*‖².
        num_steps: T.
        absolute_error: v².

    Raises:
        ValueError: μ = 0, or a number outside its range.
    """
    require(squared_distance=squared_distance, num_steps=num_steps, absolute_error=absolute_error)
    mu, smoothness, ratio = _strong_convexity(problem), problem.smoothness, problem.relative_noise / problem.num_workers
    decay = exp(-mu * num_steps / (8 * smoothness * (1 + 2 * ratio)))
    start = smoothness * squared_distance * (1 + ratio) * decay
    noise = problem.noise_at_minimiser / (mu * problem.num_workers * num_steps)
    return start + noise + smoothness * absolute_error / (mu * num_steps) ** 2


def strongly_convex_contraction_rate(
    problem: Problem, squared_distance: float, num_steps: int, contraction: float
) -> float:
    """Return the rate of E f(x̃_T) − f* for a contraction and strongly convex f (Remark 6).

    L R₀ (√(1 + M δ) / δ) exp(−μ δ T / (16 √3 L √(2 + M δ))) + (σ² + M D) / (μ n T)
    + L (D (1 + M δ) + δ σ²) / (μ² δ² T²)

    Args:
        problem: as for `strongly_convex_rate`.
        squared_distance: R₀.
        num_steps: T.
        contraction: δ, in (0, 1].
    """
    require(squared_distance=squared_distance, num_steps=num_steps, contraction=contraction)
    mu, smoothness, delta = _strong_convexity(problem), problem.smoothness, contraction
    scaled = problem.relative_noise * delta
    decay = exp(-mu * delta * num_steps / (16 * sqrt(3) * smoothness * sqrt(2 + scaled)))
    start = smoothness * squared_distance * sqrt(1 + scaled) / delta * decay
    noise = problem.noise_at_minimiser / (mu * problem.num_workers * num_steps)
    return start + noise + smoothness * _contraction_error(problem, delta) / (mu * num_steps) ** 2


def convex_rate(problem: Problem, squared_distance: float, num_steps: int, absolute_error: float) -> float:
    """Return the rate of E f(x̃_T) − f* for an absolute compressor and convex f (Theorem 5, Remark 7).

    √((σ² + M D) R₀) / √(n T) + (n L v² / (σ² + M D) + L (1 + M/n)) R₀ / T; without noise at the minimiser
    (L v R₀)^(2/3) / T^(2/3) + L (1 + M/n) R₀ / T.

    Args:
        problem: L, n, M, σ² and D.
        squared_distance: R₀.
        num_steps: T.
        absolute_error: v².
    """
    require(squared_distance=squared_distance, num_steps=num_steps, absolute_error=absolute_error)
    smoothness, n, noise = problem.smoothness, problem.num_workers, problem.noise_at_minimiser
    start = smoothness * (1 + problem.relative_noise / n) * squared_distance / num_steps
    if noise == 0:
        return float((smoothness * sqrt(absolute_error) * squared_distance / num_steps) ** (2 / 3)) + start
    error = n * smoothness * absolute_error / noise * squared_distance / num_steps
    return sqrt(noise * squared_distance / (n * num_steps)) + error + start


def convex_contraction_rate(problem: Problem, squared_distance: float, num_steps: int, contraction: float) -> float:
    """Return the rate of E f(x̃_T) − f* for a contraction and convex f (Remark 8).

    √((σ² + M D) R₀) / √(n T) + (L √(1 + M δ) / δ + n L (D (1 + M δ) + δ σ²) / (δ² (σ² + M D))) R₀ / T

    Args:
        problem: as for `convex_rate`.
        squared_distance: R₀.
        num_steps: T.
        contraction: δ, in (0, 1].

    Raises:
        ValueError: no noise at the minimiser, for which the paper states no rate; or a number outside its range.
    """
    require(squared_distance=squared_distance, num_steps=num_steps, contraction=contraction)
    smoothness, n, noise, delta = problem.smoothness, problem.num_workers, problem.noise_at_minimiser, contraction
    if noise == 0:
        raise ValueError("Got σ² + M D = 0. Must be above 0 for Remark 8; give the problem's noise.")
    start = smoothness * sqrt(1 + problem.relative_noise * delta) / delta
    error = n * smoothness * _contraction_error(problem, delta) / noise
    return sqrt(noise * squared_distance / (n * num_steps)) + (start + error) * squared_distance / num_steps


def top_k_contraction(density: float, *, bell_shaped: bool = False) -> float:
    """Return δ of Top-k: k/d for any vector, and k (2d − k) / d² for bell-shaped coordinates.

    The second bound, ‖x − Top_k(x)‖² ≤ (1 − k/d)² ‖x‖², is that of Shi et al. (*Understanding Top-k sparsification in
    distributed deep learning*, 2019, arXiv:1911.08772).

    Args:
        density: k/d, in (0, 1].
        bell_shaped: whether the coordinates are as in Shi et al.

    Example:
        >>> top_k_contraction(0.1), round(top_k_contraction(0.1, bell_shaped=True), 4)
        (0.1, 0.19)
    """
    require(density=density)
    return density * (2 - density) if bell_shaped else density


def _contraction_error(problem: Problem, delta: float) -> float:
    """Return (D (1 + M δ) + δ σ²) / δ²: 1/δ where all workers share a minimiser, 1/δ² where they do not."""
    return (problem.gradients_at_minimiser * (1 + problem.relative_noise * delta) + delta * problem.noise) / delta**2


def _strong_convexity(problem: Problem) -> float:
    if problem.strong_convexity == 0:
        raise ValueError("Got strong_convexity=0. Must be above 0 for this rate; use a rate for convex f.")
    return problem.strong_convexity
