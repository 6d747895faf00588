"""DDP's buckets as they come in: with their place, after a resume regrouped, and what lies where in them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.ddp.regrouping import BucketLike, Numbering, Receiver, Regrouping
from lightning_sparse.engine.memory_format import real_numel, require_strides
from lightning_sparse.sparsifiers import LayerLayout


class Arrival:
    """Hands DDP's buckets on with their place in the step, and after a resume in the saved layout.

    Args:
        parameter_names: the name of every parameter that DDP may bring.
        num_numbered: how many parameters DDP reduces with a static graph, which it first brings without a place; None
            for any other.
    """

    def __init__(self, parameter_names: Mapping[Tensor, str], num_numbered: int | None) -> None:
        self._names = parameter_names
        self._numbering = None if num_numbered is None else Numbering(num_numbered)
        self._regrouping: Regrouping | None = None

    def continue_with(self, layout: Sequence[Sequence[str]]) -> None:
        """Lays out the buckets of the next steps as those of another run.

        Args:
            layout: parameter names, bucket by bucket; empty if that run had no step.
        """
        if layout:
            most_steps = 1 if self._numbering is None else 2  # a static graph has one step more
            self._regrouping = Regrouping(layout, self._names, most_steps)

    def begin_anew(self) -> None:
        """Forgets another run's layout."""
        self._regrouping = None

    def receive(self, bucket: BucketLike, receiver: Receiver) -> torch.futures.Future[Tensor]:
        """Takes one of DDP's buckets and returns the future of its average. Collective, as the receiver is."""
        if self._numbering is not None and not self._numbering.is_over:
            bucket = self._numbering.numbered(bucket)
        if self._regrouping is None or self._regrouping.is_over:
            return receiver(bucket)
        return self._regrouping.receive(bucket, receiver)


class BucketLayouts:
    """The layouts of all buckets that DDP has brought.

    Args:
        parameter_names: the name of every parameter that DDP may bring.
    """

    def __init__(self, parameter_names: Mapping[Tensor, str]) -> None:
        self._names = dict(parameter_names)
        self._strides = {name: one.stride() for one, name in self._names.items() if one.requires_grad}
        self._known: dict[tuple[int, ...], LayerLayout] = {}

    def of(self, bucket: BucketLike) -> tuple[LayerLayout, bool]:
        """Returns the layout of a bucket, and whether it is a new one.

        Raises:
            RuntimeError: a parameter's memory format is not what it was when DDP made its buckets.
        """
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        is_new = key not in self._known
        if is_new:
            names = tuple(self._names[parameter] for parameter in parameters)
            self._known[key] = LayerLayout(names, tuple(map(real_numel, parameters)))
        layout = self._known[key]
        require_strides(layout.names, parameters, self._strides)
        num_elements = bucket.buffer().numel()
        assert num_elements == layout.num_elements, f"{num_elements=} of {layout}"
        return layout, is_new
