"""Reproducible random numbers for each coordinate and step, on every worker, device and resumed run."""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The distance between the numbers of two steps, 2**64 divided by the golden ratio, odd."""


def random_bits(layout: LayerLayout, device: torch.device, *, seed: int, step: int, rank: int) -> Tensor:
    """Returns 64 random bits per element: int64, unique within a layer, equal on all devices."""
    starts, sizes = _starts(layout, device, seed, rank)
    numbers = torch.repeat_interleave(starts, sizes, output_size=layout.num_elements)
    numbers.add_(torch.arange(layout.num_elements, device=device)).add_(step * GOLDEN % (1 << 63))
    return _mix(numbers)


@lru_cache(maxsize=256)
def _starts(layout: LayerLayout, device: torch.device, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the number of each layer, to which an element's position in the bucket is added, and its size."""
    starts = torch.tensor([_digest(seed, rank, name) for name in layout.names], dtype=torch.int64)
    starts -= torch.tensor(layout.boundaries[:-1], dtype=torch.int64)
    sizes = torch.tensor(layout.sizes, dtype=torch.int64)
    return starts.to(device, non_blocking=True), sizes.to(device, non_blocking=True)


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
