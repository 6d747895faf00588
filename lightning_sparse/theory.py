"""The theory of a constant threshold as functions of measurable numbers.

Sahu et al., *Rethinking gradient sparsification as total error minimization* (NeurIPS 2021, arXiv:2108.00951). Workers,
n of them, minimise f = (1/n) Σ_i f_i by steps x ← x − γ (1/n) Σ_i out_i of a constant learning rate γ; worker i draws a
gradient g_i = ∇f_i(x) + ξ_i, sends out_i of p_i = e_i + g_i, and keeps e_i = p_i − out_i. The numbers of a problem:

    L       ‖∇f(x) − ∇f(y)‖ ≤ L ‖x − y‖                          how fast gradients change
    M, σ²   E‖ξ_i‖² ≤ M ‖∇f_i(x)‖² + σ²                          how noisy they are
    ζ²      (1/n) Σ_i ‖∇f_i(x) − ∇f(x)‖² ≤ ζ²                    how different the workers' data are

The constants of the bounds are those of the proofs in docs/theory.md, which are short and complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor


def total_error(sequence: Tensor, sent: Tensor) -> float:
    """Return Σ_t ‖a_t − sent part of a_t‖², the total error of a training.

    Args:
        sequence: a_t, the compensated gradients, shape (T, d).
        sent: bool of the same shape.

    Raises:
        ValueError: a mask of another shape or another dtype.
    """
    if sent.dtype != torch.bool or sent.shape != sequence.shape:
        raise ValueError(f"Got sent of {sent.dtype}, shape {tuple(sent.shape)}. Give bool of {tuple(sequence.shape)}.")
    _require_real(sequence)
    return float((sequence.double() ** 2)[~sent].sum())


def optimal_threshold(sequence: Tensor, budget: int) -> float:
    """Return the λ of the smallest total error for a number of sent coordinates of a fixed sequence (Lemma 3).

    λ is the budget-th largest magnitude of all steps together. If several coordinates have this magnitude, all of them
    are sent, a few more than the budget.

    Args:
        sequence: a_t, shape (T, d).
        budget: coordinates to send in all T steps together, from 1 to T · d.

    Raises:
        ValueError: a budget outside that range, or a NaN, which has no magnitude.

    Example:
        >>> optimal_threshold(torch.tensor([[3.0, -1.0], [0.5, 2.0]]), budget=2)
        2.0
    """
    if not (_is_whole(budget) and budget <= sequence.numel()):
        raise ValueError(
            f"Invalid {budget=}. Must be a whole number from 1 to {sequence.numel()}, the coordinates of all steps."
        )
    _require_real(sequence)
    magnitudes = sequence.double().abs().flatten()
    if bool(magnitudes.isnan().any()):
        raise ValueError("The sequence holds NaN. Give numbers.")
    return float(magnitudes.kthvalue(sequence.numel() - int(budget) + 1).values)


def squared_error_bound(num_elements: int, threshold: float, learning_rate: float = 1.0) -> float:
    """Return γ² d λ², an upper bound of ‖γ e‖²: residuals stay below λ (Remark 5).

    Args:
        num_elements: d.
        threshold: λ in gradient units.
        learning_rate: γ; 1 bounds ‖e‖², in gradient units.

    Raises:
        ValueError: a number outside its range, as in all following functions.
    """
    _require(num_elements=num_elements, threshold=threshold, learning_rate=learning_rate)
    return learning_rate**2 * num_elements * threshold**2


def top_k_squared_error_bound(density: float, squared_gradient_norm: float, learning_rate: float = 1.0) -> float:
    """Return 4 γ² (1 − δ) G² / δ², an upper bound of E‖γ e_i‖² with Top-k of density δ.

    The bound of a threshold depends on λ alone; this bound grows with the workers' own gradients, and so with ζ.

    Args:
        density: δ = k / d, in (0, 1].
        squared_gradient_norm: G² ≥ E‖g_i‖² of a worker's own gradients.
        learning_rate: γ.
    """
    _require(density=density, squared_gradient_norm=squared_gradient_norm, learning_rate=learning_rate)
    return 4 * learning_rate**2 * (1 - density) * squared_gradient_norm / density**2


def threshold_of_equal_bound(density: float, squared_gradient_norm: float, num_elements: int) -> float:
    """Return λ = 2 G √(1 − δ) / (δ √d), for which the bounds of threshold and Top-k are equal.

    A smaller λ has the better bound. The data decide how much λ sends.

    Args:
        density: δ of Top-k, in (0, 1].
        squared_gradient_norm: G² ≥ E‖g_i‖².
        num_elements: d.
    """
    _require(num_elements=num_elements)
    return sqrt(top_k_squared_error_bound(density, squared_gradient_norm) / num_elements)


@dataclass(frozen=True)
class Problem:
    """The numbers of a problem, as defined at the top of this module.

    Attributes:
        smoothness: L > 0.
        num_workers: n.
        noise: σ² ≥ 0.
        heterogeneity: ζ² ≥ 0.
        relative_noise: M ≥ 0.
    """

    smoothness: float
    num_workers: int
    noise: float
    heterogeneity: float = 0.0
    relative_noise: float = 0.0

    def __post_init__(self) -> None:
        _require(**vars(self))

    @property
    def variance_of_mean(self) -> float:
        """(M ζ² + σ²) / n, the noise of the mean gradient without its share in ∇f."""
        return (self.relative_noise * self.heterogeneity + self.noise) / self.num_workers

    def largest_learning_rate(self, *, is_convex: bool) -> float:
        """Return the largest γ for which the bound holds: 1 / (4 L (1 + M/n)) if f is convex, else twice that."""
        return (1 if is_convex else 2) / (4 * self.smoothness * (1 + self.relative_noise / self.num_workers))


def convex_bound(
    problem: Problem, squared_distance: float, learning_rate: float, num_steps: int, squared_error: float
) -> float:
    """Return an upper bound of (1/T) Σ_t E f(x_t) − f* for convex f (similar to Theorem 6).

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
    _require_rate(problem, learning_rate, is_convex=True)
    _require(num_steps=num_steps, squared_distance=squared_distance, squared_error=squared_error)
    return (
        2 * squared_distance / (learning_rate * num_steps)
        + 2 * learning_rate * problem.variance_of_mean
        + 4 * problem.smoothness * squared_error
    )


def nonconvex_bound(
    problem: Problem, suboptimality: float, learning_rate: float, num_steps: int, squared_error: float
) -> float:
    """Return an upper bound of (1/T) Σ_t E‖∇f(x_t)‖² for any f (similar to Theorem 7).

    4 (f(x_0) − f*) / (γ T) + 2 L γ (M ζ² + σ²) / n + 2 L² B

    Args:
        problem: L, n and the noise.
        suboptimality: f(x_0) − f*.
        learning_rate: γ.
        num_steps: T.
        squared_error: B, of `squared_error_bound` with the same γ.

    Raises:
        ValueError: a learning rate for which the bound does not hold.
    """
    _require_rate(problem, learning_rate, is_convex=False)
    _require(num_steps=num_steps, suboptimality=suboptimality, squared_error=squared_error)
    return (
        4 * suboptimality / (learning_rate * num_steps)
        + 2 * problem.smoothness * learning_rate * problem.variance_of_mean
        + 2 * problem.smoothness**2 * squared_error
    )


def measured_noise(gradients: Sequence[Tensor]) -> tuple[float, float]:
    """Return estimates of σ² and ζ² at one x, with M = 0.

    σ² is the mean over the workers, as the bounds need it. Both estimates are unbiased: the noise that remains in the
    mean of a worker's draws is subtracted from ζ², which may be negative if workers hardly differ. Take the largest
    estimates over the x that a training visits.

    Args:
        gradients: for each worker draws of g_i at the same x, shape (draws, d), at least two draws.

    Raises:
        ValueError: fewer than two draws of a worker, no worker, or another shape.
    """
    gradients = list(gradients)
    if not gradients or any(draws.dim() != 2 or draws.shape[1:] != gradients[0].shape[1:] for draws in gradients):
        shapes = [tuple(draws.shape) for draws in gradients]
        raise ValueError(f"Got draws of shapes {shapes}. Give (draws, d) of every worker.")
    if any(len(draws) < 2 for draws in gradients):
        raise ValueError(f"Got {min(map(len, gradients))} draws of a worker. Give two or more: one has no variance.")
    _require_real(*gradients)
    variances = torch.stack([draws.double().var(dim=0).sum() for draws in gradients])
    means = torch.stack([draws.double().mean(dim=0) for draws in gradients])
    counts = variances.new_tensor([len(draws) for draws in gradients])
    left = float((variances / counts).mean()) * (1 - 1 / len(gradients))
    spread = float(((means - means.mean(dim=0)) ** 2).sum(dim=1).mean())
    return float(variances.mean()), spread - left


def measured_smoothness(points: Tensor, gradients: Tensor) -> float:
    """Return the largest ‖∇f(x) − ∇f(y)‖ / ‖x − y‖ of neighbouring points, a lower bound of L.

    Args:
        points: x along a path, shape (points, d), at least two of them different.
        gradients: ∇f at these points, of the same shape.

    Raises:
        ValueError: other shapes, or points that are all the same.
    """
    if points.dim() != 2 or points.shape != gradients.shape:
        raise ValueError(
            f"Got points of shape {tuple(points.shape)}, gradients of {tuple(gradients.shape)}. Give (points, d) twice."
        )
    _require_real(points, gradients)
    steps = points.double().diff(dim=0).norm(dim=1)
    changes = gradients.double().diff(dim=0).norm(dim=1)
    if not bool((steps > 0).any()):
        raise ValueError(f"Got {len(points)} points, all in one place. Give two that differ.")
    return float((changes / steps)[steps > 0].max())


def _is_whole(number: float) -> bool:
    return number >= 1 and number % 1 == 0


def _require_real(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.is_complex():
            raise ValueError(f"Got {tensor.dtype}. Give real numbers: torch.view_as_real has those of complex ones.")


def _require(**numbers: float) -> None:
    for name, value in numbers.items():
        if name.startswith("num_"):
            is_allowed, allowed = _is_whole(value), "a whole number of at least 1"
        elif name == "density":
            is_allowed, allowed = 0 < value <= 1, "within (0, 1]"
        elif name in ("learning_rate", "smoothness"):
            is_allowed, allowed = value > 0, "finite and above 0"
        else:
            is_allowed, allowed = value >= 0, "finite and at least 0"
        if not (is_allowed and isfinite(value)):
            raise ValueError(f"Invalid {name}={value}. Must be {allowed}.")


def _require_rate(problem: Problem, learning_rate: float, *, is_convex: bool) -> None:
    largest = problem.largest_learning_rate(is_convex=is_convex)
    if not 0 < learning_rate <= largest * (1 + 1e-12):
        raise ValueError(f"Invalid {learning_rate=}. The bound holds above 0 and up to {largest:g} for this problem.")
