"""The same weights on all workers, for validation, for files and after training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.drift.untrained_tensors import fingerprints, named_tensors
from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.exchange import Workers


class SharedWeights:
    """Gives a module the mean of the workers' weights, or the anchor's, and its own back.

    Attributes:
        own: by name, this worker's own weights and buffers while the module has shared ones; else empty.
    """

    def __init__(self, module: nn.Module, exchange: DriftExchange, workers: Workers) -> None:
        self._module, self._exchange, self._workers = module, exchange, workers
        self.own: dict[str, Tensor] = {}
        self._marks_of_shared: list[tuple[int, int]] = []

    @property
    def is_shown(self) -> bool:
        """Whether the module has other weights than this worker's own."""
        return bool(self.own)

    @property
    def was_written_to(self) -> bool:
        """Whether the shared weights have been changed."""
        return self.is_shown and self._marks_of_shared != self._marks()

    @torch.no_grad()
    def take_mean(self) -> None:
        """Give the module the mean of all workers' weights and buffers, unless it has shared ones. Collective."""
        if not self.is_shown:
            self._keep_apart(self.mean(self._workers))

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Give the module the anchor's weights, unless it has shared ones. Not collective."""
        if not self.is_shown:
            self._keep_apart(self.anchor())

    def _keep_apart(self, shared: dict[str, Tensor]) -> None:
        """Exchange the module's tensors with shared ones, one by one: that needs no memory for both."""
        held = self._held()
        for name in list(shared):
            tensor = shared.pop(name)
            if name in held and held[name].shape == tensor.shape:
                self.own[name] = held[name].clone()
                held[name].copy_(tensor)
        self._marks_of_shared = self._marks()

    @torch.no_grad()
    def give_back(self) -> None:
        """Give the module its own weights and buffers back."""
        held = self._held()
        for name, own in self.own.items():
            if name in held and held[name].shape == own.shape:
                held[name].copy_(own)
        self.own = {}

    def set_apart(self, saved: Mapping[str, Tensor]) -> None:
        """Keep saved weights apart as the module's own, as far as they fit; its current weights become shared."""
        held = self._held()
        self.own = {
            name: tensor.to(held[name].device)
            for name, tensor in saved.items()
            if name in held and held[name].shape == tensor.shape
        }
        self._marks_of_shared = self._marks()

    # Copies, and a module that shows them without being written to.

    @torch.no_grad()
    def mean(self, workers: Workers) -> dict[str, Tensor]:
        """Return the mean of all workers' weights and of other tensors that differ, by name. Collective."""
        # Parameters unfrozen since the last exchange are untrained until the next: looking changes nothing.
        self._exchange.land()
        untrained = self._exchange.untrained
        untrained.take_in_new()
        told = untrained.floating(only_buffers=False)
        mine = fingerprints([*told.values()])
        prints = mine.new_zeros(workers.num_workers, mine.numel())
        if told:
            workers.all_gather(prints.view(-1), mine).wait()
        averaged = self.weights() | untrained.differing(told, prints.cpu())
        tensors = {name: tensor.clone() for name, tensor in averaged.items()}
        workers.average(list(tensors.values()))
        return tensors

    @torch.no_grad()
    def anchor(self) -> dict[str, Tensor]:
        """Return copies of the anchor by parameter name, each like the parameter.

        A parameter that has another size since the last exchange has no anchor: its copy is its own value.
        """
        anchors = self._exchange.anchors()
        copies = {name: weight.clone() for name, weight in self.weights().items()}
        for name, copy in copies.items():
            if anchors[name].shape == as_real(copy).shape:
                as_real(copy).copy_(anchors[name])
        return copies

    @contextmanager
    def shown(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the module these tensors inside the context, without writing to its own.

        A signal may ask for a checkpoint in the middle of a backward, which fails if weights were written to.
        """
        held = named_tensors(self._module)
        shards = {name: local(held[name]).clone() for name in tensors if isinstance(held[name], DTensor)}
        own = {name: held[name].data for name in tensors.keys() - shards.keys()}
        try:
            for name, tensor in tensors.items():
                if name in shards:
                    local(held[name]).copy_(tensor)  # a backward needs the gathered parameters, not the shards
                else:
                    held[name].data = tensor
            yield
        finally:
            for name, shard in shards.items():
                local(held[name]).copy_(shard)
            for name, data in own.items():
                held[name].data = data

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters that have an anchor, by name, detached."""
        named = self._module.named_parameters()
        return {name: local(parameter) for name, parameter in named if name in self._exchange.anchored}

    def _held(self) -> dict[str, Tensor]:
        return {name: local(tensor) for name, tensor in named_tensors(self._module).items()}

    def _marks(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self.weights().values()]
