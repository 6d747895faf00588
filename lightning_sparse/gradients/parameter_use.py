"""Leaves the parameters that a backward does not reach out of the exchange."""

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from lightning_sparse.engine.optimizer_steps import remove_hooks
from lightning_sparse.exchange.buffers import copy_to_device
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.sparsifiers.protocol import LayerLayout


class ParameterUse:
    """Records the parameters that a backward reaches, so that unused ones are not exchanged.

    DDP ignores the average of a parameter that no worker used, so sent values of its residual would be lost. If an
    unused parameter has a gradient of an earlier backward, DDP copies this old gradient into the bucket. Old gradients
    were already exchanged and must not enter the residual again, so ``set_aside`` removes them from the bucket. Then:

    - If no worker used the parameter, it keeps its old gradient.
    - If some workers used it and added to their gradients, the average includes the old gradients of the other workers,
      as under DDP. They are sent in a dense round after all headers have arrived.

    A hook on each parameter records its use, because DDP does not report it. Without ``find_unused_parameters`` or
    ``static_graph``, DDP requires that every parameter is used.

    Args:
        parameters: the names of all parameters in DDP's buckets.
        allows_unused: whether a backward may leave parameters out. If not, every parameter counts as used.
    """

    def __init__(self, parameters: Mapping[Tensor, str], *, allows_unused: bool) -> None:
        self.allows_unused = allows_unused
        self._parameters = {name: parameter for parameter, name in parameters.items()}
        self._used: set[str] = set()
        self._old: dict[str, Tensor] = {}
        self._hooks = [
            # Not a hook on the gradient itself, which torch.autograd.grad calls too.
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name, used=self._used: used.add(name)  # holds no reference to this object
            )
            for parameter, name in parameters.items()
            if allows_unused and parameter.requires_grad
        ]

    def forget_old(self) -> None:
        """Discard old gradients after the step or an interruption."""
        self._old.clear()

    def set_aside(self, layout: LayerLayout, gradient: Tensor) -> dict[str, tuple[int, int]]:
        """Return name and ``(start, end)`` of a bucket's layers that were not used since the last exchange.

        Sets these parts of the bucket's gradient, shape (layout.num_elements,), to zero.
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
        """Return a bucket's marks: float64, shape (2 L,); None if unused layers are not allowed.

        The first L marks are 1 for used layers. The others are 1 for unused layers with a nonzero old gradient.
        """
        if not self.allows_unused:
            return None
        used = [float(name in self._used) for name in layout.names]
        marks = copy_to_device(torch.tensor(used + [0.0] * len(used), dtype=torch.float64), device)
        for place, name in enumerate(layout.names, len(used)):
            if name in self._old:
                marks[place] = self._old[name].any()  # also of NaN
        return marks

    def end(self, layouts: Sequence[LayerLayout], notes: Sequence[Tensor]) -> tuple[set[str], set[str]]:
        """Return names of parameters that any worker used, and of those with old gradients.

        The latter have a nonzero old gradient on a worker that did not use them. The notes of a bucket are all
        workers' ``marks``, on the CPU: shape (n, 2 L).
        """
        if not self.allows_unused:
            return {name for layout in layouts for name in layout.names}, set()
        self._used.clear()
        used: set[str] = set()
        kept: set[str] = set()
        for layout, marks in zip(layouts, notes, strict=True):
            used_flags, kept_flags = marks.any(0).view(2, -1).tolist()
            used.update(compress(layout.names, used_flags))
            kept.update(compress(layout.names, kept_flags))
        return used, kept & used

    def add_old(self, workers: Workers, names: set[str], layout: LayerLayout, average: Tensor) -> int:
        """Add the mean of old gradients to a bucket's average; return sent bytes. Collective.

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
        """Restore old gradients of layers that no worker used."""
        for name, start, end in layout.spans() if self._old else ():
            if name in self._old and name not in used_by_any:
                gradient[start:end] = self._old[name]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        remove_hooks(self._hooks)
