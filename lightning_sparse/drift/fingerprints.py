"""Whether workers have the same tensors, told by two numbers each: a hash of the bits, and the size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import as_real

BLOCK_ELEMENTS = 2**22
"""So many words of 8 bytes are hashed at a time, for which as many again are needed meanwhile."""
_SPREAD, _FIRST, _SECOND = (one - 2**64 for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Returns hash and size of each: float64, shape (2 · len(tensors),), on the first one's device.

    The hash is the sum, modulo 2⁶⁴, of what SplitMix64 (Steele et al., 2014) makes of each word of 8 bytes and its
    place, in the order of indices, so that a permutation or another sign is seen too. 53 bits of it, as a float64 holds
    them.

    Args:
        tensors: of any dtype; at least one.
    """
    hashes = [_hash(one).to(tensors[0].device) for one in tensors]
    sizes = torch.tensor([float(one.numel()) for one in tensors], dtype=torch.float64, device=tensors[0].device)
    return torch.stack([(torch.stack(hashes) >> 11).double(), sizes], 1).flatten()


def _hash(tensor: Tensor) -> Tensor:
    octets = as_real(tensor).flatten().contiguous().view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    place = 1
    for words in (octets[:whole].view(torch.int64), octets[whole:].long()):
        for start in range(0, words.numel(), BLOCK_ELEMENTS):
            block = words[start : start + BLOCK_ELEMENTS]
            mixed = torch.arange(place, place + block.numel(), device=tensor.device).mul_(_SPREAD).add_(block)
            for shift, factor in ((30, _FIRST), (27, _SECOND)):
                mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
            total += mixed.bitwise_xor_(mixed >> 31).sum()
            place += block.numel()
    return total
