"""The Top-k sparsifiers: send a fixed share of every layer, or of the whole model."""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import require_density, require_word
from lightning_sparse.sparsifiers.protocol import Granularity, LayerLayout, MarkingSparsifier


class TopK(MarkingSparsifier):
    """Selects the k coordinates of largest magnitude of every layer, or of the whole model.

    The usual alternative to the hard threshold (Aji and Heafield, EMNLP 2017; layer-wise as in the experiments of Sahu
    et al., NeurIPS 2021). k = max(1, ⌊density · size⌋) of a layer or of the model.

    Unsent values have no bound: the residual can build up for as long as gradients stay large. By layer, even a layer
    whose gradient is zero sends k coordinates, and ``torch.topk`` chooses among equal magnitudes. By model, all
    magnitudes that equal the k-th are sent, and no zeros.

    Args:
        density: the share to send, in (0, 1].
        granularity: ``"layer"`` or ``"model"``, which compares magnitudes of all layers.
            With ``"model"``, no exchange can begin before backward has ended, and the selection copies all magnitudes.

    Raises:
        ValueError: a density outside (0, 1], or another granularity.

    Example:
        >>> layout = LayerLayout(names=("weight", "bias"), sizes=(4, 1))
        >>> TopK(density=0.5).select(torch.tensor([0.1, -3.0, 2.0, 0.0, 0.5]), layout).indices.tolist()
        [1, 2, 4]
    """

    def __init__(self, density: float = 0.001, granularity: Granularity = "layer") -> None:
        require_density(density, "0.1 % of each layer")
        require_word("granularity", granularity, get_args(Granularity))
        self.density = density
        self.granularity = granularity
        self.needs_survey = granularity == "model"
        self._kth: Tensor | None = None

    def begin_step(self, step: int, rank: int) -> None:
        """Discard the k-th magnitude of the last step."""
        self._kth = None

    def survey(self, buckets: Sequence[Callable[[], Tensor]]) -> None:
        """Find the k-th largest magnitude of the whole step."""
        self._kth = kth_largest_magnitude(buckets, self.density)

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Mark the bucket's Top-k coordinates, and non-finite ones."""
        if not self.needs_survey:
            return mark_by_layer(compensated, compensated.abs(), layout, lambda _: self.density)
        if not compensated.numel():
            return torch.zeros_like(compensated, dtype=torch.bool)
        kth = self._kth
        if kth is None:  # without a survey, the bucket is the whole model
            kth = kth_largest_magnitude([lambda: compensated], self.density)
        kth = kth.to(compensated.device, non_blocking=True)
        magnitude = compensated.abs()
        # A tensor without dimensions would be rounded to the bucket's dtype, and might admit smaller magnitudes.
        return (magnitude < kth.view(1)).logical_not_().logical_and_(magnitude != 0)


def mark_by_layer(
    compensated: Tensor, scores: Tensor, layout: LayerLayout, density_of: Callable[[str], float]
) -> Tensor:
    """Mark the k largest scores of each layer, k by the density of its name, and every non-finite value."""
    # topk counts NaN as largest, but a layer may hold more non-finite values than k, and all must be sent.
    selected = compensated.isfinite().logical_not_()
    for name, start, end in layout.spans():
        if end > start:
            largest = scores[start:end].topk(k_of(density_of(name), end - start), sorted=False).indices
            selected[start:end].index_fill_(0, largest, True)
    return selected


def k_of(density: float, num_elements: int) -> int:
    """Return max(1, ⌊density · num_elements⌋) without floats' errors: 0.29 · 100 is below 29.

    >>> k_of(0.29, 100), k_of(1 / 3, 9), k_of(0.001, 100)
    (29, 3, 1)
    """
    return max(1, int(density * num_elements * (1 + 2**-50)))


def kth_largest_magnitude(parts: Sequence[Callable[[], Tensor]], density: float) -> Tensor:
    """Return the k-th largest magnitude of all parts together. Nothing waits for the device.

    Args:
        parts: each returns a tensor of shape (m,), float32 or float64.
        density: k is this share of all elements.

    Returns:
        One element on the first part's device, in the widest dtype. NaN counts as infinity. 0 without elements.
    """
    first, *others = (part().abs() for part in parts)
    magnitudes = torch.cat([first, *(other.to(first.device, non_blocking=True) for other in others)])
    magnitudes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    k = k_of(density, magnitudes.numel())
    return magnitudes.topk(k, sorted=False).values.min() if magnitudes.numel() else magnitudes.new_zeros(())
