"""Random numbers of each coordinate and step, which every worker, device and resumed run can repeat."""

import hashlib

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout, require_count

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio, odd: the distance between the numbers of two steps."""


class RandomSource:
    """Draws random bits that follow from a seed, the number of a step, a worker's rank and the layers' names.

    Raises:
        ValueError: a seed that is not a whole number of at least 0.
    """

    def __init__(self, seed: int) -> None:
        require_count("seed", seed, least=0)
        self._seed = seed
        self._starts: dict[tuple[LayerLayout, torch.device, int], tuple[Tensor, Tensor]] = {}

    def random_bits(self, layout: LayerLayout, device: torch.device, step: int, rank: int) -> Tensor:
        """Returns 64 random bits for each element: int64, no two of a layer alike, the same on every kind of device."""
        key = (layout, device, rank)
        if key not in self._starts:  # to add to an element's place in the bucket
            starts = torch.tensor([_digest(self._seed, rank, name) for name in layout.names], dtype=torch.int64)
            starts -= torch.tensor(layout.boundaries[:-1], dtype=torch.int64)
            sizes = torch.tensor(layout.sizes, dtype=torch.int64)
            self._starts[key] = starts.to(device, non_blocking=True), sizes.to(device, non_blocking=True)
        starts, sizes = self._starts[key]
        numbers = torch.repeat_interleave(starts, sizes, output_size=layout.num_elements)
        numbers.add_(torch.arange(layout.num_elements, device=device)).add_(step * GOLDEN % (1 << 63))
        return _mixed(numbers)


def _digest(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big", signed=True)


def _mixed(numbers: Tensor) -> Tensor:
    """Maps 64-bit numbers one to one onto others that look random, in place.

    The finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        numbers.mul_(factor - (1 << 64) if factor >> 63 else factor)
    return numbers
