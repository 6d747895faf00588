"""Reproducible random numbers for each coordinate and step, on every worker, device and resumed run."""

import hashlib

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout, require_count

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The distance between the numbers of two steps, 2**64 divided by the golden ratio, odd."""


class RandomSource:
    """A source of random bits that depend on seed, step, rank and layer names.

    Raises:
        ValueError: a seed that is not a whole number of at least 0.
    """

    def __init__(self, seed: int) -> None:
        require_count("seed", seed, least=0)
        self._seed = seed
        self._starts: dict[tuple[LayerLayout, torch.device, int], tuple[Tensor, Tensor]] = {}

    def random_bits(self, layout: LayerLayout, device: torch.device, step: int, rank: int) -> Tensor:
        """Returns 64 random bits per element: int64, unique within a layer, equal on all devices."""
        key = (layout, device, rank)
        if key not in self._starts:  # added to an element's position in the bucket
            starts = torch.tensor([_digest(self._seed, rank, name) for name in layout.names], dtype=torch.int64)
            starts -= torch.tensor(layout.boundaries[:-1], dtype=torch.int64)
            sizes = torch.tensor(layout.sizes, dtype=torch.int64)
            self._starts[key] = starts.to(device, non_blocking=True), sizes.to(device, non_blocking=True)
        starts, sizes = self._starts[key]
        numbers = torch.repeat_interleave(starts, sizes, output_size=layout.num_elements)
        numbers.add_(torch.arange(layout.num_elements, device=device)).add_(step * GOLDEN % (1 << 63))
        return _mix(numbers)


def _digest(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big", signed=True)


def _mix(numbers: Tensor) -> Tensor:
    """Maps 64-bit numbers one to one to numbers that look random, in place.

    The finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        numbers.mul_(factor - (1 << 64) if factor >> 63 else factor)
    return numbers
