"""Whether workers have the same tensors, told by two numbers each: a hash of the bits, and the size."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sparse.engine.grouping import as_real
from lightning_sparse.exchange.buffers import without_wait

WORD_BYTES = 8
SMALL_BYTES = 2**16
"""Tensors of up to so many bytes are hashed together: of the statistics of batch norm there are a hundred."""
BLOCK_ELEMENTS = 2**22
"""So many words of a larger one are hashed at a time, for which as many again are needed meanwhile."""
_SPREAD, _FIRST, _SECOND = (one - 2**64 for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Returns hash and size of each: float64, shape (2 · len(tensors),), on the first one's device.

    The hash is the sum, modulo 2⁶⁴, of what SplitMix64 (Steele et al., 2014) makes of each word of 8 bytes and its
    place, in the order of indices, so that a permutation or another sign is seen too. 53 bits of it, as a float64 holds
    them. On a GPU nothing is waited for, once the same sizes have been asked for before.

    Args:
        tensors: of any dtype; at least one.
    """
    device = tensors[0].device
    octets = [as_real(one).flatten().contiguous().view(torch.uint8) for one in tensors]
    small = [place for place, one in enumerate(octets) if one.numel() <= SMALL_BYTES and one.device == device]
    together = dict(zip(small, _hash_together([octets[place] for place in small]), strict=True))
    hashes = [together[place] if place in together else _hash(one).to(device) for place, one in enumerate(octets)]
    sizes = _sizes(tuple(one.numel() for one in tensors), device)
    return torch.stack([(torch.stack(hashes) >> 11).double(), sizes], 1).flatten()


def _hash_together(octets: Sequence[Tensor]) -> Sequence[Tensor]:
    if not octets:
        return []
    device = octets[0].device
    counts = tuple(-(-one.numel() // WORD_BYTES) for one in octets)
    nothing = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=device)
    pieces = [piece for one in octets for piece in (one, nothing[: -one.numel() % WORD_BYTES])]
    places, owners = _places(counts, device)
    mixed = _mixed(torch.cat(pieces).view(torch.int64), places.clone())
    return torch.zeros(len(octets), dtype=torch.int64, device=device).index_add_(0, owners, mixed).unbind()


def _hash(octets: Tensor) -> Tensor:
    if octets.numel() % WORD_BYTES or octets.storage_offset() % WORD_BYTES:
        octets = pad(octets, (0, -octets.numel() % WORD_BYTES))
    words = octets.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for start in range(0, words.numel(), BLOCK_ELEMENTS):
        block = words[start : start + BLOCK_ELEMENTS]
        total += _mixed(block, torch.arange(start + 1, start + 1 + block.numel(), device=block.device)).sum()
    return total


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """Returns SplitMix64 of words and their places, in the memory of the latter."""
    mixed = places.mul_(_SPREAD).add_(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31)


@lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns for every word its place in its own tensor, from 1 on, and which tensor that is."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    places = torch.cat([torch.arange(1, count + 1) for count in counts])
    return without_wait(places, device), without_wait(owners, device)


@lru_cache(maxsize=64)
def _sizes(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return without_wait(torch.tensor(sizes, dtype=torch.float64), device)
