"""State of each simulated worker: random numbers, gradients, attributes and buffers."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparse.strategies.simulated.limits import refuse


class RandomNumbers:
    """Random number generator states of each worker, which start from rank 0's.

    Args:
        num_workers: n.
        has_cuda: whether to include the generators of GPUs.
        keeps: whether a worker continues with the state at the end of its last turn. If not, as before training, every
            turn starts with the state at which rank 0's turn started, and only rank 0's state persists.
    """

    def __init__(self, num_workers: int, has_cuda: bool, *, keeps: bool) -> None:
        self._num_workers, self._has_cuda, self._keeps = num_workers, has_cuda, keeps
        self._states: list[dict[str, Any]] = []

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Draw random numbers as this worker inside the context."""
        common = _collect_rng_states(self._has_cuda)
        if not self._states or (rank == 0 and not self._keeps):
            self._states = [common] * self._num_workers
        if rank == 0:
            yield
            return
        _set_rng_states(self._states[rank])
        try:
            yield
        finally:
            if self._keeps:
                self._states[rank] = _collect_rng_states(self._has_cuda)
            _set_rng_states(common)


@dataclass
class _Own:
    """The state of a worker between its turns, by name; buffers by layer and name."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[dict[str, Tensor | None]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


class Turns:
    """Swaps each worker's gradients, buffers and own attributes into the module in turn."""

    def __init__(self, module: LightningModule, num_workers: int, own_attributes: Sequence[str]) -> None:
        self._module, self._own_attributes = module, own_attributes
        self._own = [_Own() for _ in range(num_workers)]
        self.begin_step()  # a resume may continue between accumulated batches

    def begin_step(self) -> None:
        """Drop unused gradients, as Lightning does, and take rank 0's buffers, as DDP does."""
        for own in self._own:
            own.gradients, own.buffers = {}, []
        # Once per step, because a walk through the model takes as long as several kernels.
        self._parameters = named_parameters(self._module)
        self._buffers = [layer._buffers for layer in self._module.modules()]

    def share_replaced_attributes(self) -> None:
        """Share own attributes that hooks have replaced since rank 0's turn."""
        left = self._own[0].attributes
        changed = {name: value for name, value in self._attributes().items() if value is not left.get(name, self)}
        for own in self._own[1:]:
            own.attributes.update(copy.deepcopy(changed))

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Use this worker's state inside the context. Rank 0 must be last.

        Raises:
            ValueError: the worker has changed a parameter, and all workers share parameters.
        """
        versions = {name: parameter._version for name, parameter in self._parameters.items()}
        if rank == 0:
            yield
            self._own[0].attributes = self._attributes()
        else:
            first = self._current()
            self._put(self._own[rank])
            try:
                yield
            finally:
                self._own[rank] = self._current()
                self._put(first)
        for name, parameter in self._parameters.items():
            if parameter._version != versions[name]:
                refuse(f"a training_step that changes a parameter ({name}): change it in on_train_batch_end")

    def take_gradients(self) -> list[dict[str, Tensor]]:
        """Return and clear each worker's gradients by parameter name, in rank order."""
        self._own[0].gradients = self._gradients()
        taken = [own.gradients for own in self._own]
        for own in self._own:
            own.gradients = {}
        return taken

    def _current(self) -> _Own:
        buffers = [
            {name: None if buffer is None else buffer.clone() for name, buffer in layer.items()}
            for layer in self._buffers
        ]
        return _Own(self._gradients(), buffers, self._attributes())

    def _put(self, own: _Own) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = own.gradients.get(name)
        buffers, values = [], []
        for layer, saved in zip(self._buffers, own.buffers, strict=False):  # none before a worker's first turn
            for name in layer.keys() - saved.keys():  # registered in another worker's turn
                del layer[name]
            for name, value in saved.items():
                buffer = layer.get(name)
                if buffer is None or value is None or buffer.dtype != value.dtype:
                    layer[name] = value
                    continue
                if buffer.shape != value.shape:  # it grows
                    buffer.data = value
                buffers.append(buffer)
                values.append(value)
        if buffers:
            torch._foreach_copy_(buffers, values)
        for name, value in own.attributes.items():
            setattr(self._module, name, value)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self._module, name) for name in self._own_attributes}


def named_parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return parameters by name, without the prefix of ``torch.compile``."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in module.named_parameters()}
