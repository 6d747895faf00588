"""Computes values, gradients, smoothness and the minimum of l2-regularised logistic regression."""

from dataclasses import dataclass
from functools import cached_property

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import logsigmoid

CURVATURE_RATIO = 1e4
"""Ratio of the smoothness of f without the penalty to l2, as in the paper's Fig. 1."""
LARGEST_ERROR_OF_MINIMUM = 1e-12


@dataclass(frozen=True)
class Objective:
    """f(x) = (1/N) Σ_j log(1 + exp(−b_j ⟨a_j, x⟩)) + (l2/2) ‖x‖², with l2 = λ_max(AᵀA) / (4 N) / 10⁴.

    All tensors are float64.

    Args:
        features: A, shape (N, d).
        labels: b, -1 or 1, shape (N,).
    """

    features: Tensor
    labels: Tensor

    @property
    def num_elements(self) -> int:
        """d, the number of unknowns."""
        return self.features.shape[1]

    @cached_property
    def data_smoothness(self) -> float:
        """λ_max(AᵀA) / (4 N), the smoothness of f without the penalty, since max σ'(·) = 1/4."""
        return float(torch.linalg.eigvalsh(self.features.T @ self.features)[-1]) / (4 * len(self.features))

    @cached_property
    def l2(self) -> float:
        """The factor of the penalty, which is also the strong convexity of f."""
        return self.data_smoothness / CURVATURE_RATIO

    @property
    def smoothness(self) -> float:
        """L, the smoothness of f with the penalty."""
        return self.data_smoothness + self.l2

    def value(self, x: Tensor) -> float:
        """Return f(x)."""
        return float(-logsigmoid(self.labels * (self.features @ x)).mean() + self.l2 / 2 * x.dot(x))

    def gradient(self, x: Tensor) -> Tensor:
        """Return ∇f(x), shape (d,)."""
        slopes = -self.labels * torch.sigmoid(-self.labels * (self.features @ x))
        return self.features.T @ slopes / len(slopes) + self.l2 * x

    def gradients(self, x: Tensor, examples: Tensor) -> Tensor:
        """Return the gradients of single examples at x; each includes the penalty, so their mean is ∇f.

        Args:
            x: shape (d,).
            examples: indices of the examples, int64, shape (m,).

        Returns:
            Shape (m, d).
        """
        rows, labels = self.features[examples], self.labels[examples]
        slopes = -labels * torch.sigmoid(-labels * (rows @ x))
        return slopes[:, None] * rows + self.l2 * x


def bound_error(objective: Objective, x: Tensor) -> float:
    """Return ‖∇f(x)‖² / (2 l2), an upper bound of f(x) − f* by strong convexity."""
    return float(objective.gradient(x).square().sum()) / (2 * objective.l2)


def find_minimiser(objective: Objective) -> Tensor:
    """Return x with f(x) − f* below 1e-12, shape (d,).

    Raises:
        RuntimeError: scikit-learn does not reach this accuracy.
    """
    steepest = (objective.l2 * LARGEST_ERROR_OF_MINIMUM) ** 0.5 / objective.num_elements**0.5
    model = LogisticRegression(
        C=1 / (objective.l2 * len(objective.labels)), fit_intercept=False, solver="newton-cholesky", tol=steepest
    )
    x = torch.from_numpy(model.fit(objective.features.numpy(), objective.labels.numpy()).coef_[0])
    if not (error := bound_error(objective, x)) < LARGEST_ERROR_OF_MINIMUM:
        raise RuntimeError(f"The minimum has an error of up to {error:g}, above {LARGEST_ERROR_OF_MINIMUM:g}.")
    return x
