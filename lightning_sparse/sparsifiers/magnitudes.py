"""The k-th largest magnitude of tensors that lie apart, without sorting them and without bringing them together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DIGIT_BITS = 16
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def kth_largest_magnitude(parts: Sequence[Callable[[], Tensor]], k: int, dtype: torch.dtype) -> Tensor:
    """Returns the k-th largest magnitude of all parts together. Nothing waits for the device.

    Magnitudes are in the order of their bits, read as whole numbers. So a histogram of their highest 16 bits tells
    those of the k-th, a histogram of the next 16 among those that share them tells these, and so on (a radix
    selection): two looks at float32, four at float64. NaN counts as larger than infinity.

    Args:
        parts: each returns one of the tensors whenever it is called: shape (m,).
        k: at least 1 and at most the number of all elements.
        dtype: of the parts, float32 or float64.

    Returns:
        One element of this dtype, on the first part's device.
    """
    found: Tensor | None = None
    place: Tensor | None = None
    for shift in range(8 * dtype.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        histogram: Tensor | None = None
        for part in parts:
            words = part().abs().view(_INTEGERS[dtype])
            counts = _histogram(words, shift, None if found is None else found.to(words.device, non_blocking=True))
            histogram = counts if histogram is None else histogram.add_(counts.to(histogram.device, non_blocking=True))
        assert histogram is not None
        at_least = histogram.flip(0).cumsum(0)  # how many have the highest digit, one of the two highest, …
        place = torch.full_like(at_least[0], k) if place is None else place
        higher = (at_least < place).count_nonzero()  # digits above that of the k-th
        place = place - torch.cat([at_least.new_zeros(1), at_least]).index_select(0, higher.view(1)).view(())
        digit = len(at_least) - 1 - higher
        found = digit if found is None else found << DIGIT_BITS | digit
    assert found is not None
    return found.to(_INTEGERS[dtype]).view(dtype)


def _histogram(words: Tensor, shift: int, above: Tensor | None) -> Tensor:
    """Counts the digits at ``shift`` of the words whose higher digits are those given: int64, shape (2**16,)."""
    digits = words >> shift
    if above is not None:
        # Others count as one digit more, which is cut off.
        digits = torch.where(digits >> DIGIT_BITS == above, digits & (1 << DIGIT_BITS) - 1, 1 << DIGIT_BITS)
    size = (1 << DIGIT_BITS) + 1
    if words.device.type == "cpu":
        return digits.bincount(minlength=size)[:-1]
    counts = torch.zeros(size, dtype=torch.int64, device=words.device)  # bincount would wait for a GPU
    return counts.index_add_(0, digits, counts.new_ones(1).expand(digits.numel()))[:-1]
