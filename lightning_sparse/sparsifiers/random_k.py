"""The Random-k sparsifier: send a share of every bucket that chance picks anew in each step."""

import hashlib

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier, require_density


class RandomK(MarkingSparsifier):
    """Selects k = max(1, ⌊density · size⌋) coordinates of every bucket, each as likely as any other.

    Random-k with error feedback (Stich, Cordonnier and Jaggi, *Sparsified SGD with memory*, NeurIPS 2018): what is not
    sent is kept, so nothing is scaled up. A coordinate waits 1 / density steps on average, however large it is.

    Which ones follows from the seed, the number of the step and the layers in the bucket, so that a resumed run picks
    what one without a stop would have.

    Args:
        density: the share to send, in (0, 1].
        same_on_all: whether all workers send the same coordinates; if not, each picks its own.
        seed: at least 0.

    Raises:
        ValueError: a density outside (0, 1], or a seed that is no whole number of at least 0.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(8,))
        >>> RandomK(density=0.5).select(torch.ones(8), layout).indices.numel()
        4
    """

    def __init__(self, density: float = 0.001, same_on_all: bool = True, seed: int = 0) -> None:
        require_density(density, "0.1 % of each bucket")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"Invalid {seed=}. Must be a whole number of at least 0.")
        self.density = density
        self.same_on_all = same_on_all
        self.seed = seed
        self._step = self._rank = 0

    def begin_step(self, step: int, rank: int) -> None:
        """Notes what this step's choice follows from."""
        self._step, self._rank = step, rank

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Marks k coordinates and every non-finite one; see :meth:`MarkingSparsifier.mark`."""
        marks = compensated.isfinite().logical_not_()
        if marks.numel():
            k = max(1, int(self.density * marks.numel()))
            marks.index_fill_(0, self._lots(layout, marks.device).topk(k, sorted=False).indices, True)
        return marks

    def _lots(self, layout: LayerLayout, device: torch.device) -> Tensor:
        """Returns a lot for each coordinate: int64, no two alike, the same on every kind of device."""
        what = (self.seed, self._step, 0 if self.same_on_all else self._rank, layout.names, layout.sizes)
        digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
        lots = torch.arange(layout.num_elements, device=device).add_(int.from_bytes(digest, "big", signed=True))
        return _mixed(lots)


def _mixed(numbers: Tensor) -> Tensor:
    """Maps 64-bit numbers one to one onto others that look like chance, in place.

    The finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        numbers.mul_(factor - (1 << 64) if factor >> 63 else factor)
    return numbers
