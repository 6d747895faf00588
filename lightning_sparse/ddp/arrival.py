"""The way of DDP's buckets to the state: through what they need in first steps, and later directly."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.ddp.regrouping import BucketLike, Numbering, Receiver, Regrouping


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
