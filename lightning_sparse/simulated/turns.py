"""What is a simulated worker's own while it has its turn: gradients, random numbers, attributes, buffers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule
from torch import Tensor


class Turns:
    """Puts what belongs to each worker in its place, and the first worker's back.

    Args:
        module: that all share.
        num_workers: n.
        own_attributes: of the module, that every worker has for itself.
        device: of the module.

    Attributes:
        gradients: of each worker by parameter name, of its batches since the last step; the first's are the module's.
        begins_anew: whether the running batch is the first since a step.
    """

    def __init__(
        self, module: LightningModule, num_workers: int, own_attributes: Sequence[str], device: torch.device
    ) -> None:
        self.gradients: list[dict[str, Tensor]] = [{} for _ in range(num_workers)]
        self.begins_anew = True
        self._module, self._num_workers, self._own_attributes = module, num_workers, tuple(own_attributes)
        self._device = device
        self._has_cuda = device.type == "cuda"
        self._random_states: list[Any] = []
        self._attributes: dict[int, dict[str, Any]] = {}
        self._firsts: dict[str, Any] = {}
        self._buffers: dict[int, dict[str, Tensor]] = {}

    def begin_batch(self, *, begins_anew: bool) -> None:
        """Begins the turns of a batch."""
        self.begins_anew = begins_anew
        if begins_anew:
            self.forget_gradients()  # what was not stepped on Lightning drops as well

    def forget_gradients(self) -> None:
        """Drops all gradients but the module's own."""
        self.gradients = [{} for _ in range(self._num_workers)]

    def end_batch(self) -> None:
        """Ends them: the first worker has had its turn as the last."""
        self._firsts = {name: getattr(self._module, name) for name in self._own_attributes}

    @contextmanager
    def own_gradients(self, rank: int) -> Iterator[None]:
        """Within it gradients are this worker's, of the batches since the last step."""
        parameters = named_parameters(self._module)
        firsts = {name: one.grad for name, one in parameters.items()}
        for name, one in parameters.items():
            one.grad = self.gradients[rank].get(name)
        try:
            yield
        finally:
            self.gradients[rank] = {name: one.grad for name, one in parameters.items() if one.grad is not None}
            for name, one in parameters.items():
                one.grad = firsts[name]

    @contextmanager
    def own_state(self, rank: int) -> Iterator[None]:
        """Within it the module's own attributes are this worker's; after it they and buffers are the first's again."""
        buffers = {name: one.clone() for name, one in self._module.named_buffers()}
        if not self.begins_anew:  # DDP hands out the first worker's when gradients were exchanged
            _copy_buffers(self._buffers.get(rank, {}), self._module)
        firsts = {name: getattr(self._module, name) for name in self._own_attributes}
        for name, value in self._attributes[rank].items() if self._own_attributes else ():
            setattr(self._module, name, value)
        try:
            yield
        finally:
            self._attributes[rank] = {name: getattr(self._module, name) for name in self._own_attributes}
            for name, value in firsts.items():
                setattr(self._module, name, value)
            self._buffers[rank] = {name: one.clone() for name, one in self._module.named_buffers()}
            _copy_buffers(buffers, self._module)

    @contextmanager
    def random_numbers_of(self, rank: int) -> Iterator[None]:
        """Within it random numbers are this worker's; all begin with those of the first, which are everybody's."""
        firsts = _collect_rng_states(self._has_cuda)
        if not self._random_states:
            self._random_states = [firsts] * self._num_workers
        if rank == 0:
            yield
            return
        _set_rng_states(self._random_states[rank])
        try:
            yield
        finally:
            self._random_states[rank] = _collect_rng_states(self._has_cuda)
            _set_rng_states(firsts)

    def share_what_hooks_set(self) -> None:
        """Gives every worker a copy of an own attribute that is another object than the first one's turn has left."""
        changed = {
            name: value
            for name in self._own_attributes
            if (value := getattr(self._module, name)) is not self._firsts.get(name, self)
        }
        for rank in range(1, self._num_workers):
            self._attributes.setdefault(rank, {}).update(copy.deepcopy(changed))


def named_parameters(module: LightningModule) -> dict[str, Tensor]:
    """Returns the parameters by name, without what torch.compile adds to names."""
    return {name.replace("_orig_mod.", ""): one for name, one in module.named_parameters()}


def _copy_buffers(source: Mapping[str, Tensor], module: LightningModule) -> None:
    for name, one in module.named_buffers():
        if name in source:
            one.copy_(source[name])
