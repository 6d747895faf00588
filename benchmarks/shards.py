"""Measures step time and sent bytes when replicas of a sharded model exchange sparsely.

    python -m benchmarks.shards [--rates 200mbit 1gbit] [--seconds 60]

Needs root on Linux. Two hosts of the network lab run two processes each. A host is a replica whose two ranks shard the
model with FSDP2; a link with the given rate connects the hosts. The model is the GPT recipe's, with 10 million
parameters and 2 windows of 64 bytes per rank.

    floor            FSDP2 inside each replica, without an exchange between replicas
    hsdp             torch's HSDP: reduce-scatter inside, a dense all-reduce between replicas
    sparse_ρ         ShardGradientAverager with HardThreshold, λ held to a density of ρ
    drift_ρ_every_n  SparseModelAverager: drifts every n steps (default 1), at a density of ρ

Each method has its own model with equal initial weights. The methods take turns in the same processes: each turn is an
untimed step, a barrier, then the timed steps. The time of a step is that of the slowest rank, and the table shows
medians. Bytes are those that host 0 sends over its link per step, with headers.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from benchmarks import report
from benchmarks.network_lab.lab import NetworkLab, interface_bytes
from benchmarks.network_lab.workers import MARK, read_results
from benchmarks.step_time.worker import is_past
from lightning_sparse import DriftOptions, HardThreshold, ShardGradientAverager, SparseModelAverager
from recipes.gpt_wikitext.model import GPT

FLOOR, HSDP = "floor", "hsdp"
METHODS = [FLOOR, HSDP, "sparse_0.01", "sparse_0.001", "drift_0.01", "drift_0.001", "drift_0.08_every_8"]
WARM_UP = 30
"""Untimed steps, in which λ settles."""


def build(method: str, mesh: DeviceMesh) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return a function for a training step and a function for the last step's density."""
    torch.manual_seed(0)
    model = GPT(width=320, num_layers=8, num_heads=8)
    submesh = mesh if method == HSDP else mesh["shard"]
    for layer in model.layers.layers:
        fully_shard(layer, mesh=submesh)
    fully_shard(model, mesh=submesh)
    exchange, averager = None, None
    kind, *numbers = method.split("_")
    sparsifier = HardThreshold(density=float(numbers[0]) if numbers else 1.0)
    if kind == "sparse":
        exchange = ShardGradientAverager(model, sparsifier, group=mesh["replicate"])
    elif kind == "drift":
        options = DriftOptions(every_n_steps=interval_of(method))
        averager = SparseModelAverager(model, sparsifier, options, group=mesh["replicate"])
    stateful = exchange or averager
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        tokens = torch.randint(256, (2, 65), generator=generator)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if exchange is not None:
            exchange.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if averager is not None:
            averager.step()

    def last_density() -> float:
        return 1.0 if stateful is None or stateful.last_step is None else stateful.last_step.density

    return step, last_density


def interval_of(method: str) -> int:
    """Return the number of steps between exchanges."""
    return int(method.partition("_every_")[2] or 1)


def work(seconds: float, steps: int) -> None:
    """Time all methods on a rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    methods = {method: build(method, mesh) for method in METHODS}
    for name, (step, _) in methods.items():
        for _ in range(WARM_UP * interval_of(name)):
            step()
    samples: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": [], "density": []} for name in METHODS}
    deadline, device = time.monotonic() + seconds, torch.device("cpu")
    is_late = False
    while not is_late:
        for name, (step, density) in methods.items():
            step()
            dist.barrier()
            before, sent = time.perf_counter(), interface_bytes()[1]
            timed = max(steps, interval_of(name))  # at least one exchange per turn
            for _ in range(timed):
                step()
                samples[name]["density"].append(density())
            taken = torch.tensor((time.perf_counter() - before) / timed)
            dist.barrier()
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            samples[name]["seconds"].append(float(taken))
            samples[name]["bytes"].append((interface_bytes()[1] - sent) / timed)
        is_late = is_past(deadline, device)
    if dist.get_rank() == 0:
        floor = report.quartiles(samples[FLOOR]["seconds"])["median"]
        result: dict[str, Any] = {}
        for name, numbers in samples.items():
            result[name] = {key: report.quartiles(values) for key, values in numbers.items()}
            result[name]["ratio"] = result[name]["seconds"]["median"] / floor
        print(MARK + json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of timing per rate")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per turn")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "shards.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seconds, options.steps)
        return
    if reason := NetworkLab.unavailable_reason():
        sys.exit(reason)
    command = [sys.executable, "-m", "benchmarks.shards", "--worker", f"--seconds={options.seconds}"]
    command.append(f"--steps={options.steps}")
    results = []
    with NetworkLab(2) as lab:
        for rate in options.rates:
            lab.shape(rate)
            outputs = lab.run(command, timeout=1200 + 10 * options.seconds, workers_per_host=2)
            methods = read_results(outputs[:1])[0]
            rows = [
                [
                    name,
                    f"{1e3 * result['seconds']['median']:.0f}",
                    " - ".join(f"{1e3 * quartile:.0f}" for quartile in result["seconds"]["quartiles"]),
                    f"{result['ratio']:.2f}",
                    f"{result['bytes']['median']:,.0f}",
                    f"{result['density']['median']:.3%}",
                ]
                for name, result in methods.items()
            ]
            print(f"\n2 replicas of 2 ranks, {rate}")
            print(
                report.table(["", "ms", "quartiles", "x floor", "bytes per host and step", "density"], rows), flush=True
            )
            results.append({"rate": rate, "methods": methods})
    report.write(options, results)


if __name__ == "__main__":
    main()
