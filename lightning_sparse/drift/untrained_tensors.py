"""Compares and averages buffers, and frozen parameters that code updates."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.exchange.agreement import gather_objects, ignored_names
from lightning_sparse.exchange.buffers import copy_to_device, numbers_on_device
from lightning_sparse.exchange.workers import Workers

WORD_BYTES = 8
SMALL_BYTES = 2**16
"""The largest size of tensors that are hashed together, such as a hundred statistics of batch norm."""
WORDS_PER_PASS = 2**22
"""The number of words of larger tensors that are hashed at a time, which needs an equal amount of work space."""
_SPREAD, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class UntrainedTensors:
    """Buffers and frozen parameters, which are averaged only if they differ between workers.

    So constants keep their bits, and workers share statistics (batch norm) or a target network (a moving average of
    weights) that each worker computes from its own weights. Only tensors with equal sizes on all workers are averaged.
    Integer and boolean tensors stay local to each worker.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._prints_at_set_up: dict[str, list[float]] = {}
        self._floating: dict[str, bool] = {}  # whether a name is a buffer's
        self.register_new(is_set_up=True)

    def register_new(self, *, is_set_up: bool = False) -> None:
        """Register new buffers, and frozen parameters if there are new buffers."""
        known, buffers = self._prints_at_set_up, dict(self._module.named_buffers())
        ignored = ignored_names(self._module)
        if not (is_set_up or buffers.keys() - known.keys() - ignored):  # a walk over all parameters takes long
            return
        frozen = {name: weight for name, weight in self._module.named_parameters() if not weight.requires_grad}
        for name, tensor in {**frozen, **buffers}.items():
            if name not in ignored and name not in known:
                # A new tensor counts as changed since set-up, so that checkpoints contain it for every worker.
                known[name] = fingerprints([local(tensor)]).tolist() if is_set_up else []
                if tensor.is_floating_point() or tensor.is_complex():
                    self._floating[name] = name in buffers

    def floating(self, *, only_buffers: bool) -> dict[str, Tensor]:
        """Return floating-point buffers by name, and frozen parameters unless ``only_buffers``."""
        return self._tensors([name for name, is_buffer in self._floating.items() if is_buffer or not only_buffers])

    def changed(self, workers: Workers | None = None) -> dict[str, Tensor]:
        """Return by name the tensors of any dtype that have changed since set-up.

        With ``workers``, the result includes tensors that have changed on any worker, and the call is collective.
        """
        then = self._prints_at_set_up
        now = self._tensors(then)
        own = [name for name, tensor in now.items() if fingerprints([tensor]).tolist() != then[name]]
        names = own if workers is None else set().union(*gather_objects(own, workers.group))
        return {name: tensor for name, tensor in now.items() if name in names}

    def _tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors by name, with empty tensors for removed ones."""
        found = dict(self._module.named_buffers()) if names else {}
        if not found.keys() >= set(names):  # a walk over all parameters takes long
            found = named_tensors(self._module)
        return {name: local(found[name]) if name in found else torch.zeros(0) for name in names}


def tensors_that_differ(compared: Mapping[str, Tensor], prints: Tensor) -> dict[str, Tensor]:
    """Return tensors that differ between workers and have equal sizes; their names are equal on all workers.

    Takes tensors by name and all workers' ``fingerprints`` of them, shape (n, numbers), on the CPU.
    """
    rows = prints.view(len(prints), -1, 2)
    is_same = (rows == rows[:1]).all(0).tolist()
    return {
        name: tensor
        for (name, tensor), (is_same_hash, is_same_size) in zip(compared.items(), is_same, strict=True)
        if is_same_size and not is_same_hash
    }


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return hash and size of each tensor: float64, shape (2 · len(tensors),).

    The result is on the first tensor's device. SplitMix64 (Steele et al., 2014), with signed shifts, mixes each word of
    8 bytes with its position in the order of indices. The hash is the upper 53 bits of the sum, modulo 2⁶⁴. So it also
    detects permutations and changed signs. Repeated sizes need no wait for a GPU.
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
