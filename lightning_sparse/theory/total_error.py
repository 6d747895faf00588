"""The total error of a fixed sequence, and the threshold that minimises it (Lemma 3)."""

import torch
from torch import Tensor

from lightning_sparse.theory.arguments import is_whole, require_real


def total_error(sequence: Tensor, sent: Tensor) -> float:
    """Return Σ_t ‖a_t − sent part of a_t‖², the total error of a training.

    Args:
        sequence: a_t, the compensated gradients, shape (T, d).
        sent: bool of the same shape.

    Raises:
        ValueError: a mask of another shape or another dtype.
    """
    if sent.dtype != torch.bool or sent.shape != sequence.shape:
        raise ValueError(f"Got sent of {sent.dtype}, shape {tuple(sent.shape)}. Must be bool, {tuple(sequence.shape)}.")
    require_real(sequence)
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
    if not (is_whole(budget) and budget <= sequence.numel()):
        raise ValueError(
            f"Invalid {budget=}. Must be a whole number from 1 to {sequence.numel()}, the coordinates of all steps."
        )
    require_real(sequence)
    magnitudes = sequence.double().abs().flatten()
    if bool(magnitudes.isnan().any()):
        raise ValueError("Got a sequence with NaN. Must be numbers only.")
    return float(magnitudes.kthvalue(sequence.numel() - int(budget) + 1).values)
