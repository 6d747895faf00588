"""A training of every method, whose λ is tuned to a density before the timing."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import inf, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_time.methods import FLOAT8, make_sparsifier, parse_drift, target_density
from benchmarks.step_time.models import build_model
from lightning_sparse import (
    DDPGradientAverager,
    DriftOptions,
    HardThreshold,
    SparseModelAverager,
    StepStats,
    register_comm_hook,
)
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.kernels.native import Task, pointer, take_out
from lightning_sparse.strategies.ddp import SINGLE_BUCKET_BYTES

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step; PowerSGD starts with the third
STEPS_PER_CORRECTION, MAX_CORRECTIONS, DENSITY_TOLERANCE = 6, 16, 0.07
LEARNING_RATE = 1e-3  # small, so that gradients and the density at a constant λ hardly change


class Training:
    """A training with an exchange method."""

    every = 1
    """Steps between exchanges; a call of ``step`` makes as many."""

    def __init__(self, method: str, task: dict[str, Any], device: torch.device) -> None:
        self.method, self.device = method, device
        torch.manual_seed(0)
        network, self.loss = build_model(task["model"], device)
        is_small = sum(parameter.nbytes for parameter in network.parameters()) <= SINGLE_BUCKET_BYTES
        cap = 25 if is_small else None  # as the strategies do
        self.module = DistributedDataParallel(network, gradient_as_bucket_view=task["bucket_view"], bucket_cap_mb=cap)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.generator = torch.Generator(device).manual_seed(1 + dist.get_rank())  # the same batches for all methods
        self.state: DDPGradientAverager | None = None
        self.logged: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.collectives: list[int] = []
        self.page_faults: list[int] = []
        if sparsifier := make_sparsifier(method):
            self.state = register_comm_hook(self.module, sparsifier)
        elif method == "ddp_idle":
            self.module.register_comm_hook(None, empty_hook)
        elif method == "ddp_message":
            workers = Workers(None, dist.get_rank(), dist.get_world_size())
            self.module.register_comm_hook(workers, message_hook)
        elif method == "ddp_pass":
            self.module.register_comm_hook({}, pass_hook)
        elif method == "ddp_hook":
            self.module.register_comm_hook(None, allreduce_hook)
        elif method == "ddp_bf16":
            self.module.register_comm_hook(None, bf16_compress_hook)
        elif method == "powersgd_4":
            power_sgd = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.module.register_comm_hook(power_sgd, powerSGD_hook)

    def step(self) -> float:
        """Make and log a training step; return its seconds."""
        started = time.perf_counter()
        with self.module.no_sync() if self.method == "floor" else nullcontext():
            self.loss(self.module, self.generator).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.log(None if self.state is None else self.state.last_step)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def log(self, stats: StepStats | None) -> None:
        """Record the values that a logger would record."""
        if stats is not None:
            names = ("density", "error_norm", "threshold", "payload_bytes")
            self.logged.append({f"sparse/{name}": getattr(stats, name) for name in names})

    def warm_up(self) -> None:
        """Make the first steps and tune a hard threshold to its density. Collective."""
        density = target_density(self.method)
        if density is not None:
            self._guess_threshold(density)
        for _ in range(WARM_UP_STEPS):
            self.step()
        if density is None:
            return
        for _ in range(MAX_CORRECTIONS):
            self.logged.clear()
            for _ in range(STEPS_PER_CORRECTION):
                self.step()
            # Density is about E‖g‖² / (λ² d). It is equal on all workers, and so is the new λ.
            excess = max(self._mean("sparse/density") / density, 0.1)
            if abs(excess - 1) < DENSITY_TOLERANCE:
                return
            self._change_threshold(sqrt(excess))

    def _guess_threshold(self, density: float) -> None:
        """Set λ = sqrt(E‖g‖² / (density · d)), and residuals as after many steps. Collective."""
        assert self.state is not None
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        threshold = sqrt(self.squared_gradient_norm(self.module.no_sync) / (density * elements))
        set_threshold(self.state, threshold)
        layers = self.module.module.named_parameters()
        residuals = {name: draw_residual(layer.numel(), threshold, self.generator) for name, layer in layers}
        self.state.residuals.load_state_dict(residuals)

    def squared_gradient_norm(self, without_exchange: Callable[[], Any]) -> float:
        """Return E‖g‖², estimated from a few batches of every worker. Collective."""
        squared_norms = torch.zeros(8, dtype=torch.float64)
        for index in range(8):
            with without_exchange():
                self.loss(self.module, self.generator).backward()
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
            squared_norms[index] = sum(gradient.double().square().sum().item() for gradient in gradients)
            self.optimizer.zero_grad()
        mean = squared_norms.mean().to(self.device)
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def _change_threshold(self, factor: float) -> None:
        assert self.state is not None
        set_threshold(self.state, factor * self.state.sparsifier.current_threshold)
        residuals = self.state.residuals.state_dict()
        self.state.residuals.load_state_dict({name: residual.mul_(factor) for name, residual in residuals.items()})

    def _mean(self, name: str) -> float:
        return statistics.fmean(float(row[name]) for row in self.logged)


class LocalTraining(Training):
    """A local training; the time of a step is the mean over the steps between exchanges."""

    def __init__(self, method: str, task: dict[str, Any], device: torch.device) -> None:
        self.method, self.device = method, device
        torch.manual_seed(0)
        self.module, self.loss = build_model(task["model"], device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        _, _, self.every = parse_drift(method)
        is_float8 = method.endswith(FLOAT8)  # needs a λ above 0, also before tuning
        options = DriftOptions(every_n_steps=self.every, value_dtype="float8" if is_float8 else "float32")
        self.state = SparseModelAverager(self.module, HardThreshold(threshold=float(is_float8)), options)
        self.logged = []
        self.seconds, self.collectives, self.page_faults = [], [], []

    def step(self) -> float:
        """Make the steps up to the next exchange; return the mean seconds per step."""
        started = time.perf_counter()
        for _ in range(self.every):
            self.loss(self.module, self.generator).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.step()
        self.log(self.state.last_step)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / self.every

    def _guess_threshold(self, density: float) -> None:
        mean = self.squared_gradient_norm(nullcontext) * LEARNING_RATE**2 * self.every
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        threshold = sqrt(mean / (density * elements))
        set_threshold(self.state, threshold)
        with torch.no_grad():
            for parameter in self.module.parameters():
                drift = draw_residual(parameter.numel(), threshold, self.generator)
                parameter.sub_(drift.view(parameter.shape))

    def _change_threshold(self, factor: float) -> None:
        set_threshold(self.state, factor * self.state.sparsifier.current_threshold)
        with torch.no_grad():
            for parameter, anchor in zip(self.module.parameters(), self.state.anchor().values(), strict=True):
                parameter.copy_(anchor - factor * (anchor - parameter))


def make_training(method: str, task: dict[str, Any], device: torch.device) -> Training:
    """Return a training with a method's exchange."""
    return (LocalTraining if parse_drift(method)[0] else Training)(method, task, device)


def empty_hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the gradient unchanged, to measure DDP without an exchange."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def message_hook(workers: Workers, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Exchange 8 bytes at the end of a backward, to measure the cost of a message and of waiting for each other."""
    if bucket.is_last():
        part = torch.zeros(8, dtype=torch.uint8, device=bucket.buffer().device)
        workers.all_gather(part.new_empty(8 * workers.num_workers), part).wait()
    return empty_hook(None, bucket)


def pass_hook(residuals: dict[int, Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Pass once over gradient and residual, as a threshold that nothing reaches, and exchange 8 bytes at the end."""
    gradient = bucket.buffer()
    if residuals.get(bucket.index(), gradient[:0]).numel() != gradient.numel():
        residuals[bucket.index()] = torch.zeros_like(gradient)
    residual = pointer(residuals[bucket.index()])
    ends = torch.empty(-(-gradient.numel() // BLOCK_ELEMENTS), dtype=torch.int32)
    task = Task(before=residual, after=residual, gradient=pointer(gradient), ends=pointer(ends), clears=True)
    task.scale = task.divisor = task.loss_scale = 1.0
    take_out(task, inf, 0, gradient.numel())
    return message_hook(Workers(None, dist.get_rank(), dist.get_world_size()), bucket)


def set_threshold(state: DDPGradientAverager | SparseModelAverager, threshold: float) -> None:
    """Set λ on this worker; every rank must call this in the same step."""
    assert isinstance(state.sparsifier, HardThreshold)
    state.sparsifier.fix_threshold(threshold)


def draw_residual(num_elements: int, threshold: float, generator: torch.Generator) -> Tensor:
    """Return residuals with the distribution after many steps, triangular on (−λ, λ).

    This is the distribution of a random walk of small steps that restarts at 0 when it leaves (−λ, λ). Residuals of 0
    would need 1/density steps to reach it.
    """
    drawn = torch.rand(2, num_elements, generator=generator, device=generator.device).mul_(threshold)
    return drawn[0] - drawn[1]
