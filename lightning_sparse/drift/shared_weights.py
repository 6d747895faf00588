"""The same weights on all workers wherever somebody looks: in validation, in files, at the end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.exchange import Workers


class SharedWeights:
    """Gives a module the mean of the workers' weights, or the anchor's, and its own back.

    Args:
        module: this worker's.
        exchange: of its drifts.
        workers: all of them.

    Attributes:
        own: by name, this worker's own weights and buffers, kept apart while the module has others; else empty.
    """

    def __init__(self, module: nn.Module, exchange: DriftExchange, workers: Workers) -> None:
        self._module, self._exchange, self._workers = module, exchange, workers
        self.own: dict[str, Tensor] = {}
        self._marks_of_all: list[tuple[int, int]] = []

    @property
    def is_shown(self) -> bool:
        """Whether the module has other weights than this worker's own."""
        return bool(self.own)

    @property
    def was_written_to(self) -> bool:
        """Whether somebody has changed the weights that all share."""
        return self.is_shown and self._marks_of_all != self._marks()

    @torch.no_grad()
    def take_mean(self) -> None:
        """Gives the module the mean of all workers' weights and buffers, and keeps its own apart. Collective.

        Does nothing where the module has other weights than its own already.
        """
        if self.is_shown:
            return
        tensors = self._averaged(self._workers)
        self.own = {name: one.clone() for name, one in tensors.items()}
        try:
            self._workers.average(list(tensors.values()))
        except BaseException:  # a worker died, or Ctrl-C: no mean, and none in part
            self.give_back()
            raise
        self._marks_of_all = self._marks()

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Gives the module the anchor's weights, and keeps its own apart. Not collective.

        Does nothing where the module has other weights than its own already.
        """
        if not self.is_shown:
            self.own = {name: one.clone() for name, one in self.weights().items()}
            for bucket in self._exchange.buckets:
                bucket.write(bucket.anchor)
            self._marks_of_all = self._marks()

    @torch.no_grad()
    def give_back(self) -> None:
        """Gives the module its own weights and buffers back, where it has not."""
        held = self._held()
        for name, own in self.own.items():
            if name in held and held[name].shape == own.shape:
                held[name].copy_(own)
        self.forget_own()

    def forget_own(self) -> None:
        """Leaves the module what it has, for good."""
        self.own = {}

    def set_apart(self, saved: Mapping[str, Tensor]) -> None:
        """Leaves the module what it has, and keeps saved weights apart as its own, as far as it still has such."""
        held = self._held()
        self.own = {
            name: one.to(held[name].device)
            for name, one in saved.items()
            if name in held and held[name].shape == one.shape
        }
        self._marks_of_all = self._marks()

    # Copies, and a module that has them without having been written to.

    @torch.no_grad()
    def mean(self, workers: Workers) -> dict[str, Tensor]:
        """Returns the mean of all workers' weights and of what else differs, by name. Collective.

        Args:
            workers: the same, perhaps in another group.
        """
        tensors = {name: one.clone() for name, one in self._averaged(workers).items()}
        workers.average(list(tensors.values()))
        return tensors

    @torch.no_grad()
    def anchor(self) -> dict[str, Tensor]:
        """Returns copies of the anchor by parameter name, each like the parameter.

        A parameter that has another size since the last exchange has no anchor: its copy is its own value.
        """
        anchor = self._exchange.views(lambda bucket: bucket.anchor)
        copies = {name: one.clone() for name, one in self.weights().items()}
        for name, one in copies.items():
            if anchor[name].numel() == as_real(one).numel():
                as_real(one).copy_(anchor[name].view(as_real(one).shape))
        return copies

    @contextmanager
    def shown(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the module has these tensors, after it its own again, which nothing has written to.

        A signal may ask for a checkpoint in the middle of a backward, which fails where weights were written to.

        Args:
            tensors: by name, as large as the module's own.
        """
        held = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        shards = {name: local(held[name]).clone() for name in tensors if isinstance(held[name], DTensor)}
        own = {name: held[name].data for name in tensors.keys() - shards.keys()}
        try:
            for name, one in tensors.items():
                if name in shards:
                    local(held[name]).copy_(one)  # a backward needs what was gathered of them
                else:
                    held[name].data = one
            yield
        finally:
            for name, one in shards.items():
                local(held[name]).copy_(one)
            for name, one in own.items():
                held[name].data = one

    def weights(self) -> dict[str, Tensor]:
        """Returns the parameters that have an anchor, by name, detached."""
        named = self._module.named_parameters()
        return {name: local(one) for name, one in named if name in self._exchange.anchored}

    def _averaged(self, workers: Workers) -> dict[str, Tensor]:
        """The module's tensors that are averaged where all are to have the same. Collective."""
        # What has been unfrozen since the last exchange is untrained until the next: looking changes nothing.
        self._exchange.land()
        untrained = self._exchange.untrained
        untrained.take_in_new()
        mine = untrained.prints(only_buffers=False)
        prints = mine.new_zeros(workers.num_workers, mine.numel())
        if mine.numel():
            workers.all_gather(prints.view(-1), mine).wait()
        return self.weights() | untrained.differing(prints.cpu(), only_buffers=False)

    def _held(self) -> dict[str, Tensor]:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name: local(one) for name, one in named}

    def _marks(self) -> list[tuple[int, int]]:
        return [(one.data_ptr(), one._version) for one in self.weights().values()]
