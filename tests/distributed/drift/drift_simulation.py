"""Simulates local training with a sparse exchange of drifts in plain tensors, without the package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Select = Callable[[Tensor], Tensor]
"""Returns the mask of sent elements of a flat drift."""

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def simulated(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Simulation`` for these arguments of ``DriftOptions``."""
    same = {name: value for name, value in options.items() if name in ("every_n_steps", "keep_drift", "drift_decay")}
    outer = (0.7, 0.9) if "outer_optimizer" in options else None
    return {**same, "outer": outer}


@dataclass
class Simulation:
    """n workers.

    Args:
        models: the model of each worker, all with the same weights.
        optimizers: the optimizer of each worker.
        select: returns the mask of sent elements of the drift of all parameters.
        every_n_steps: number of steps between two exchanges.
        keep_drift: whether unsent drifts stay in the weights of the worker.
        drift_decay: factor of unsent drifts that are stored outside the weights.
        by_senders: whether an average is over the workers that sent something other than 0, instead of all.
        outer: learning rate and momentum of Nesterov's method on the anchor; None subtracts the average.
        wire: what values are rounded to that are sent; None leaves them as they are.
        moves_in_place: whether an average moves weights that lack sent values, instead of the anchor replacing them.
            Equal up to rounding.
        sent: the number of coordinates that all workers sent, of every exchange.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    select: Select
    every_n_steps: int = 1
    keep_drift: bool = True
    drift_decay: float = 1.0
    by_senders: bool = True
    outer: tuple[float, float] | None = None
    wire: torch.dtype | None = None
    moves_in_place: bool = False
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.anchor = flat(self.models[0])
        self.kept = [torch.zeros_like(self.anchor) for _ in self.models]
        self.momentum = torch.zeros_like(self.anchor)
        self.num_steps = 0

    def step(self, losses: Sequence[Callable[[nn.Module], Tensor] | None]) -> None:
        """Step each worker that has a loss, and exchange."""
        for model, optimizer, loss in zip(self.models, self.optimizers, losses, strict=True):
            if loss is not None:
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
        self.num_steps += 1
        if self.num_steps % self.every_n_steps == 0:
            self.exchange()

    def exchange(self) -> None:
        starts = [flat(model) for model in self.models]
        drifts = [self.anchor - start for start in starts]
        if not self.keep_drift:
            drifts = [self.drift_decay * kept + drift for kept, drift in zip(self.kept, drifts, strict=True)]
        masks = [self.select(drift) for drift in drifts]
        sent = [torch.where(mask, self._rounded(drift), 0) for mask, drift in zip(masks, drifts, strict=True)]
        self.kept = [drift - part for drift, part in zip(drifts, sent, strict=True)]
        if self.moves_in_place:
            for model, mask, start, kept in zip(self.models, masks, starts, self.kept, strict=True):
                write(model, torch.where(mask, self.anchor - kept, start))
        self.sent.append(sum(int(mask.sum()) for mask in masks))
        divisor = torch.full_like(self.anchor, len(sent))
        if self.by_senders:
            divisor = torch.stack(sent).count_nonzero(0).clamp(min=1).to(divisor.dtype)
        average = sum(sent[1:], sent[0]) / divisor
        if self.outer is None:
            self.anchor = self.anchor - average
        else:
            rate, momentum = self.outer
            self.momentum = momentum * self.momentum + average
            self.anchor = self.anchor - rate * (average + momentum * self.momentum)
        for model, kept in zip(self.models, self.kept, strict=True):
            if self.moves_in_place:
                write(model, flat(model) - average)
            else:
                write(model, self.anchor - kept if self.keep_drift else self.anchor)

    def _rounded(self, drift: Tensor) -> Tensor:
        return drift if self.wire is None else drift.float().to(self.wire).to(drift.dtype)

    def mean(self) -> Tensor:
        return torch.stack([flat(model) for model in self.models]).mean(0)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def anchor_of(averager: Any) -> Tensor:
    return torch.cat([anchor.flatten() for anchor in averager.anchor().values()])


def write(model: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), model.parameters())


def at_least(threshold: float) -> Select:
    return lambda drift: ~(drift.abs() < threshold)
