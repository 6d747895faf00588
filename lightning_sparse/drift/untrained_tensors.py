"""Compares and averages buffers, and frozen parameters that code updates."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from lightning_sparse.drift.fingerprints import fingerprints
from lightning_sparse.engine.grouping import local
from lightning_sparse.exchange.agreement import gather_objects, ignored_names
from lightning_sparse.exchange.workers import Workers


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class UntrainedTensors:
    """Buffers and frozen parameters, which are averaged only if they differ between workers.

    So constants keep their bits, and workers share statistics (batch norm) or a target network (a moving average of
    weights) that each worker computes from its own weights. Only tensors with equal sizes on all workers are averaged.
    Integers and booleans become those of rank 0.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._prints_at_set_up: dict[str, list[float]] = {}
        self._is_buffer: dict[str, bool] = {}  # by name; else a frozen parameter
        self.register_new(is_set_up=True)

    def register_new(self, *, is_set_up: bool = False) -> None:
        """Register new buffers; only if there are any, also new frozen parameters."""
        known, buffers = self._prints_at_set_up, dict(self._module.named_buffers())
        ignored = ignored_names(self._module)
        if not (is_set_up or buffers.keys() - known.keys() - ignored):  # a walk over all parameters takes long
            return
        frozen = {name: weight for name, weight in self._module.named_parameters() if not weight.requires_grad}
        for name, tensor in {**frozen, **buffers}.items():
            if name not in ignored and name not in known:
                # A new tensor counts as changed since set-up, so that checkpoints contain it for every worker.
                known[name] = fingerprints([local(tensor)]).tolist() if is_set_up else []
                self._is_buffer[name] = name in buffers

    def compared(self, *, only_buffers: bool) -> dict[str, Tensor]:
        """Return buffers by name, and frozen parameters unless ``only_buffers``."""
        return self._tensors([name for name, is_buffer in self._is_buffer.items() if is_buffer or not only_buffers])

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
