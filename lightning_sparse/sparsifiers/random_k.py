"""The Random-k sparsifier: send a share of every layer that chance picks anew in each step."""

import hashlib

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier, require_density

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio, odd: by so much the numbers of two steps are apart."""


class RandomK(MarkingSparsifier):
    """Selects k = max(1, ⌊density · size⌋) coordinates of every layer, each as likely as any other.

    Random-k with error feedback (Stich, Cordonnier and Jaggi, *Sparsified SGD with memory*, NeurIPS 2018): what is not
    sent is kept, so nothing is scaled up. A coordinate waits size / k steps on average, however large it is.

    Which ones follows from the seed, the number of the step and the layer's name, so that a resumed run picks what one
    without a stop would have, on every kind of device and however DDP cuts its buckets.

    Args:
        density: the share to send, in (0, 1].
        same_on_all: whether all workers send the same coordinates; if not, each picks its own.
        seed: at least 0.

    Raises:
        ValueError: a density outside (0, 1], or a seed that is no whole number of at least 0.
        TypeError: a ``same_on_all`` that is neither True nor False.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(8,))
        >>> RandomK(density=0.5).select(torch.ones(8), layout).indices.numel()
        4
    """

    def __init__(self, density: float = 0.001, *, same_on_all: bool = True, seed: int = 0) -> None:
        require_density(density, "0.1 % of each layer")
        if not isinstance(same_on_all, bool):
            raise TypeError(f"Invalid {same_on_all=}. Must be True or False.")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"Invalid {seed=}. Must be a whole number of at least 0.")
        self.density = density
        self.same_on_all = same_on_all
        self.seed = seed
        self._step = self._rank = 0
        self._starts: dict[tuple[LayerLayout, torch.device, int], tuple[Tensor, Tensor]] = {}

    def begin_step(self, step: int, rank: int) -> None:
        """Notes what this step's choice follows from."""
        self._step, self._rank = step, rank

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Marks k coordinates of each layer and every non-finite one; see :meth:`MarkingSparsifier.mark`."""
        marks = compensated.isfinite().logical_not_()
        lots = self._lots(layout, marks.device)
        for _, start, end in layout.spans():
            if end > start:
                k = max(1, int(self.density * (end - start)))
                marks[start:end].index_fill_(0, lots[start:end].topk(k, sorted=False).indices, True)
        return marks

    def _lots(self, layout: LayerLayout, device: torch.device) -> Tensor:
        """Returns a lot for each coordinate: int64, no two of a layer alike, the same on every kind of device."""
        starts, sizes = self._numbers_of_layers(layout, device)
        numbers = torch.repeat_interleave(starts, sizes, output_size=layout.num_elements)
        numbers.add_(torch.arange(layout.num_elements, device=device)).add_(self._step * GOLDEN % (1 << 63))
        return _mixed(numbers)

    def _numbers_of_layers(self, layout: LayerLayout, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns what is added to an element's place in the bucket, and sizes: int64, shapes (L,), on the device."""
        rank = 0 if self.same_on_all else self._rank
        key = (layout, device, rank)
        if key not in self._starts:
            starts = torch.tensor([_digest(self.seed, rank, name) for name in layout.names], dtype=torch.int64)
            starts -= torch.tensor(layout.boundaries[:-1], dtype=torch.int64)
            sizes = torch.tensor(layout.sizes, dtype=torch.int64)
            self._starts[key] = starts.to(device, non_blocking=True), sizes.to(device, non_blocking=True)
        return self._starts[key]


def _digest(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big", signed=True)


def _mixed(numbers: Tensor) -> Tensor:
    """Maps 64-bit numbers one to one onto others that look like chance, in place.

    The finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        numbers.mul_(factor - (1 << 64) if factor >> 63 else factor)
    return numbers
