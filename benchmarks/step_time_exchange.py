"""One worker's part of `benchmarks.step_time --exchange-only`: exchanges of a drawn gradient, and their times."""

import statistics
import time
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.step_time_worker import (
    WARM_UP_STEPS,
    Loss,
    aimed_density,
    build,
    idle_hook,
    serve,
    set_threshold,
    settled_residual,
    slowest,
    sparsifier_of,
)
from lightning_sparse import SparseState, StepStats
from lightning_sparse.gradients.options import ExchangeOptions

OVERSHOOT = 0.583  # of a Gaussian random walk beyond λ, in standard deviations of a step


@dataclass(frozen=True)
class Bucket:
    """What a communication hook asks a bucket of DDP for."""

    place: int
    flat: Tensor
    layers: list[Tensor]
    last: bool

    def index(self) -> int:
        """The bucket's place in DDP's order."""
        return self.place

    def buffer(self) -> Tensor:
        """The flat gradient."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients it holds, in order."""
        return self.layers

    def is_last(self) -> bool:
        """Whether no bucket comes after it."""
        return self.last


def buckets_of(module: DistributedDataParallel, loss: Loss, generator: torch.Generator) -> list[Bucket]:
    """The buckets that DDP makes of a model once it has laid them out anew."""
    seen: list[Bucket] = []

    def look(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = torch.empty_like(bucket.buffer())
        seen.append(Bucket(bucket.index(), flat, bucket.parameters(), bucket.is_last()))
        return idle_hook(None, bucket)

    module.register_comm_hook(None, look)
    for _ in range(2):
        seen.clear()
        loss(module, generator).backward()
    return seen


def exchange_alone(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Times exchanges of a gradient of the model's size, N(0, 1), drawn anew each time. Collective."""
    network, loss = build(task["model"], device)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    module = DistributedDataParallel(network)
    buckets = buckets_of(module, loss, generator)
    names = {parameter: name for name, parameter in module.module.named_parameters()}
    states: dict[str, SparseState] = {}
    for method in task["methods"]:
        if sparsifier := sparsifier_of(method):
            states[method] = SparseState(sparsifier, ExchangeOptions(), names)
            if density := aimed_density(method):
                threshold = 1 / sqrt(density) - OVERSHOOT
                set_threshold(states[method], threshold)
                # They leave (−λ, λ) as far beyond as they overshoot, on average.
                reach = threshold + OVERSHOOT
                residuals = {name: settled_residual(layer.numel(), reach, generator) for layer, name in names.items()}
                states[method].residuals.load_state_dict(residuals)

    def exchange(method: str) -> float:
        for bucket in buckets:
            bucket.flat.normal_(generator=generator)
        dist.barrier()
        started = time.perf_counter()
        futures: list[torch.futures.Future[Tensor]] = []
        for bucket in buckets:
            if method in states:
                futures.append(states[method].receive(bucket))  # type: ignore[arg-type]
            else:
                futures.append((bf16_compress_hook if method == "ddp_bf16" else allreduce_hook)(None, bucket))
        for future in futures:
            future.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {method: [] for method in task["methods"]}
    stats: dict[str, list[StepStats]] = {method: [] for method in states}
    for repetition in range(task["repetitions"] + WARM_UP_STEPS):
        for method in task["methods"]:
            taken = exchange(method)
            if repetition >= WARM_UP_STEPS:
                seconds[method].append(taken)
                if method in states and (last := states[method].last_step) is not None:
                    stats[method].append(last)
    found: dict[str, Any] = {
        method: {"seconds": report.quartiles(slowest(times, device))} for method, times in seconds.items()
    }
    for method, steps in stats.items():
        found[method]["density"] = {"mean": statistics.fmean(step.density for step in steps)}
        found[method]["payload_bytes"] = report.quartiles([step.payload_bytes for step in steps])
    return {"parameters": sum(bucket.flat.numel() for bucket in buckets), "buckets": len(buckets), "methods": found}


if __name__ == "__main__":
    serve(exchange_alone)
