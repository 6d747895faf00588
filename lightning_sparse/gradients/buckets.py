"""Numbers and names DDP's buckets, and regroups their gradients after a resume.

**In the first iteration of a static graph**, DDP gives all buckets the index 0 and, if there are several, marks none of
them as the last. ``DDPBuckets`` counts them.

**After a resume**, DDP starts with one bucket for all parameters and rebuilds its buckets after the first iteration.
Routes, and the positions at which an all-reduce splits a bucket, would differ from an uninterrupted run. So would the
last bits of sums over more than two workers. ``DDPBuckets`` regroups the gradients of up to two steps into the saved
layout::

    DDP, first step    [ fc | conv2 | conv1 ]
                          │     │       │        copied layer by layer; averages are copied back
    saved layout       [ fc | conv2 ] [ conv1 ]
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_sparse.engine.grouping import real_numel, require_strides
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.sparsifiers.protocol import LayerLayout

AverageFuture = torch.futures.Future[Tensor]
"""The future of a bucket's averaged gradient, for which DDP waits at the end of backward."""
MAX_REGROUPED_STEPS = 2
"""Steps after a resume in which buckets may change: DDP rebuilds them after the first iteration, or after the second of
a static graph, and they may differ from the saved ones, for example with another ``bucket_cap_mb``."""


class DDPBuckets:
    """Reads DDP's buckets of the running step, and returns the averages to DDP.

    The residual of its buckets is a placeholder, the gradient, until ``DDPGradientAverager`` sets it.
    """

    def __init__(self, parameter_names: Mapping[Tensor, str], *, is_static_graph: bool) -> None:
        self._names = dict(parameter_names)
        self._strides = {name: weight.stride() for weight, name in self._names.items() if weight.requires_grad}
        self._counts = is_static_graph
        self._layouts: dict[tuple[tuple[int, tuple[int, ...]], ...], LayerLayout] = {}
        self._saved_layout: list[list[str]] = []
        self._steps_to_regroup = 0
        self._arrived: list[tuple[FlatBucket, AverageFuture]] = []
        self._regrouped: list[FlatBucket] = []

    def regroup_as(self, saved_layout: Sequence[Sequence[str]]) -> None:
        """Regroup the next steps into saved buckets until DDP's first bucket equals the saved one.

        The layout lists parameter names per bucket. It has no effect if its parameters differ from those of DDP.
        """
        names = [name for bucket in saved_layout for name in bucket]
        self._saved_layout = [list(bucket) for bucket in saved_layout] if sorted(names) == sorted(self._strides) else []
        self._steps_to_regroup = MAX_REGROUPED_STEPS

    def read(self, grad_bucket: GradBucket) -> tuple[FlatBucket, AverageFuture]:
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
            self.forget()  # an exception may have interrupted the previous backward
        is_on_cpu = gradient.device.type == "cpu"
        future: AverageFuture = torch.futures.Future(devices=None if is_on_cpu else [gradient.device])
        bucket = FlatBucket(index, layout, gradient, Residual(gradient, gradient), is_last)
        self._arrived.append((bucket, future))
        return bucket, future

    def ready(self, bucket: FlatBucket) -> list[FlatBucket]:
        """Return the buckets to exchange now. Regrouped buckets follow DDP's last bucket."""
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
                is_last = index == len(self._saved_layout) - 1
                self._regrouped.append(FlatBucket(index, layout, gradient, Residual(gradient, gradient), is_last))
        return self._regrouped

    def resolve_futures(self) -> None:
        """Complete all futures after every bucket's gradient contains its average."""
        parts = self._parts() if self._regrouped else {}
        for regrouped in self._regrouped:
            for name, start, end in regrouped.layout.spans():
                parts[name].copy_(regrouped.gradient[start:end])
        for bucket, future in self._arrived:
            future.set_result(bucket.gradient)
        self.forget()

    def forget(self) -> None:
        """Discard the running step's buckets."""
        self._arrived, self._regrouped = [], []

    def _count(self, names: Sequence[str], is_last: bool) -> tuple[int, bool]:
        """Return the index of a static graph's first-step bucket, and whether it is the last."""
        arrived = [name for bucket, _ in self._arrived for name in bucket.layout.names]
        if names[0] in arrived:  # an exception interrupted the previous backward
            arrived = []
        is_last = is_last or len(arrived) + len(names) == len(self._strides)
        self._counts = not is_last
        return (len(self._arrived) if arrived else 0), is_last

    def _parts(self) -> dict[str, Tensor]:
        """Return views of each parameter's part of DDP's buckets by name."""
        return {
            name: bucket.gradient[start:end]
            for bucket, _ in self._arrived
            for name, start, end in bucket.layout.spans()
        }

    def _layout_of(self, grad_bucket: GradBucket) -> LayerLayout:
        parameters = grad_bucket.parameters()
        key = tuple((id(parameter), parameter.stride()) for parameter in parameters)
        if key not in self._layouts:
            names = tuple(self._names[parameter] for parameter in parameters)
            require_strides(names, parameters, self._strides)
            self._layouts[key] = LayerLayout(names, tuple(map(real_numel, parameters)))
        return self._layouts[key]
