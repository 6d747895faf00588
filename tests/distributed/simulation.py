"""Simulates n workers in plain tensors in a single process; shares no code with the package."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def through_float8(values: Tensor, scale: float) -> Tensor:
    """Return multiples of a 512th of the scale with four significant bits, at most 448 scales, as float64."""
    magnitude = (values / scale).float().double().abs().clamp(max=448)  # PyTorch converts by way of float32
    last = 2.0 ** (magnitude.clamp(min=2.0**-6).log2().floor() - 3)
    return ((magnitude / last).round() * last * scale).copysign(values.double())


@dataclass
class Plan:
    """The algorithm of the workers."""

    select: Callable[[str, Tensor], Tensor]  # (layer, compensated gradient) -> mask
    clip_norm: float | None = None
    round_values: Callable[[Tensor], Tensor] = lambda values: values
    select_in_model: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None  # replaces select


@dataclass
class Record:
    """The result of a step."""

    density: float
    error_norm: float
    layer_density: dict[str, float] = field(default_factory=dict)


def simulate(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[Batch]],
    plan: Plan,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[Record]:
    """Train the model in place on ``batches[step][worker]``, as that many workers would."""
    parameters = dict(model.named_parameters())
    num_workers = len(batches[0])
    errors = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(num_workers)]
    elements = sum(p.numel() for p in parameters.values())
    records = []
    for step in batches:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        sent_count = dict.fromkeys(parameters, 0)
        for (inputs, targets), error in zip(step, errors, strict=True):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            gradient = {name: p.grad.clone() for name, p in parameters.items()}
            if plan.clip_norm is not None:
                norm = sum(float((g.double() ** 2).sum()) for g in gradient.values()) ** 0.5
                if norm > plan.clip_norm:
                    gradient = {name: g * (plan.clip_norm / (norm + 1e-6)) for name, g in gradient.items()}
            compensated = {name: error[name] + gradient[name] for name in parameters}
            if plan.select_in_model is None:
                masks = {name: plan.select(name, whole) for name, whole in compensated.items()}
            else:
                masks = plan.select_in_model(compensated)
            for name, mask in masks.items():
                sent = torch.where(mask, plan.round_values(compensated[name]), 0.0)
                total[name] += sent
                sent_count[name] += int(mask.sum())
                error[name] = compensated[name] - sent
        for name, p in parameters.items():
            p.grad = total[name] / num_workers
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        squared = sum(float((e.double() ** 2).sum()) for error in errors for e in error.values())
        records.append(
            Record(
                sum(sent_count.values()) / (num_workers * elements),
                (squared / num_workers) ** 0.5,
                {name: sent_count[name] / (num_workers * p.numel()) for name, p in parameters.items()},
            )
        )
    return records
