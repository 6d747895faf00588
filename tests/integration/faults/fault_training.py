"""A training without rounding, in Lightning and in plain tensors, so that files can be compared bit by bit.

Gradients, sums and residuals are multiples of 3/16, which float32 represents exactly. No order of additions and no
division by two or three workers rounds. Gradients depend on the worker, on the step and on the sign of each weight.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

UNIT = 3 / 16
SIZES = {"first": 700, "middle": 1500, "last": 1100}
"""Number of elements by parameter; SMALL_BUCKETS_MB puts each parameter into a separate bucket."""
RATE, MOMENTUM = 0.5, 0.5
Layers = dict[str, Tensor]


def first_weights() -> Layers:
    generator = torch.Generator().manual_seed(5)
    return {name: UNIT * torch.randint(-8, 9, (size,), generator=generator) for name, size in SIZES.items()}


def slopes(rank: int, step: int) -> Layers:
    """Return the part of a gradient that does not depend on the weights."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: UNIT * torch.randint(-6, 7, (size,), generator=generator) for name, size in SIZES.items()}


# Plain tensors.


@dataclass
class State:
    """The state of a training after some optimizer steps."""

    weights: Layers
    momentum: Layers
    residuals: list[Layers]

    @classmethod
    def first(cls, num_workers: int) -> "State":
        return cls(first_weights(), zeros(), [zeros()] * num_workers)

    def after(self, step: int, threshold: float) -> "State":
        """Return the state after a step in which each worker sends values that reach the threshold."""
        num_workers = len(self.residuals)
        weights, momentum, residuals = zeros(), zeros(), [zeros() for _ in range(num_workers)]
        for name, weight in self.weights.items():
            total = torch.zeros_like(weight)
            for rank in range(num_workers):
                compensated = self.residuals[rank][name] + slopes(rank, step)[name] + UNIT * weight.sign()
                is_sent = compensated.abs() >= threshold
                total += torch.where(is_sent, compensated, 0.0)
                residuals[rank][name] = torch.where(is_sent, 0.0, compensated)
            momentum[name] = MOMENTUM * self.momentum[name] + total / num_workers
            weights[name] = weight - RATE * momentum[name]
        return State(weights, momentum, residuals)


@dataclass
class LocalState:
    """The state of local training after some optimizer steps, in float64; exact for two workers."""

    anchor: Layers
    weights: list[Layers]
    momentum: list[Layers]

    @classmethod
    def first(cls, num_workers: int) -> "LocalState":
        anchor = {name: weight.double() for name, weight in first_weights().items()}
        return cls(anchor, [anchor] * num_workers, [zeros()] * num_workers)

    @property
    def mean(self) -> Layers:
        return {name: sum(weight[name] for weight in self.weights) / len(self.weights) for name in SIZES}

    def stepped(self, step: int) -> "LocalState":
        """Return the state after an optimizer step of every worker, before an exchange."""
        weights, momentum = [], []
        for rank, (before, moved) in enumerate(zip(self.weights, self.momentum, strict=True)):
            slope = slopes(rank, step)
            momentum.append({name: MOMENTUM * moved[name] + slope[name] + UNIT * before[name].sign() for name in SIZES})
            weights.append({name: before[name] - RATE * momentum[rank][name] for name in SIZES})
        return LocalState(self.anchor, weights, momentum)

    def after(self, step: int, threshold: float) -> "LocalState":
        """Return the state after a step and an exchange of drifts that reach the threshold."""
        stepped = self.stepped(step)
        anchor, weights = {}, [{} for _ in stepped.weights]
        for name, x in self.anchor.items():
            drifts = [x - weight[name] for weight in stepped.weights]
            # Workers send float32.
            sent = [torch.where(drift.abs() >= threshold, drift.float().double(), 0.0) for drift in drifts]
            anchor[name] = x - sum(sent) / sum(part != 0 for part in sent).clamp(min=1)
            for rank, (drift, part) in enumerate(zip(drifts, sent, strict=True)):
                weights[rank][name] = anchor[name] - (drift - part)
        return LocalState(anchor, weights, stepped.momentum)


def zeros() -> Layers:
    return {name: torch.zeros(size) for name, size in SIZES.items()}


def simulate(state: Any, steps: range, threshold: float) -> list[Any]:
    """Return the given state and those after every step."""
    states = [state]
    for step in steps:
        states.append(states[-1].after(step, threshold))
    return states


# Lightning.


class Exact(LightningModule):
    """The Lightning module of this training, which reports the points that it reaches."""

    def __init__(self, reach: Callable[[str], None] = lambda name: None) -> None:
        super().__init__()
        self.reach = reach
        for name, weight in first_weights().items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, slope: Layers) -> Tensor:
        total = torch.zeros(())
        for name in SIZES:
            weight = getattr(self, name)
            total = total + (weight * slope[name]).sum() + UNIT * weight.abs().sum()
            total.register_hook(lambda _: self.reach("backward"))
            self.reach("forward")
        return total

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.reach("training_step begins")
        loss = self(slopes(self.trainer.global_rank, self.trainer.global_step))
        self.reach("training_step ends")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OneByOne(self.parameters(), self.reach)


class ByHand(Exact):
    """The module of this training in manual optimization."""

    def __init__(self, reach: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(reach)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.reach("between backward and step")
        optimizer.step()
        self.reach("after the step")


class OneByOne(torch.optim.Optimizer):
    """SGD with momentum and a point after each parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter], reach: Callable[[str], None]) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.reach = reach

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.reach("optimizer begins")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reach("optimizer has a gradient")
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state.setdefault("momentum", torch.zeros_like(parameter)).mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(RATE * state["momentum"])
            self.reach("optimizer changed a weight")
        return loss
