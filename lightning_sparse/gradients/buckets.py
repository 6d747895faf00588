"""DDP's buckets as they arrive: numbered, named, and after a resume regrouped.

**In the first iteration of a static graph** DDP gives all buckets the index 0 and, if there are several, calls none of
them the last. ``DDPBuckets`` counts them.

**After a resume** DDP begins with one bucket of everything and rebuilds its buckets after the first iteration. Routes,
and the places where an all-reduce cuts a bucket, would differ from an uninterrupted run, and so would the last bits of
sums over more than two workers. So ``DDPBuckets`` regroups the gradients of that step into the saved layout::

    DDP, first step    [ fc | conv2 | conv1 ]
                          │     │       │        copied layer by layer, and the averages back
    saved layout       [ fc | conv2 ] [ conv1 ]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_sparse.engine.state.memory_format import real_numel, require_strides
from lightning_sparse.sparsifiers import LayerLayout

Averaged = torch.futures.Future[Tensor]
"""The future of a bucket's averaged gradient, for which DDP waits at the end of backward."""
MOST_REGROUPED_STEPS = 2
"""DDP rebuilds its buckets after the first iteration, or after the second of a static graph. The rebuilt buckets may
still differ from the saved ones, as with another ``bucket_cap_mb``."""


@dataclass(frozen=True)
class DDPBucket:
    """A bucket of a step.

    Attributes:
        index: its place in the step's order.
        layout: its layers.
        gradient: S · g and later the average, flat, shape (layout.num_elements,).
        is_last: whether the step has no bucket after it.
    """

    index: int
    layout: LayerLayout
    gradient: Tensor
    is_last: bool


class DDPBuckets:
    """The buckets of the running step: reads DDP's, and hands the averages back."""

    def __init__(self, parameter_names: Mapping[Tensor, str], *, is_static_graph: bool) -> None:
        self._names = dict(parameter_names)
        self._strides = {name: weight.stride() for weight, name in self._names.items() if weight.requires_grad}
        self._counts = is_static_graph
        self._layouts: dict[tuple[int, ...], LayerLayout] = {}
        self._saved_layout: list[list[str]] = []
        self._steps_to_regroup = 0
        self._arrived: list[tuple[DDPBucket, Averaged]] = []
        self._regrouped: list[DDPBucket] = []

    def regroup_as(self, saved_layout: Sequence[Sequence[str]]) -> None:
        """Regroup the next steps into the buckets of another run, until DDP's first bucket is that run's.

        The layout has parameter names, bucket by bucket. With other parameters than DDP's buckets it has no effect.
        """
        names = [name for bucket in saved_layout for name in bucket]
        self._saved_layout = [list(bucket) for bucket in saved_layout] if sorted(names) == sorted(self._strides) else []
        self._steps_to_regroup = MOST_REGROUPED_STEPS

    def read(self, grad_bucket: GradBucket) -> tuple[DDPBucket, Averaged]:
        """Return a bucket of DDP, and the future that ``resolve_futures`` completes.

        Raises:
            RuntimeError: a parameter's memory format has changed since DDP made its buckets.
        """
        layout, gradient = self._layout_of(grad_bucket), grad_bucket.buffer()
        assert gradient.numel() == layout.num_elements, f"{gradient.numel()} elements of {layout}"
        index, is_last = grad_bucket.index(), grad_bucket.is_last()
        if self._counts:
            index, is_last = self._count(layout.names, is_last)
        if index == 0:
            self.forget()  # an exception may have broken off the backward before
        future: Averaged = torch.futures.Future(devices=None if gradient.device.type == "cpu" else [gradient.device])
        bucket = DDPBucket(index, layout, gradient, is_last)
        self._arrived.append((bucket, future))
        return bucket, future

    def ready(self, bucket: DDPBucket) -> list[DDPBucket]:
        """Return the buckets to exchange now: this one, or while regrouping all of them once the last has arrived."""
        if self._saved_layout and bucket.index == 0:
            is_as_saved = list(bucket.layout.names) == self._saved_layout[0]
            if is_as_saved or not self._steps_to_regroup:
                self._saved_layout = []
        if not self._saved_layout:
            return [bucket]
        if bucket.is_last:
            self._steps_to_regroup -= 1
            parts = self._parts()
            for index, names in enumerate(self._saved_layout):
                layout = LayerLayout(tuple(names), tuple(parts[name].numel() for name in names))
                gradient = torch.cat([parts[name] for name in names])
                self._regrouped.append(DDPBucket(index, layout, gradient, index == len(self._saved_layout) - 1))
        return self._regrouped

    def resolve_futures(self) -> None:
        """Complete all futures, when every bucket's gradient holds its average."""
        parts = self._parts() if self._regrouped else {}
        for regrouped in self._regrouped:
            for name, start, end in regrouped.layout.spans():
                parts[name].copy_(regrouped.gradient[start:end])
        for bucket, future in self._arrived:
            future.set_result(bucket.gradient)
        self.forget()

    def forget(self) -> None:
        """Forget the running step's buckets."""
        self._arrived, self._regrouped = [], []

    def _count(self, names: Sequence[str], is_last: bool) -> tuple[int, bool]:
        """Return the index of a static graph's bucket in the first step, and whether it is the last."""
        arrived = [name for bucket, _ in self._arrived for name in bucket.layout.names]
        if names[0] in arrived:  # an exception broke off the backward before
            arrived = []
        is_last = is_last or len(arrived) + len(names) == len(self._strides)
        self._counts = not is_last
        return (len(self._arrived) if arrived else 0), is_last

    def _parts(self) -> dict[str, Tensor]:
        """Return each parameter's part of DDP's buckets by name: views."""
        return {
            name: bucket.gradient[start:end]
            for bucket, _ in self._arrived
            for name, start, end in bucket.layout.spans()
        }

    def _layout_of(self, grad_bucket: GradBucket) -> LayerLayout:
        parameters = grad_bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            names = tuple(self._names[parameter] for parameter in parameters)
            self._layouts[key] = LayerLayout(names, tuple(map(real_numel, parameters)))
        layout = self._layouts[key]
        require_strides(layout.names, parameters, self._strides)
        return layout
