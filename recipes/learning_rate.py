"""The learning-rate schedule of the published experiments."""

from bisect import bisect_right
from collections.abc import Sequence


def relative_learning_rate(
    epoch: float, *, warmup_from: float, warmup_epochs: float, milestones: Sequence[float]
) -> float:
    """Returns the learning rate at a point of the training, as a multiple of the rate after the warm-up.

    Args:
        epoch: epochs since the start, with fractions.
        warmup_from: the multiple at the start.
        warmup_epochs: epochs until the multiple is 1.
        milestones: epochs from which on it is a tenth of what it was, in rising order.

    Example:
        >>> schedule = dict(warmup_from=1 / 16, warmup_epochs=5, milestones=(150, 250))
        >>> [round(1.6 * relative_learning_rate(epoch, **schedule), 4) for epoch in (0, 2.5, 5, 149.9, 150, 250)]
        [0.1, 0.85, 1.6, 1.6, 0.16, 0.016]
    """
    if epoch < warmup_epochs:
        return warmup_from + (1 - warmup_from) * epoch / warmup_epochs
    return float(0.1 ** bisect_right(milestones, epoch))
