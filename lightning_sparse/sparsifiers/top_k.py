"""The Top-k sparsifiers: send a fixed share of every layer, or of the whole model."""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import (
    Granularity,
    LayerLayout,
    MarkingSparsifier,
    WholeStep,
    require_density,
    require_word,
)

DIGIT_BITS = 16
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


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
            Then no exchange can begin before backward has ended, and two more passes read p
            (``lightning_sparse.sparsifiers.top_k.kth_largest_magnitude``).

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
        """Discards the k-th magnitude of the last step."""
        self._kth = None

    def survey(self, step: WholeStep) -> None:
        """Finds the k-th largest magnitude of the whole step."""
        if step.num_elements:
            self._kth = kth_largest_magnitude(step.buckets, _k(self.density, step.num_elements), step.dtype)

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Marks k coordinates of each layer, or this bucket's of the model's, and every non-finite one."""
        if not self.needs_survey:
            return mark_by_layer(compensated, compensated.abs(), layout, lambda _: self.density)
        if not compensated.numel():
            return torch.zeros_like(compensated, dtype=torch.bool)
        kth = self._kth
        if kth is None:  # without a survey, the bucket is the whole model
            k = _k(self.density, compensated.numel())
            kth = kth_largest_magnitude([lambda: compensated], k, compensated.dtype)
        # No value is below NaN, so if NaN is the k-th, finite values stay.
        kth = kth.to(compensated.device, non_blocking=True).nan_to_num(nan=torch.inf, posinf=torch.inf)
        magnitude = compensated.abs()
        # A tensor without dimensions would be rounded to the bucket's dtype, and might admit smaller magnitudes.
        return (magnitude < kth.view(1)).logical_not_().logical_and_(magnitude != 0)


def mark_by_layer(
    compensated: Tensor, scores: Tensor, layout: LayerLayout, density_of: Callable[[str], float]
) -> Tensor:
    """Marks the k largest scores of each layer, k by the density of its name, and every non-finite value."""
    # topk counts NaN as largest, but a layer may hold more non-finite values than k, and all must be sent.
    selected = compensated.isfinite().logical_not_()
    for name, start, end in layout.spans():
        if end > start:
            largest = scores[start:end].topk(_k(density_of(name), end - start), sorted=False).indices
            selected[start:end].index_fill_(0, largest, True)
    return selected


def _k(density: float, num_elements: int) -> int:
    return max(1, int(density * num_elements))


def kth_largest_magnitude(parts: Sequence[Callable[[], Tensor]], k: int, dtype: torch.dtype) -> Tensor:
    """Returns the k-th largest magnitude of all parts together. Nothing waits for the device.

    This is a radix selection, because magnitudes are in the order of their bits. A histogram of their highest 16 bits
    gives those of the k-th. A histogram of the next 16 bits, of magnitudes that share the highest, gives the next 16.
    This takes two passes over float32 and four over float64. NaN counts as larger than infinity.

    Args:
        parts: each returns a tensor of shape (m,) whenever it is called.
        k: from 1 to the number of all elements.
        dtype: of the parts, float32 or float64.

    Returns:
        One element of this dtype, on the first part's device.
    """
    prefix: Tensor | None = None
    rank: Tensor | int = k
    for shift in range(8 * dtype.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        histogram: Tensor | None = None
        for part in parts:
            words = part().abs().view(_INTEGERS[dtype])
            counts = _histogram(words, shift, None if prefix is None else prefix.to(words.device, non_blocking=True))
            histogram = counts if histogram is None else histogram.add_(counts.to(histogram.device, non_blocking=True))
        assert histogram is not None
        at_least = histogram.flip(0).cumsum(0)  # counts of the highest digit, of the two highest digits, …
        higher = (at_least < rank).count_nonzero()  # digits above the k-th's digit
        rank = rank - torch.cat([at_least.new_zeros(1), at_least]).index_select(0, higher.view(1)).view(())
        digit = len(at_least) - 1 - higher
        prefix = digit if prefix is None else prefix << DIGIT_BITS | digit
    assert prefix is not None
    return prefix.to(_INTEGERS[dtype]).view(dtype)


def _histogram(words: Tensor, shift: int, above: Tensor | None) -> Tensor:
    """Counts the digits at ``shift`` of the words with the given higher digits: int64, shape (2**16,)."""
    digits = words >> shift
    if above is not None:
        # Other words count as a digit beyond the last, which is dropped.
        digits = torch.where(digits >> DIGIT_BITS == above, digits & (1 << DIGIT_BITS) - 1, 1 << DIGIT_BITS)
    size = (1 << DIGIT_BITS) + 1
    if words.device.type == "cpu":
        return digits.bincount(minlength=size)[:-1]
    counts = torch.zeros(size, dtype=torch.int64, device=words.device)  # bincount would synchronise with a GPU
    return counts.index_add_(0, digits, counts.new_ones(1).expand(digits.numel()))[:-1]
