"""Times training steps of every method in a worker of `benchmarks.step_time`.

Starts with torchrun's environment and the task as JSON. Rank 0 prints the result after the mark.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.network_lab import MARK
from lightning_sparse import (
    DriftOptions,
    HardThreshold,
    SparseModelAverager,
    SparseState,
    StepStats,
    TopK,
    register_comm_hook,
)

HARD_THRESHOLD, OVERSHOOT = "hard_threshold_", "overshoot_"
DRIFT, FLOAT8 = "drift_", "_float8"
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step; PowerSGD starts with the third
MIN_ROUNDS = 4
STEPS_PER_CORRECTION, MAX_CORRECTIONS, DENSITY_TOLERANCE = 6, 16, 0.07
LEARNING_RATE = 1e-3  # small, so that gradients and the density at a constant λ hardly change

Loss = Callable[[nn.Module, torch.Generator], Tensor]


def build_model(model: str, device: torch.device) -> tuple[nn.Module, Loss]:
    """Return an untrained model and its loss on a batch drawn from a generator."""

    def draw(high: int, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    network: nn.Module
    if model == "resnet18":
        from torchvision.models import resnet18

        network = resnet18(num_classes=10)

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            images = torch.randn(8, 3, 32, 32, generator=generator, device=device)
            return cross_entropy(module(images), draw(10, 8, generator=generator))

    elif model == "lstm":
        from recipes.lstm_wikitext2.model import WIKITEXT2_VOCABULARY_SIZE, TiedLSTM

        network = TiedLSTM()

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            words = draw(WIKITEXT2_VOCABULARY_SIZE, 31, 2, generator=generator)
            return cross_entropy(module(words[:-1])[0].flatten(0, 1), words[1:].flatten())

    elif model == "gpt":
        from recipes.gpt_wikitext.model import GPT

        network = GPT()

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            text = draw(256, 16, 65, generator=generator)
            return cross_entropy(module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    else:
        from recipes.ncf_movielens.model import ML_20M_ITEMS, ML_20M_USERS, NeuMF

        network = NeuMF(ML_20M_USERS, ML_20M_ITEMS)

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            users = draw(ML_20M_USERS, 16384, generator=generator)
            items = draw(ML_20M_ITEMS, 16384, generator=generator)
            return binary_cross_entropy_with_logits(module(users, items), draw(2, 16384, generator=generator).float())

    return network.to(device), loss


def parse_drift(method: str) -> tuple[bool, float, int]:
    """Return whether a method is local training, the density of its exchanges and the steps between them.

    ``drift_0.001_every_8`` sends as much as ``drift_0.001``, in an eighth of the exchanges. ``_float8`` at the end is
    the dtype of values.
    """
    if not method.startswith(DRIFT):
        return False, 0.0, 1
    density, _, every = method.removeprefix(DRIFT).removesuffix(FLOAT8).partition("_every_")
    return True, float(density) * int(every or 1), int(every or 1)


def target_density(method: str) -> float | None:
    """Return the density in a method's name, or None if the method needs no tuning."""
    is_drift, density, _ = parse_drift(method)
    if is_drift:
        return density
    is_threshold = method.startswith((HARD_THRESHOLD, OVERSHOOT))
    density = float(method.rpartition("_")[2]) if is_threshold else 1.0
    return density if density < 1 else None


def make_sparsifier(method: str) -> HardThreshold | TopK | None:
    """Return the sparsifier of a sparse method, with λ = 0 before tuning, or None."""
    if method.startswith((HARD_THRESHOLD, OVERSHOOT)):
        return HardThreshold(threshold=0.0, overshoot=0.75 if method.startswith(OVERSHOOT) else 0.0)
    return TopK(float(method.removeprefix("top_k_"))) if method.startswith("top_k_") else None


class Training:
    """A training with an exchange method."""

    every = 1
    """Steps between exchanges; a call of ``step`` makes as many."""

    def __init__(self, method: str, task: dict[str, Any], device: torch.device) -> None:
        self.method, self.device = method, device
        torch.manual_seed(0)
        network, self.loss = build_model(task["model"], device)
        self.module = DistributedDataParallel(network, gradient_as_bucket_view=task["bucket_view"])
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.generator = torch.Generator(device).manual_seed(1 + dist.get_rank())  # the same batches for all methods
        self.state: SparseState | None = None
        self.logged: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.collectives: list[int] = []
        self.page_faults: list[int] = []
        if sparsifier := make_sparsifier(method):
            self.state = register_comm_hook(self.module, sparsifier)
        elif method == "ddp_idle":
            self.module.register_comm_hook(None, empty_hook)
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


def set_threshold(state: SparseState | SparseModelAverager, threshold: float) -> None:
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


class Collectives:
    """Counts collectives issued from Python, to detect second rounds."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("all_gather_into_tensor", "all_reduce", "all_to_all_single"):
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return collective(*arguments, **options)

        return counted


def train(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Time steps of all methods in turn and return the results. Collective."""
    trainings = [make_training(method, task, device) for method in task["methods"]]
    for training in trainings:
        training.warm_up()
        training.logged.clear()
    collectives = Collectives()
    deadline, rounds = time.monotonic() + task["seconds"], 0
    while rounds < MIN_ROUNDS or not is_past(deadline, device):
        first = rounds % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            training.step()  # untimed, because caches hold another method's data and TCP restarts after a pause
            if training.logged:
                training.logged.pop()
            dist.barrier()
            for _ in range(task["steps"]):
                before = collectives.count, count_page_faults()
                training.seconds.append(training.step())
                training.collectives.append(collectives.count - before[0])
                training.page_faults.append(count_page_faults() - before[1])
        rounds += 1
    results = {}
    for training in trainings:
        results[training.method] = {
            "seconds": report.quartiles(gather_slowest(training.seconds, device)),
            "page_faults": statistics.median(training.page_faults),
            "loss": training.loss(getattr(training.module, "module", training.module), training.generator).item(),
        }
        if training.state is not None:
            results[training.method] |= summarise(training.logged, training.collectives)
    parameters = sum(parameter.numel() for parameter in trainings[0].module.parameters())
    return {"parameters": parameters, "rounds": rounds, "methods": results}


def summarise(logged: list[dict[str, Any]], counts: list[int]) -> dict[str, Any]:
    """Return the statistics of a sparse method over the timed steps."""
    usual = statistics.mode(counts)
    return {
        "density": report.quartiles([row["sparse/density"] for row in logged])
        | {"mean": statistics.fmean(row["sparse/density"] for row in logged)},
        "threshold": logged[-1]["sparse/threshold"],
        "error_norm": logged[-1]["sparse/error_norm"],
        "payload_bytes": report.quartiles([row["sparse/payload_bytes"] for row in logged]),
        "collectives": usual,
        "steps_with_more_collectives": sum(count > usual for count in counts),
    }


def count_page_faults() -> int:
    """Return the number of minor page faults of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def is_past(deadline: float, device: torch.device) -> bool:
    """Return whether rank 0's clock is past the deadline. Collective."""
    is_late = torch.tensor([time.monotonic() > deadline], dtype=torch.int32, device=device)
    dist.broadcast(is_late, 0)
    return bool(is_late.item())


def gather_slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Return the time of each step on the slowest worker. Collective."""
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


def run_worker(run_task: Callable[[dict[str, Any], torch.device], dict[str, Any]]) -> None:
    """Run the task in this process's first argument; rank 0 prints the result. Collective."""
    task = json.loads(sys.argv[1])
    device = torch.device("cpu")
    if task["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=task["timeout_seconds"])
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    result = run_task(task, device)
    if dist.get_rank() == 0:
        print(MARK + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # A dense baseline has no exchange of ours, which would wait for threads of Gloo (pytorch/pytorch#190489).
    time.sleep(0.1)


if __name__ == "__main__":
    run_worker(train)
