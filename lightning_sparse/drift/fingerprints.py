"""Hashes of tensors, by which workers compare them without sending them."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sparse.engine.grouping import as_real
from lightning_sparse.exchange.buffers import copy_to_device, numbers_on_device

WORD_BYTES = 8
SMALL_BYTES = 2**16
"""The largest size of tensors that are hashed together, such as a hundred statistics of batch norm."""
WORDS_PER_PASS = 2**22
"""The number of words of larger tensors that are hashed at a time, which needs an equal amount of work space."""
_SPREAD, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return hash and number of elements of each tensor: float64, shape (2 · len(tensors),).

    The result is on the first tensor's device. SplitMix64 (Steele et al., 2014), with signed shifts, mixes each word of
    8 bytes with its position in the order of indices. The hash is the upper 53 bits of the sum, modulo 2⁶⁴. So it also
    detects permutations and changed signs. Sizes are cached on the device, so only new ones are copied.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    device = tensors[0].device
    octets = [as_real(tensor).flatten().contiguous().view(torch.uint8) for tensor in tensors]
    small = [index for index, flat in enumerate(octets) if flat.numel() <= SMALL_BYTES and flat.device == device]
    together = dict(zip(small, _hash_together([octets[index] for index in small]), strict=True))
    hashes = [together[index] if index in together else _hash(flat).to(device) for index, flat in enumerate(octets)]
    sizes = numbers_on_device(tuple(tensor.numel() for tensor in tensors), device)
    return torch.stack([(torch.stack(hashes) >> 11).double(), sizes], 1).flatten()


def _hash_together(octets: Sequence[Tensor]) -> Sequence[Tensor]:
    if not octets:
        return []
    device = octets[0].device
    counts = tuple(-(-flat.numel() // WORD_BYTES) for flat in octets)
    padding = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=device)
    pieces = [piece for flat in octets for piece in (flat, padding[: -flat.numel() % WORD_BYTES])]
    places, owners = _places(counts, device)
    mixed = _mixed(torch.cat(pieces).view(torch.int64), places.clone())
    return torch.zeros(len(octets), dtype=torch.int64, device=device).index_add_(0, owners, mixed).unbind()


def _hash(octets: Tensor) -> Tensor:
    if octets.numel() % WORD_BYTES or octets.storage_offset() % WORD_BYTES:
        octets = pad(octets, (0, -octets.numel() % WORD_BYTES))
    words = octets.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for start in range(0, words.numel(), WORDS_PER_PASS):
        block = words[start : start + WORDS_PER_PASS]
        total += _mixed(block, torch.arange(start + 1, start + 1 + block.numel(), device=block.device)).sum()
    return total


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """Return the mix of words and their positions, in the memory of ``places``."""
    mixed = places.mul_(_SPREAD).add_(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31)


@lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return every word's position in its tensor, from 1 on, and the tensor's index."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    places = torch.cat([torch.arange(1, count + 1) for count in counts])
    return copy_to_device(places, device), copy_to_device(owners, device)
