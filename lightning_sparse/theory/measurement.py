"""Functions of recorded gradients: estimates of their noise, and the threshold of the smallest total error."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
        raise ValueError(f"Got draws of shapes {shapes}. Must be (draws, d) for every worker.")
    if any(len(draws) < 2 for draws in gradients):
        raise ValueError(f"Got {min(map(len, gradients))} draws of a worker. Must be at least 2 to have a variance.")
    _require_real(*gradients)
    variances = torch.stack([draws.double().var(dim=0).sum() for draws in gradients])
    means = torch.stack([draws.double().mean(dim=0) for draws in gradients])
    counts = variances.new_tensor([len(draws) for draws in gradients])
    left = float((variances / counts).mean()) * (1 - 1 / len(gradients))
    spread = float(((means - means.mean(dim=0)) ** 2).sum(dim=1).mean())
    return float(variances.mean()), spread - left


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
    if not 1 <= budget <= sequence.numel() or budget % 1 != 0:
        raise ValueError(
            f"Invalid {budget=}. Must be a whole number from 1 to {sequence.numel()}, the coordinates of all steps."
        )
    _require_real(sequence)
    magnitudes = sequence.double().abs().flatten()
    if bool(magnitudes.isnan().any()):
        raise ValueError("Got a sequence with NaN. Must be numbers only.")
    return float(magnitudes.kthvalue(sequence.numel() - int(budget) + 1).values)


def _require_real(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.is_complex():
            raise ValueError(f"Got {tensor.dtype}. Must be real: convert complex tensors with torch.view_as_real.")
