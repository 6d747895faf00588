"""The Random-k sparsifier, which sends a new random share of every layer in each step, and its random numbers."""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import require_count, require_density, require_flag
from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier
from lightning_sparse.sparsifiers.top_k import mark_by_layer

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The distance between the numbers of two steps, 2**64 divided by the golden ratio, odd."""


class RandomK(MarkingSparsifier):
    """Selects k = max(1, ⌊density · size⌋) coordinates of every layer, each as likely as any other.

    Random-k with error feedback (Stich, Cordonnier and Jaggi, *Sparsified SGD with memory*, NeurIPS 2018): unsent
    values are kept, so sent values are not scaled up. A coordinate waits size / k steps on average, at any magnitude.

    The choice depends on the seed, the number of the step and the layer's name. A resumed run therefore makes the same
    choices as an uninterrupted run, on every kind of device and with any buckets of DDP.

    Args:
        density: the share to send, in (0, 1].
        same_on_all: whether all workers send the same coordinates; if not, each picks its own.
        seed: at least 0.

    Raises:
        ValueError: a density outside (0, 1], an invalid seed, or a ``same_on_all`` that is not True or False.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(8,))
        >>> RandomK(density=0.5).select(torch.ones(8), layout).indices.numel()
        4
    """

    def __init__(self, density: float = 0.001, *, same_on_all: bool = True, seed: int = 0) -> None:
        require_density(density, "0.1 % of each layer")
        require_flag("same_on_all", same_on_all)
        self.density = density
        self.same_on_all = same_on_all
        require_count("seed", seed, least=0)
        self.seed = seed
        self._step = self._rank = 0

    def begin_step(self, step: int, rank: int) -> None:
        """Note the number of the step and the rank."""
        self._step, self._rank = step, rank

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Mark k coordinates of each layer and every non-finite one; see `MarkingSparsifier.mark`."""
        rank = 0 if self.same_on_all else self._rank
        scores = random_bits(layout, compensated.device, seed=self.seed, step=self._step, rank=rank)
        return mark_by_layer(compensated, scores, layout, lambda _: self.density)


def random_bits(layout: LayerLayout, device: torch.device, *, seed: int, step: int, rank: int) -> Tensor:
    """Return 64 random bits per element, by seed, step, rank and layer name: int64, unique within a layer.

    They are equal on all devices.
    """
    starts, sizes = _starts(layout, device, seed, rank)
    numbers = torch.repeat_interleave(starts, sizes, output_size=layout.num_elements)
    numbers.add_(torch.arange(layout.num_elements, device=device)).add_(step * GOLDEN % (1 << 63))
    return _mix(numbers)


@lru_cache(maxsize=256)
def _starts(layout: LayerLayout, device: torch.device, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a starting number per layer, to which ``random_bits`` adds positions in the bucket, and its size."""
    starts = torch.tensor([_digest(seed, rank, name) for name in layout.names], dtype=torch.int64)
    starts -= torch.tensor(layout.boundaries[:-1], dtype=torch.int64)
    sizes = torch.tensor(layout.sizes, dtype=torch.int64)
    return starts.to(device, non_blocking=True), sizes.to(device, non_blocking=True)


def _digest(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big", signed=True)


def _mix(numbers: Tensor) -> Tensor:
    """Map 64-bit numbers one to one to numbers that look random, in place.

    The finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        numbers.mul_(factor - (1 << 64) if factor >> 63 else factor)
    return numbers
