"""Trains and measures in a worker of ``benchmarks.gpu_check``."""

import gc
import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import GradientOptions, HardThreshold, TopK, register_comm_hook
from lightning_sparse.exchange.exchange import Exchange

TIMEOUT, SHORT_TIMEOUT = timedelta(seconds=60), timedelta(seconds=20)
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
"""Calls in which the host waits for the device, including synchronous copies."""


@dataclass(frozen=True)
class Configuration:
    """A row of the table.

    Attributes:
        name: name of the row.
        exchange: the route; None for plain DDP.
        sparsifier: "hard threshold" or "top-k".
        precision: "32", "16-mixed" or "bf16".
        finds_unused: whether some steps skip a layer.
        per_layer: whether to record statistics per layer.
    """

    name: str
    exchange: str | None = "gather"
    sparsifier: str = "hard threshold"
    precision: str = "32"
    finds_unused: bool = False
    per_layer: bool = False


CONFIGURATIONS = (
    Configuration("DDP", None),
    Configuration("gather"),
    Configuration("dense", "dense"),
    Configuration("reduce_scatter", "reduce_scatter"),
    Configuration("auto", "auto"),
    Configuration("gather, per layer", per_layer=True),
    Configuration("gather, unused", finds_unused=True),
    Configuration("DDP, 16-mixed", None, precision="16-mixed"),
    Configuration("gather, 16-mixed", precision="16-mixed"),
    Configuration("dense, 16-mixed", "dense", precision="16-mixed"),
    Configuration("gather, bf16", precision="bf16"),
    Configuration("Top-k, gather", sparsifier="top-k"),
)


class Model(torch.nn.Module):
    """A stack of layers, any of which may be skipped."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    def forward(self, inputs: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
        """Return the output of all layers except the skipped layer."""
        for index, layer in enumerate(self.layers):
            if index != skipped:
                inputs = inputs + torch.tanh(layer(inputs))
        return inputs


def join_group(rank: int, num_workers: int, device: str, store: str, timeout: timedelta = TIMEOUT) -> torch.device:
    """Join the process group and return this worker's device."""
    torch.set_num_threads(1)
    # After a timeout, NCCL's watchdog would wait four times as long for other workers to dump their state.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    worker_device = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if device == "cuda":
        torch.cuda.set_device(worker_device)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_workers, timeout=timeout)
    Exchange.has_shortcut = False  # a single worker also selects and executes the route
    return worker_device


def leave_group() -> None:
    """Leave the group and end Gloo's threads, which could abort the process while Python exits."""
    gc.collect()  # frees modules that hold the group
    dist.destroy_process_group()


class Training:
    """A model in training."""

    def __init__(self, configuration: Configuration, device: torch.device, width: int, depth: int) -> None:
        torch.manual_seed(0)
        self.configuration, self.device, self.width, self.step_number = configuration, device, width, 0
        dtype = torch.bfloat16 if configuration.precision == "bf16" else torch.float32
        model = Model(width, depth).to(device, dtype)
        ids = [device.index] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, ids, find_unused_parameters=configuration.finds_unused)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.01, momentum=0.9)
        is_mixed = configuration.precision == "16-mixed"
        self.scaler = torch.amp.GradScaler(device.type, enabled=is_mixed and device.type == "cuda")
        self.mixed = torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16, is_mixed)
        self.state = None
        if configuration.exchange is not None:
            sparsifier = TopK(0.01) if configuration.sparsifier == "top-k" else HardThreshold(density=0.01)
            self.state = register_comm_hook(
                self.ddp,
                sparsifier,
                GradientOptions(exchange=configuration.exchange),
                grad_scaler=self.scaler,
                per_layer_stats=configuration.per_layer,
            )
        self.inputs = torch.randn(64, width, device=device, dtype=dtype)

    def step(self) -> None:
        """Make a training step."""
        self.step_number += 1
        skipped = self.step_number % len(self.ddp.module.layers) if self.configuration.finds_unused else None
        self.optimizer.zero_grad()
        with self.mixed:
            loss = self.ddp(self.inputs.roll(self.step_number + dist.get_rank(), 0), skipped).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def checksum(self) -> float:
        """Return a checksum of all weights, to compare replicas."""
        return sum(parameter.detach().double().square().sum().item() for parameter in self.ddp.parameters())


def measure_all(rank: int, num_workers: int, device: str, store: str, folder: str, options: dict[str, Any]) -> None:
    """Measure all configurations and write rank 0's results."""
    worker_device = join_group(rank, num_workers, device, store)
    rows = {configuration.name: _measure(configuration, worker_device, options) for configuration in CONFIGURATIONS}
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    leave_group()


def _measure(configuration: Configuration, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    gc.collect()  # frees the previous configuration
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    training = Training(configuration, device, options["width"], options["depth"])
    peaks, times = [], []
    for _ in range(options["steps"]):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        times.append(1e3 * (time.perf_counter() - started))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        training.step()
    events = {event.key: event.count for event in profile.key_averages()}
    checksums = [0.0] * dist.get_world_size()
    dist.all_gather_object(checksums, training.checksum())
    return {
        "milliseconds": statistics.median(times[len(times) // 2 :]),
        "launches": sum(count for name, count in events.items() if "LaunchKernel" in name),
        "operators": sum(count for name, count in events.items() if name.startswith("aten::")),
        "waits": sum(count for name, count in events.items() if name in WAITS),
        "peaks": [round(peak) for peak in peaks[:3]],
        "density": None if training.state is None else training.state.last_step.density,
        "same": len(set(checksums)) == 1,
    }


def long_run(rank: int, num_workers: int, device: str, store: str, folder: str, options: dict[str, Any]) -> None:
    """Train for many steps; rank 0 writes whether replicas have equal bits at the end."""
    worker_device = join_group(rank, num_workers, device, store)
    training = Training(Configuration("gather", "auto"), worker_device, options["width"], options["depth"])
    for _ in range(options["long_steps"]):
        training.step()
    checksums = [0.0] * num_workers
    dist.all_gather_object(checksums, training.checksum())
    if rank == 0:
        torch.save(len(set(checksums)) == 1, f"{folder}/long.pt")
    leave_group()


def lose_worker(rank: int, num_workers: int, device: str, store: str, folder: str, options: dict[str, Any]) -> None:
    """Train until the last worker exits without notice."""
    worker_device = join_group(rank, num_workers, device, store, SHORT_TIMEOUT)
    training = Training(Configuration("gather"), worker_device, options["width"], options["depth"])
    for step in range(10_000):
        if step == 5 and rank == num_workers - 1:
            Path(f"{folder}/gone").touch()
            os._exit(0)
        training.step()
