"""Sets equal weights on all workers for validation, checkpoints and after training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.drift.fingerprints import fingerprints
from lightning_sparse.drift.untrained_tensors import named_tensors, tensors_that_differ
from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.exchange.agreement import gather_objects
from lightning_sparse.exchange.workers import Workers


class SharedWeights:
    """Replaces a module's weights by their mean or the anchor, and restores them.

    Attributes:
        own: this worker's own weights and buffers by name while the module has shared ones; else empty.
    """

    def __init__(self, module: nn.Module, exchange: DriftExchange, workers: Workers) -> None:
        self._module, self._exchange, self._workers = module, exchange, workers
        self.own: dict[str, Tensor] = {}
        self._hashes_of_shared = torch.zeros(0)

    @property
    def is_loaded(self) -> bool:
        """Whether the module has shared weights instead of this worker's own."""
        return bool(self.own)

    @property
    def was_written_to(self) -> bool:
        """Whether the shared weights were changed. A write of equal values, as by DDP's broadcast, is no change."""
        return self.is_loaded and not torch.equal(self._hashes(), self._hashes_of_shared)

    def load_mean(self) -> None:
        """Set the module to all workers' mean unless it has shared weights. Collective."""
        if not self.is_loaded:
            self.load(self.mean(self._workers))

    @torch.no_grad()
    def load(self, shared: dict[str, Tensor]) -> None:
        """Set the module to shared tensors; keep its own in ``own``.

        Removes tensors from ``shared`` one by one to save memory.
        """
        tensors = self._tensors()
        for name in list(shared):
            tensor = shared.pop(name)
            if name in tensors and tensors[name].shape == tensor.shape:
                self.own[name] = tensors[name].clone()
                tensors[name].copy_(tensor)
        self._hashes_of_shared = self._hashes()

    @torch.no_grad()
    def restore_own(self) -> None:
        """Restore the module's own weights and buffers, with a warning if shared weights were changed."""
        if self.was_written_to:
            rank_zero_warn(
                "lightning_sparse: weights were changed while the model had the mean of all workers' weights, in "
                "validation or before the first batch of a resumed run. The change is lost, because each worker gets "
                "its own weights back. Change weights on all workers in on_train_batch_start instead."
            )
        tensors = self._tensors() if self.own else {}  # strategies call this in every step
        for name, own in self.own.items():
            if name in tensors and tensors[name].shape == own.shape:
                tensors[name].copy_(own)
        self.own = {}

    def store_own(self, saved: Mapping[str, Tensor]) -> None:
        """Store saved weights that fit as the module's own; current weights become shared."""
        tensors = self._tensors()
        self.own = {
            name: tensor.to(tensors[name].device)
            for name, tensor in saved.items()
            if name in tensors and tensors[name].shape == tensor.shape
        }
        self._hashes_of_shared = self._hashes()

    # Copies of weights, and a context in which the module refers to them.

    @torch.no_grad()
    def mean(self, workers: Workers) -> dict[str, Tensor]:
        """Return the mean weights, and shared values of other tensors that differ, by name. Collective."""
        untrained = self._exchange.untrained
        untrained.register_new()
        compared = untrained.compared(only_buffers=False)
        prints = fingerprints([*compared.values()]).view(-1, 2).tolist()
        of_workers = gather_objects(dict(zip(compared, prints, strict=True)), workers.group)
        # A new buffer may be on one worker only.
        compared = {name: tensor for name, tensor in compared.items() if all(name in found for found in of_workers)}
        rows = torch.tensor([[found[name] for name in compared] for found in of_workers], dtype=torch.float64)
        averaged = self.weights() | tensors_that_differ(compared, rows)
        tensors = {name: tensor.clone() for name, tensor in averaged.items()}
        workers.average(list(tensors.values()))
        return tensors

    @torch.no_grad()
    def anchor(self) -> dict[str, Tensor]:
        """Return copies of the anchor by name, with the parameters' dtypes and shapes.

        A parameter whose size has changed since the last exchange has no anchor, so its own value is copied.
        """
        anchors = self._exchange.anchors()
        copies = {name: weight.clone() for name, weight in self.weights().items()}
        for name, copy in copies.items():
            if anchors[name].shape == as_real(copy).shape:
                as_real(copy).copy_(anchors[name])
        return copies

    @contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Set the module's tensors inside the context, even during a backward.

        A signal may request a checkpoint then. A backward fails if weights were written to, so only shards, which it
        does not need, are.
        """
        named = named_tensors(self._module)
        shards = {name: local(named[name]).clone() for name in tensors if isinstance(named[name], DTensor)}
        own = {name: named[name].data for name in tensors.keys() - shards.keys()}
        try:
            for name, tensor in tensors.items():
                if name in shards:
                    local(named[name]).copy_(tensor)  # a backward needs the gathered parameters, not the shards
                else:
                    named[name].data = tensor
            yield
        finally:
            for name, shard in shards.items():
                local(named[name]).copy_(shard)
            for name, data in own.items():
                named[name].data = data

    def weights(self) -> dict[str, Tensor]:
        """Return the anchored parameters by name, detached."""
        named = self._module.named_parameters()
        return {name: local(parameter) for name, parameter in named if name in self._exchange.anchored}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: local(tensor) for name, tensor in named_tensors(self._module).items()}

    def _hashes(self) -> Tensor:
        return fingerprints([*self.weights().values()]).cpu()  # after fit, Lightning moves the module to the CPU
