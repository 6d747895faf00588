"""A module's tensors beside its trained weights: buffers, and frozen parameters that code updates itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor, nn

from lightning_sparse.drift.fingerprints import fingerprints
from lightning_sparse.engine.grouping import local
from lightning_sparse.exchange import Workers


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def ignored_names(module: nn.Module) -> set[str]:
    """Return the parameters and buffers that DDP is told to ignore, such as a worker's own experts."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


@dataclass
class _Known:
    is_buffer: bool
    is_floating: bool
    at_first: Tensor
    """Its fingerprint at set-up."""


class UntrainedTensors:
    """Buffers, and parameters that require no gradient. Only tensors that differ between workers are averaged.

    So constants keep their bits, and workers share a statistic (batch norm) or a target network (a moving average of
    weights) that each has computed from its own weights. This concerns only tensors that have the same size everywhere.
    Tensors of integers or truth values at set-up stay each worker's own.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[str, _Known] = {}
        self._told: dict[bool, dict[str, Tensor]] = {}
        self._take_in(is_set_up=True)

    def take_in_new(self) -> None:
        """Take in new buffers and the frozen parameters that came with them; others become known when they train."""
        if any(name not in self._known for name, _ in self._module.named_buffers()):
            self._take_in(is_set_up=False)

    def _take_in(self, *, is_set_up: bool) -> None:
        ignored, buffers = ignored_names(self._module), dict(self._module.named_buffers())
        frozen = {name: held for name, held in self._module.named_parameters() if not held.requires_grad}
        for name, tensor in {**frozen, **buffers}.items():
            if name not in ignored and name not in self._known:
                # A new tensor counts as changed since set-up, so that files hold each worker's.
                at_first = fingerprints([local(tensor)]) if is_set_up else torch.full((2,), nan)
                is_floating = tensor.is_floating_point() or tensor.is_complex()
                self._known[name] = _Known(name in buffers, is_floating, at_first)

    def prints(self, *, only_buffers: bool) -> Tensor:
        """Return fingerprints that tell whether workers have the same tensors.

        Args:
            only_buffers: leaves frozen parameters out, which may be large.

        Returns:
            Two numbers per tensor: float64, on the tensors' device.
        """
        told = self._told[only_buffers] = self._floating(only_buffers)
        return fingerprints(list(told.values())) if told else torch.zeros(0, dtype=torch.float64)

    def differing(self, prints: Tensor, *, only_buffers: bool) -> dict[str, Tensor]:
        """Return by name the tensors that differ between workers and have one size; the same names on all workers.

        A tensor that has changed its size since ``prints``, or is gone, is replaced by its old value.

        Args:
            prints: all workers' ``prints``, shape (n, numbers), on the CPU.
            only_buffers: as for those.
        """
        if not prints.numel():
            return {}
        rows = prints.view(len(prints), -1, 2)
        is_same = (rows == rows[:1]).all(0)
        told, floating = self._told[only_buffers], self._floating(only_buffers)
        return {
            name: now if now.numel() == told[name].numel() and now.dtype == told[name].dtype else told[name]
            for (name, now), (has_one_hash, has_one_size) in zip(floating.items(), is_same.tolist(), strict=True)
            if has_one_size and not has_one_hash
        }

    def changed(self, workers: Workers | None = None) -> dict[str, Tensor]:
        """Return by name the tensors of any dtype that have changed since set-up.

        Args:
            workers: returns tensors that have changed on any of them; None on this worker alone. Collective if given.
        """
        now = self._tensors(self._known)
        flags = [not torch.equal(fingerprints([held]), self._known[name].at_first) for name, held in now.items()]
        if workers is not None and flags:
            counts = torch.tensor(flags, dtype=torch.int32, device=next(iter(now.values())).device)
            workers.all_reduce(counts).wait()
            flags = counts.bool().tolist()
        return {name: held for (name, held), flag in zip(now.items(), flags, strict=True) if flag}

    def _floating(self, only_buffers: bool) -> dict[str, Tensor]:
        known = self._known.items()
        return self._tensors([name for name, of in known if of.is_floating and (of.is_buffer or not only_buffers)])

    def _tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors by name, and an empty tensor for those that are gone."""
        held = named_tensors(self._module)
        return {name: local(held[name]) if name in held else torch.zeros(0) for name in names}
