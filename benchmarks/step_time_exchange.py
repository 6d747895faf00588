"""Times exchanges of a random gradient in a worker of `benchmarks.step_time --exchange-only`."""

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
    build_model,
    draw_residual,
    empty_hook,
    gather_slowest,
    make_sparsifier,
    run_worker,
    set_threshold,
    target_density,
)
from lightning_sparse import SparseState, StepStats
from lightning_sparse.engine.options import GradientOptions

OVERSHOOT = 0.583  # mean excess of a Gaussian random walk over λ, in standard deviations of a step


@dataclass(frozen=True)
class Bucket:
    """The part of DDP's GradBucket that a communication hook uses."""

    position: int
    flat: Tensor
    layers: list[Tensor]
    last: bool

    def index(self) -> int:
        """Return the bucket's position in DDP's order."""
        return self.position

    def buffer(self) -> Tensor:
        """Return the flat gradient."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the bucket's gradients, in order."""
        return self.layers

    def is_last(self) -> bool:
        """Return whether this is the last bucket."""
        return self.last


def record_buckets(module: DistributedDataParallel, loss: Loss, generator: torch.Generator) -> list[Bucket]:
    """Return a model's buckets after DDP has rebuilt them."""
    seen: list[Bucket] = []

    def record(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = torch.empty_like(bucket.buffer())
        seen.append(Bucket(bucket.index(), flat, bucket.parameters(), bucket.is_last()))
        return empty_hook(None, bucket)

    module.register_comm_hook(None, record)
    for _ in range(2):
        seen.clear()
        loss(module, generator).backward()
    return seen


def time_exchanges(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Time exchanges of new random gradients, N(0, 1), of the model's size. Collective."""
    network, loss = build_model(task["model"], device)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    module = DistributedDataParallel(network)
    buckets = record_buckets(module, loss, generator)
    names = {parameter: name for name, parameter in module.module.named_parameters()}
    states: dict[str, SparseState] = {}
    for method in task["methods"]:
        if sparsifier := make_sparsifier(method):
            states[method] = SparseState(sparsifier, GradientOptions(), names)
            if density := target_density(method):
                threshold = 1 / sqrt(density) - OVERSHOOT
                set_threshold(states[method], threshold)
                # Residuals leave (−λ, λ) by the overshoot, on average.
                spread = threshold + OVERSHOOT
                residuals = {name: draw_residual(layer.numel(), spread, generator) for layer, name in names.items()}
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
    results: dict[str, Any] = {
        method: {"seconds": report.quartiles(gather_slowest(times, device))} for method, times in seconds.items()
    }
    for method, steps in stats.items():
        results[method]["density"] = {"mean": statistics.fmean(step.density for step in steps)}
        results[method]["payload_bytes"] = report.quartiles([step.payload_bytes for step in steps])
    return {"parameters": sum(bucket.flat.numel() for bucket in buckets), "buckets": len(buckets), "methods": results}


if __name__ == "__main__":
    run_worker(time_exchanges)
