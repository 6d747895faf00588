"""Which parameters a backward reached, for DDP modules that allow some to be left out."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.exchange import Workers
from lightning_sparse.sparsifiers import LayerLayout, Selection


class ParameterUse:
    """Notes which parameters a backward reaches, so that the others are left alone.

    For a parameter that no worker used DDP ignores what comes back from the exchange, so whatever was sent of its
    residual would be lost. And if it still has a gradient from an earlier step (two optimizers in turn, ``zero_grad``
    before backward) DDP puts that one into the bucket: it was exchanged when it was new and must not enter the residual
    as well. Only in the second of several backwards before a step it must, on a worker that left out what another one
    used: both then add to what the first backward made. Who used what must be known for that, so such a backward
    exchanges nothing before it has ended.

    With ``gradient_as_bucket_view`` the gradient of a step before, if nobody set it to zero, *is* the bucket, and
    becomes zero.

    A hook on each parameter does the noting; DDP's own knowledge of unused parameters is out of reach. Only needed with
    ``find_unused_parameters`` or ``static_graph``: otherwise DDP insists that every parameter is used.

    Args:
        parameters: the name of every parameter that DDP may bring.
    """

    def __init__(self, parameters: Mapping[Tensor, str]) -> None:
        self._used: set[str] = set()
        self._hooks = [
            # Not a hook for the gradient itself: torch.autograd.grad calls that too.
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_note, self._used, name)
            )
            for parameter, name in parameters.items()
            if parameter.requires_grad
        ]

    def unused_spans(self, layout: LayerLayout) -> dict[str, tuple[int, int]]:
        """Returns name and ``(start, end)`` of every layer of a bucket that was not reached since the last exchange."""
        return {name: (start, end) for name, start, end in layout.spans() if name not in self._used}

    def marks(self, bucket_layout: LayerLayout, device: torch.device) -> Tensor:
        """Returns what a header tells of a bucket's layers: 1 where this backward reached one, float64, shape (L,)."""
        marks = [float(name in self._used) for name in bucket_layout.names]
        return torch.tensor(marks, dtype=torch.float64).to(device, non_blocking=True)

    def share(self, workers: Workers, names: Sequence[str], device: torch.device) -> None:
        """Takes what any worker reached for reached. Collective; to be called when a backward has reached all it will.

        Args:
            workers: whose backwards.
            names: of all parameters, in the same order on all workers.
            device: on which the workers communicate.
        """
        is_used = torch.tensor([float(name in self._used) for name in names], device=device)
        workers.all_reduce(is_used).wait()
        self._used.update(name for name, count in zip(names, is_used.tolist(), strict=True) if count)

    def end(self, layouts: Sequence[LayerLayout], headers: Sequence[Tensor]) -> tuple[list[Tensor], set[str]]:
        """Begins anew, when an exchange is over; returns all headers without marks, and the names that any worker used.

        Args:
            layouts: of the buckets.
            headers: of each bucket all workers' headers, on the CPU: shape (n, H + L).
        """
        self._used.clear()
        used: set[str] = set()
        for layout, header in zip(layouts, headers, strict=True):
            counts = header[:, header.shape[1] - len(layout.names) :].sum(0).tolist()
            used.update(name for name, count in zip(layout.names, counts, strict=True) if count)
        return [one[:, : one.shape[1] - len(layout.names)] for layout, one in zip(layouts, headers, strict=True)], used

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def without(selection: Selection, spans: Sequence[tuple[int, int]], num_elements: int) -> Selection:
    """Returns the selection without the coordinates in these spans of a bucket of so many elements."""
    if not spans:
        return selection
    indices, values = selection
    kept = torch.ones(num_elements, dtype=torch.bool, device=indices.device)
    for start, end in spans:
        kept[start:end] = False
    kept = kept[indices]
    return Selection(indices[kept], values[kept])


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    used.add(name)
