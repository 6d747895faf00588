"""The ACCORDION sparsifier: Top-k of every layer with more in critical regimes than outside of them."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier, require_density
from lightning_sparse.sparsifiers.top_k import TopK


class Accordion(MarkingSparsifier):
    """Selects Top-k of every layer: of high density while the layer is in a critical regime, of low density else.

    Agarwal et al., *ACCORDION: adaptive gradient communication via critical learning regime identification* (MLSys
    2021), by the rule of its public code: let a layer's norm be that of the gradients summed over an epoch. After epoch
    0, ``interval``, 2 · ``interval``, … it is compared with that of ``interval`` epochs before (where an epoch has no
    exchange, the next that has one). The layer is critical until the next comparison if they differ by at least
    ``relative_change`` of the older one, if that was zero, and after the first. Whenever an epoch begins with a lower
    learning rate than the one before, all layers are.

    Unlike there, the norm is of the averages that train, which are the same bits on all workers, and not of the first
    worker's own gradients: nothing is broadcast. And a layer of one dimension is a layer like others, not sent whole.

    Of an epoch that is compared, the sum is kept, and the last average: twice the model's memory. An average counts if
    an optimizer stepped before the next exchange: what a backward brought that was dropped does not, and of several
    backwards before a step the last does.

    Args:
        low_density: the share of a layer to send outside of critical regimes, in (0, 1].
        high_density: the share within, at least the other.
        interval: epochs from one comparison to the next, at least 1.
        relative_change: by how much of the older norm the newer must differ, above 0.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> sparsifier = Accordion(low_density=0.25, high_density=0.5, interval=1)
        >>> layout = LayerLayout(names=("weight",), sizes=(4,))
        >>> for epoch in range(3):
        ...     sparsifier.begin_epoch(epoch, [0.1])
        ...     sparsifier.begin_step(epoch, rank=0)
        ...     print(sparsifier.density_of("weight"))
        ...     sparsifier.observe(layout, torch.ones(4))
        0.5
        0.5
        0.25
    """

    needs_averages = True

    def __init__(
        self,
        low_density: float = 0.001,
        high_density: float = 0.01,
        interval: int = 10,
        relative_change: float = 0.5,
    ) -> None:
        for name, value in (("low_density", low_density), ("high_density", high_density)):
            require_density(value, "0.1 % of each layer", name)
        if low_density > high_density:
            raise ValueError(f"Invalid {low_density=}. Must be at most {high_density=}.")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"Invalid {interval=}. Must be a whole number of epochs, at least 1.")
        is_number = isinstance(relative_change, (int, float)) and not isinstance(relative_change, bool)
        if not (is_number and 0 < relative_change < float("inf")):
            raise ValueError(f"Invalid {relative_change=}. Must be above 0; 0.5 is the authors'.")
        self.low_density = low_density
        self.high_density = high_density
        self.interval = interval
        self.relative_change = relative_change
        self._low, self._high = TopK(low_density), TopK(high_density)
        self._step = 0
        self._last: dict[str, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self._epoch = -1
        self._due = 0
        self._coming: tuple[int, tuple[float, ...]] | None = None
        self._rates: tuple[float, ...] = ()
        self._calm: set[str] = set()
        self._norms: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._last.clear()

    def density_of(self, name: str) -> float:
        """The share that is sent of the layer with this parameter name."""
        return self.low_density if name in self._calm else self.high_density

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Is told of an epoch and its learning rates; see `Sparsifier.begin_epoch`."""
        known = self._epoch if self._coming is None else self._coming[0]
        if epoch != known:
            self._coming = epoch, tuple(learning_rates)

    def begin_step(self, step: int, rank: int) -> None:
        """Counts what the last step brought, and compares where an epoch is over.

        Raises:
            RuntimeError: nobody has said that an epoch begins.
        """
        if self._last and step > self._step:
            _add(self._sums, self._last)
        self._last.clear()  # of a step that was undone, if it is not counted
        self._step = step
        if self._coming is not None:
            self._turn(*self._coming)
            self._coming = None
        elif self._epoch < 0 and step:
            raise RuntimeError(
                "ACCORDION compares epochs, and nobody has said that one begins. Call "
                "begin_epoch(epoch, learning_rates) of the state or the averager at the beginning of each; "
                "with a Trainer the strategy does."
            )

    def _turn(self, epoch: int, rates: tuple[float, ...]) -> None:
        if self._sums:
            found = torch.stack([_norm(total) for total in self._sums.values()])
            norms = dict(zip(self._sums, found.tolist(), strict=True))
            self._calm = {name for name, norm in norms.items() if self._is_calm(self._norms.get(name, 0.0), norm)}
            self._norms, self._sums = norms, {}
            self._due = self._epoch + self.interval
        if any(new < old for old, new in zip(self._rates, rates, strict=False)):
            self._calm = set()
        self._epoch, self._rates = epoch, rates

    def _is_calm(self, before: float, after: float) -> bool:
        change = abs(after - before) / before if before else float("nan")
        return not isnan(change) and change < self.relative_change

    def observe(self, layout: LayerLayout, average: Tensor) -> None:
        """Keeps an average of the running step, in an epoch that will be compared."""
        if self._epoch >= self._due:
            copied = average.to(torch.promote_types(average.dtype, torch.float32), copy=True)
            self._last.update(zip(layout.names, torch.split(copied, list(layout.sizes)), strict=True))

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Marks k coordinates of each layer, k by its regime, and every non-finite one."""
        if not self._calm.intersection(layout.names):
            return self._high.mark(compensated, layout)
        if self._calm.issuperset(layout.names):
            return self._low.mark(compensated, layout)
        marks = torch.empty_like(compensated, dtype=torch.bool)
        for name, start, end in layout.spans():
            top_k = self._low if name in self._calm else self._high
            marks[start:end] = top_k.mark(compensated[start:end], LayerLayout((name,), (end - start,)))
        return marks

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Returns epoch, regimes, norms and the running sums; see `Sparsifier.state_dict`."""
        last = self._last if next_step > self._step else {}
        names = [*self._sums, *(name for name in last if name not in self._sums)]
        return {
            "epoch": self._epoch,
            "due": self._due,
            "coming": None if self._coming is None else [self._coming[0], list(self._coming[1])],
            "learning_rates": list(self._rates),
            "calm": sorted(self._calm),
            "norms": dict(self._norms),
            "sums": {name: _sum(self._sums.get(name), last.get(name)) for name in names},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned; from ``{}`` it begins anew."""
        self._forget()
        if state:
            self._epoch, self._due, coming = state["epoch"], state["due"], state["coming"]
            self._coming = None if coming is None else (coming[0], tuple(coming[1]))
            self._rates, self._calm = tuple(state["learning_rates"]), set(state["calm"])
            self._norms = dict(state["norms"])
            self._sums = {name: total.clone() for name, total in state["sums"].items()}


def _add(sums: dict[str, Tensor], averages: Mapping[str, Tensor]) -> None:
    for name, average in averages.items():
        if name in sums and sums[name].device != average.device:  # as a checkpoint has brought it
            sums[name] = sums[name].to(average.device)
    known = [name for name in averages if name in sums and sums[name].shape == averages[name].shape]
    if known:
        torch._foreach_add_([sums[name] for name in known], [averages[name] for name in known])
    sums.update({name: average for name, average in averages.items() if name not in known})


def _sum(some: Tensor | None, more: Tensor | None) -> Tensor:
    """Returns the sum of what is there, on the CPU and in memory of its own."""
    if some is not None and more is not None and some.shape == more.shape:
        return some.to(more.device).add(more).cpu()
    chosen = some if more is None else more  # of another size it is another layer
    assert chosen is not None
    return chosen.to("cpu", copy=True)


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm
