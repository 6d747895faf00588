"""First steps, in which DDP's buckets are not yet those that the exchange needs: numbered, and laid out anew.

**In the first iteration of a static graph** DDP gives all buckets the index 0 and, where they are several, calls none
of them the last: ``Numbering`` counts them.

**After a resume** DDP begins with one bucket of everything, as in every run, and lays its buckets out anew after the
first iteration. Which route a bucket takes, and where an all-reduce cuts it, would then differ from the run that went
on, and so would the last bits of sums over more than two workers. So ``Regrouping`` hands DDP's buckets of that
step on in the saved layout::

    DDP, first step    [ fc | conv2 | conv1 ]
                          │     │       │        copied layer by layer, and the averages back
    saved layout       [ fc | conv2 ] [ conv1 ]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_sparse.engine.memory_format import real_numel


class BucketLike(Protocol):
    """What the step asks of DDP's ``GradBucket``."""

    def index(self) -> int:
        """The bucket's place in the order of the step."""

    def buffer(self) -> Tensor:
        """The flat gradient, shape (m,)."""

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients it holds, in order."""

    def is_last(self) -> bool:
        """Whether no bucket comes after it."""


@dataclass(frozen=True)
class Bucket:
    """A bucket that DDP did not make; see ``BucketLike``."""

    place: int
    flat: Tensor
    layers: list[Tensor]
    last: bool

    def index(self) -> int:
        """See ``BucketLike``."""
        return self.place

    def buffer(self) -> Tensor:
        """See ``BucketLike``."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """See ``BucketLike``."""
        return self.layers

    def is_last(self) -> bool:
        """See ``BucketLike``."""
        return self.last


class Numbering:
    """Tells the place of each bucket in the first step of a static graph, and which is the last.

    Args:
        num_parameters: how many parameters DDP reduces.

    Attributes:
        is_over: whether a step is complete: from the next on DDP tells it.
    """

    def __init__(self, num_parameters: int) -> None:
        self.is_over = False
        self._num_parameters = num_parameters
        self._buckets: list[list[Tensor]] = []

    def numbered(self, bucket: BucketLike) -> Bucket:
        """Returns the bucket with its place; one whose parameters came before begins a new step."""
        parameters = list(bucket.parameters())
        if any(parameters[0] is one for known in self._buckets for one in known):
            self._buckets.clear()  # an exception broke off the backward before
        place = len(self._buckets)
        self._buckets.append(parameters)
        self.is_over = bucket.is_last() or sum(map(len, self._buckets)) == self._num_parameters
        return Bucket(place, bucket.buffer(), parameters, self.is_over)


Receiver = Callable[[BucketLike], torch.futures.Future[Tensor]]


class Regrouping:
    """Hands DDP's buckets on in another layout, for as long as DDP's own is not yet that one.

    Args:
        layout: parameter names, bucket by bucket, in their order.
        names: the name of every parameter that DDP may bring.
        most_steps: after so many DDP lays its buckets out as it will have them from then on, or has done so before.
            They may be others than the saved ones, as with another ``bucket_cap_mb``.

    Attributes:
        is_over: whether buckets need not come this way any more.
    """

    def __init__(self, layout: Sequence[Sequence[str]], names: Mapping[Tensor, str], most_steps: int = 1) -> None:
        self.is_over = False
        self._most_steps = most_steps
        self._steps = 0
        self._first_names: list[str] | None = None
        self._layout = [list(bucket) for bucket in layout]
        self._names = names
        self._waiting: list[tuple[Bucket, torch.futures.Future[Tensor]]] = []

    def receive(self, bucket: BucketLike, receiver: Receiver) -> torch.futures.Future[Tensor]:
        """Takes a bucket; with the last one hands all of them on. Collective, as the receiver is.

        Args:
            bucket: DDP's.
            receiver: takes a bucket of the saved layout and returns the future of its average.
        """
        if bucket.index() == 0:
            self._waiting.clear()
            names = self._names_of(bucket)
            has_changed = self._first_names not in (None, names)
            if names == self._layout[0] or has_changed or self._steps == self._most_steps:
                self.is_over = True
                return receiver(bucket)
            self._first_names = names
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if buffer.device.type == "cpu" else [buffer.device]
        )
        # DDP's own object need not outlive its hook.
        own = Bucket(bucket.index(), buffer, list(bucket.parameters()), bucket.is_last())
        self._waiting.append((own, future))
        if bucket.is_last():
            self._hand_on(receiver)
        return future

    def _hand_on(self, receiver: Receiver) -> None:
        waiting, self._waiting = self._waiting, []
        self._steps += 1
        layers: dict[str, tuple[Tensor, Tensor]] = {}
        for bucket, _ in waiting:
            parts = torch.split(bucket.flat, [real_numel(one) for one in bucket.layers])
            layers |= dict(zip(self._names_of(bucket), zip(bucket.layers, parts, strict=True), strict=True))
        if sorted(layers) == sorted(name for names in self._layout for name in names):
            regrouped = [
                Bucket(
                    place,
                    torch.cat([layers[name][1] for name in names]),
                    [layers[name][0] for name in names],
                    place == len(self._layout) - 1,
                )
                for place, names in enumerate(self._layout)
            ]
            for bucket in regrouped:
                receiver(bucket)
            # The last of them has ended the step: every bucket holds its average.
            for bucket, names in zip(regrouped, self._layout, strict=True):
                averages = torch.split(bucket.flat, [real_numel(one) for one in bucket.layers])
                for name, average in zip(names, averages, strict=True):
                    layers[name][1].copy_(average)
        else:
            # Other parameters than in the saved run: there is nothing to be equal to.
            self.is_over = True
            for bucket, _ in waiting:
                receiver(bucket)
        for bucket, future in waiting:
            future.set_result(bucket.flat)

    def _names_of(self, bucket: BucketLike) -> list[str]:
        return [self._names[parameter] for parameter in bucket.parameters()]
