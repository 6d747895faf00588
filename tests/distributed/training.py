"""A small data-parallel training for the tests: one model, different data on every worker."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse
from lightning_sparse import StepStats

STEPS = 40
OPTIMIZERS = {
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003),
}


def build_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Three layers; with a bucket cap of 500 bytes the first two are larger than a bucket."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)
    ).to(dtype)


def build_batches(num_workers: int, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> list[list[Any]]:
    """``batches[step][worker]``: the workers' data differ in distribution, not only in draw."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for _ in range(steps):
        step = []
        for worker in range(num_workers):
            inputs = torch.randn(8, 24, generator=generator, dtype=torch.float64) + 0.3 * worker
            targets = torch.stack([inputs[:, 0] * (1 + worker), inputs[:, 1:5].sum(1), inputs[:, 5] ** 2], dim=1)
            step.append((inputs.to(dtype), targets.to(dtype)))
        batches.append(step)
    return batches


class Weights(torch.nn.Module):
    """A loss Σ w · x, so that the gradient of a weight w is its input x; None leaves a weight out."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        pairs = zip(self.parameters(), inputs, strict=True)
        return sum((weight * x.to(weight.dtype)).sum() for weight, x in pairs if x is not None)


@dataclass
class Result:
    """The result of a worker."""

    weights: dict[str, torch.Tensor]
    residuals: dict[str, torch.Tensor]
    steps: list[StepStats] = field(default_factory=list)
    buckets_per_step: list[int] = field(default_factory=list)


def train(
    sparsifier: lightning_sparse.Sparsifier,
    optimizer_name: str = "nesterov",
    dtype: torch.dtype = torch.float64,
    *,
    steps: int = STEPS,
    step_size: int | None = None,
    bucket_cap_mb: float = 0.0005,
    device: str = "cpu",
    **options: Any,
) -> Result:
    """Train as a worker of a process group with DDP and the hook."""
    model = DistributedDataParallel(build_model(dtype).to(device), bucket_cap_mb=bucket_cap_mb)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size, 0.5) if step_size else None
    given = lightning_sparse.GradientOptions(**options)
    state = lightning_sparse.register_comm_hook(model, sparsifier, given, per_layer_stats=True)
    assert "sparse_hook" in model._get_ddp_logging_data()["comm_hook"]
    result = Result({}, {})
    state.subscribe(result.steps.append)
    calls: list[int] = []
    receive = state.receive
    state.receive = lambda bucket: (calls.append(bucket.index()), receive(bucket))[1]
    for batches in build_batches(dist.get_world_size(), dtype, steps):
        inputs, targets = (tensor.to(device) for tensor in batches[dist.get_rank()])
        optimizer.zero_grad()
        calls.clear()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        result.buckets_per_step.append(len(calls))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    result.weights = {name: p.detach().cpu() for name, p in model.module.named_parameters()}
    result.residuals = state.residuals.state_dict()
    return result
