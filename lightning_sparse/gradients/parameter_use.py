"""Which parameters a backward reached, for DDP modules with unused parameters."""

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from lightning_sparse.exchange import Workers, without_wait
from lightning_sparse.sparsifiers import LayerLayout


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
