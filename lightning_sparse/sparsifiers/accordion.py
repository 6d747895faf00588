"""The ACCORDION sparsifier: Top-k of every layer, with a higher density in critical regimes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import is_number, require_count, require_density
from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier
from lightning_sparse.sparsifiers.top_k import mark_by_layer


class Accordion(MarkingSparsifier):
    """Selects Top-k of every layer, at the high density while the layer is in a critical regime.

    Agarwal et al., *ACCORDION: adaptive gradient communication via critical learning regime identification* (MLSys
    2021), by the rule of its public code: a layer's norm is that of its gradients summed over an epoch. After epoch 0,
    ``interval``, 2 · ``interval``, … it is compared with the norm at the last comparison. An epoch without an exchange
    postpones a comparison to the next epoch. Until the next comparison, the layer is critical if this was its first
    comparison, if the older norm is zero, or if the norms differ by at least ``relative_change`` of the older norm. All
    layers are critical if an epoch begins with a lower learning rate than the epoch before.

    Unlike the public code, this takes the norm of the averages, which are the same bits on all workers, and not of rank
    0's gradients: nothing is broadcast. It also treats layers of one dimension like others, and does not send them
    whole.

    In an epoch that is compared, the sum and the last average take twice the model's memory. An average counts if an
    optimizer stepped before the next exchange: the averages of dropped backwards do not count, and of several backwards
    before a step only the last counts.

    Args:
        low_density: the share of a layer to send outside of critical regimes, in (0, 1].
        high_density: the share of a layer to send in critical regimes, at least ``low_density``.
        interval: epochs from one comparison to the next, at least 1.
        relative_change: the smallest change of a critical layer's norm, as a share of the older norm, above 0.

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
        self, low_density: float = 0.001, high_density: float = 0.01, interval: int = 10, relative_change: float = 0.5
    ) -> None:
        for name, value in (("low_density", low_density), ("high_density", high_density)):
            require_density(value, "0.1 % of each layer", name)
        if low_density > high_density:
            raise ValueError(f"Invalid {low_density=}. Must be at most {high_density=}.")
        if not (is_number(relative_change) and 0 < relative_change < float("inf")):
            raise ValueError(f"Invalid {relative_change=}. Must be above 0; the authors use 0.5.")
        self.low_density = low_density
        self.high_density = high_density
        require_count("interval", interval)
        self.interval = interval
        self.relative_change = relative_change
        self._step = 0
        self._last: dict[str, Tensor] = {}
        self._reset()

    def _reset(self) -> None:
        self._epoch = -1
        self._next_comparison = 0
        self._next_epoch: tuple[int, list[float]] | None = None
        self._rates: list[float] = []
        self._stable_layers: set[str] = set()
        self._norms: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._last.clear()

    def density_of(self, name: str) -> float:
        """Return the share of the layer with this parameter name that is sent."""
        return self.low_density if name in self._stable_layers else self.high_density

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Note an epoch and its learning rates; see `Sparsifier.begin_epoch`."""
        known = self._epoch if self._next_epoch is None else self._next_epoch[0]
        if epoch != known:
            self._next_epoch = epoch, list(learning_rates)

    def begin_step(self, step: int, rank: int) -> None:
        """Add the averages of the last step, and compare norms if an epoch is over.

        Raises:
            RuntimeError: ``begin_epoch`` was not called.
        """
        if self._last and step > self._step:
            _add(self._sums, self._last)
        self._last.clear()  # an average that was not added belongs to an undone step
        self._step = step
        if self._next_epoch is not None:
            self._end_epoch(*self._next_epoch)
            self._next_epoch = None
        elif self._epoch < 0 and step:
            raise RuntimeError(
                "ACCORDION needs begin_epoch(epoch, learning_rates) at the start of each epoch. Call it on the state "
                "or the averager. With a Trainer, the strategy calls it."
            )

    def _end_epoch(self, epoch: int, rates: list[float]) -> None:
        if self._sums:
            found = torch.stack([torch.linalg.vector_norm(total, dtype=torch.float64) for total in self._sums.values()])
            old, norms = self._norms, dict(zip(self._sums, found.tolist(), strict=True))
            self._stable_layers = {name for name, norm in norms.items() if self._is_stable(old.get(name, 0.0), norm)}
            self._norms, self._sums = norms, {}
            self._next_comparison = self._epoch + self.interval
        if any(new < old for old, new in zip(self._rates, rates, strict=False)):
            self._stable_layers = set()
        self._epoch, self._rates = epoch, rates

    def _is_stable(self, before: float, after: float) -> bool:
        return before > 0 and abs(after - before) / before < self.relative_change

    def observe(self, layout: LayerLayout, average: Tensor) -> None:
        """Keep an average of the current step if its epoch will be compared."""
        if self._epoch >= self._next_comparison:
            copied = average.to(torch.promote_types(average.dtype, torch.float32), copy=True)
            self._last.update(zip(layout.names, torch.split(copied, list(layout.sizes)), strict=True))

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Mark k coordinates of each layer, k by its regime, and every non-finite one."""
        return mark_by_layer(compensated, compensated.abs(), layout, self.density_of)

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Return epoch, regimes, norms and the running sums; see `Sparsifier.state_dict`."""
        sums = {name: total.to("cpu", copy=True) for name, total in self._sums.items()}
        if next_step > self._step:
            _add(sums, {name: average.to("cpu", copy=True) for name, average in self._last.items()})
        return {
            "epoch": self._epoch,
            "next_comparison": self._next_comparison,
            "next_epoch": None if self._next_epoch is None else list(self._next_epoch),
            "learning_rates": self._rates,
            "stable_layers": sorted(self._stable_layers),
            "norms": self._norms,
            "sums": sums,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`; ``{}`` starts anew."""
        self._reset()
        if state:
            self._epoch, self._next_comparison = state["epoch"], state["next_comparison"]
            self._next_epoch, self._rates, self._norms = state["next_epoch"], state["learning_rates"], state["norms"]
            self._stable_layers = set(state["stable_layers"])
            self._sums = {name: total.clone() for name, total in state["sums"].items()}


def _add(sums: dict[str, Tensor], averages: Mapping[str, Tensor]) -> None:
    for name, average in averages.items():
        if name in sums and sums[name].device != average.device:  # sums of a checkpoint are on the CPU
            sums[name] = sums[name].to(average.device)
    known = [name for name in averages if name in sums and sums[name].shape == averages[name].shape]
    if known:
        torch._foreach_add_([sums[name] for name in known], [averages[name] for name in known])
    sums.update({name: average for name, average in averages.items() if name not in known})
