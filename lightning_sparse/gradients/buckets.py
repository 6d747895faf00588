"""DDP's buckets as they arrive: numbered, named, without unused parameters, and after a resume regrouped.

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
from itertools import compress

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_sparse.engine.grouping import real_numel, require_strides
from lightning_sparse.exchange import Workers, without_wait
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


class ParameterUse:
    """Notes which parameters a backward reaches, so that nothing of the others is exchanged.

    DDP ignores the average of a parameter that no worker used, so values sent of its residual would be lost. If an
    unused parameter has a gradient of an earlier backward, DDP puts that gradient into the bucket. It was exchanged
    when it was new, so it must not enter the residual again. It is taken out of the bucket, and then:

    - if no worker used the parameter, it keeps its old gradient;
    - if some workers used it and added to their gradients, the old gradients of the others belong to the average, as
      under DDP. They follow in a dense round, once all headers have arrived.

    A hook on each parameter notes its use, as DDP does not tell. Without ``find_unused_parameters`` or
    ``static_graph`` DDP insists that every parameter is used.

    Args:
        parameters: the name of every parameter that DDP may bring.
        allows_unused: whether a backward may leave parameters out. If not, every parameter counts as used.
    """

    def __init__(self, parameters: Mapping[Tensor, str], *, allows_unused: bool) -> None:
        self.allows_unused = allows_unused
        self._parameters = {name: parameter for parameter, name in parameters.items()}
        self._used: set[str] = set()
        self._old: dict[str, Tensor] = {}
        self._hooks = [
            # Not a hook on the gradient itself: torch.autograd.grad calls that too.
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name, used=self._used: used.add(name)  # holds no reference to this object
            )
            for parameter, name in parameters.items()
            if allows_unused and parameter.requires_grad
        ]

    def forget_old(self) -> None:
        """Forget old gradients: the step is over, or was broken off."""
        self._old.clear()

    def set_aside(self, layout: LayerLayout, gradient: Tensor) -> dict[str, tuple[int, int]]:
        """Return name and ``(start, end)`` of every layer of a bucket that was not reached since the last exchange.

        The bucket's gradient, shape (layout.num_elements,), becomes zero there.
        """
        if not self.allows_unused:
            return {}
        unused = {name: (start, end) for name, start, end in layout.spans() if name not in self._used}
        for name, (start, end) in unused.items():
            if self._parameters[name].grad is not None:
                self._old[name] = gradient[start:end].clone()
        if unused:
            torch._foreach_zero_([gradient[start:end] for start, end in unused.values()])
        return unused

    def marks(self, layout: LayerLayout, device: torch.device) -> Tensor | None:
        """Return a bucket's marks for the header: float64, shape (2 L,); None if all layers are used.

        First 1 for each layer that this backward reached, then 1 for each other layer whose old gradient is not 0.
        """
        if not self.allows_unused:
            return None
        used = [float(name in self._used) for name in layout.names]
        marks = without_wait(torch.tensor(used + [0.0] * len(used), dtype=torch.float64), device)
        for place, name in enumerate(layout.names, len(used)):
            if name in self._old:
                marks[place] = self._old[name].any()  # also of NaN
        return marks

    def end(self, layouts: Sequence[LayerLayout], notes: Sequence[Tensor]) -> tuple[set[str], set[str]]:
        """Return the names that any worker used, and those of them with old gradients on other workers.

        The notes of a bucket are all workers' ``marks``, on the CPU: shape (n, 2 L).
        """
        if not self.allows_unused:
            return {name for layout in layouts for name in layout.names}, set()
        self._used.clear()
        used: set[str] = set()
        kept: set[str] = set()
        for layout, marks in zip(layouts, notes, strict=True):
            of_used, of_kept = marks.any(0).view(2, -1).tolist()
            used.update(compress(layout.names, of_used))
            kept.update(compress(layout.names, of_kept))
        return used, kept & used

    def add_old(self, workers: Workers, names: set[str], layout: LayerLayout, average: Tensor) -> int:
        """Add the mean of the workers' old gradients to a bucket's average; return the bytes sent. Collective.

        The names are the second result of ``end``.
        """
        spans = [span for span in layout.spans() if span[0] in names] if names else []
        if not spans:
            return 0
        old = torch.cat(
            [
                self._old[name].to(average.dtype) if name in self._old else average.new_zeros(end - start)
                for name, start, end in spans
            ]
        )
        workers.all_reduce(old).wait()
        sizes = [end - start for _, start, end in spans]
        for (_, start, end), part in zip(spans, torch.split(old.div_(workers.num_workers), sizes), strict=True):
            average[start:end] += part
        return old.nbytes

    def put_back(self, used_by_any: set[str], layout: LayerLayout, gradient: Tensor) -> None:
        """Put old gradients of layers that no worker used back into a bucket, which may be the gradients' memory."""
        for name, start, end in layout.spans() if self._old else ():
            if name in self._old and name not in used_by_any:
                gradient[start:end] = self._old[name]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        while self._hooks:
            self._hooks.pop().remove()
