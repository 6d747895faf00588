"""Measures the step time with slow workers or a lossy network, for several numbers of exchanges.

    python -m benchmarks.waiting [--hosts 2] [--rate 1gbit] [--pause 20] [--lost 0.01]

Needs root and Linux for the network lab. Runs the training steps of benchmarks.step_time (ResNet-18, 8 images of
32 x 32, one core per host) with these methods:

    floor                   no exchange
    ddp_fp32                DDP
    hard_threshold_0.001    a threshold on gradients
    drift_0.001_every_H     local training with an exchange every H steps, of equal volume

The situations are:

    even      no disturbance
    pauses    each worker independently pauses before each step, for an exponentially distributed time with a mean of
              --pause ms, like a slow read, a garbage collection or another job
    one slow  rank 0 pauses for --pause ms before every step
    lossy     the network drops a share of --lost of the frames (up to 16 kB), and TCP sends them again

A time is the mean over consecutive steps on the slowest worker. Methods take turns. The table shows medians over the
turns, and the additional time per step relative to ``even``.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.network_lab.lab import NetworkLab
from benchmarks.network_lab.workers import read_results
from benchmarks.step_time.hosts import KEEP_MEMORY
from benchmarks.step_time.training import Training, make_training
from benchmarks.step_time.worker import gather_slowest, run_worker

METHODS = ["floor", "ddp_fp32", "hard_threshold_0.001", "drift_0.001", "drift_0.001_every_8", "drift_0.001_every_30"]
STEPS = 30
"""Steps per timing, rounded up to a multiple of H."""


def add_pause(loss: Callable[..., Any], draw: Callable[[], float]) -> Callable[..., Any]:
    """Return a loss function that first pauses for a drawn number of seconds."""

    def loss_after_pause(*arguments: Any) -> Any:
        time.sleep(draw())
        return loss(*arguments)

    return loss_after_pause


def make_pause(task: dict[str, Any]) -> Callable[[], float]:
    """Return a function that draws this worker's pause before a step, in seconds."""
    rank, pause = dist.get_rank(), task["pause"] / 1e3
    if task["situation"] == "pauses":
        generator = random.Random(rank)
        return lambda: generator.expovariate(1 / pause)
    return lambda: pause if task["situation"] == "one slow" and rank == 0 else 0.0


def train(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Time the methods in turn and return the results. Collective."""
    trainings: list[Training] = []
    for method in task["methods"]:
        trainings.append(make_training(method, task, device))
        trainings[-1].warm_up()
        trainings[-1].loss = add_pause(trainings[-1].loss, make_pause(task))
    seconds: dict[str, list[float]] = {method: [] for method in task["methods"]}
    for _ in range(task["turns"]):
        for training in trainings:
            rounds = -(-STEPS // training.every)
            dist.barrier()
            started = time.perf_counter()
            for _ in range(rounds):
                training.step()
            elapsed = time.perf_counter() - started
            seconds[training.method].append(elapsed / (rounds * training.every))
    return {method: report.quartiles(gather_slowest(times, device)) for method, times in seconds.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="rate of each direction of a link")
    parser.add_argument("--pause", type=float, default=20.0, help="milliseconds of a pause")
    parser.add_argument("--lost", type=float, default=0.01, help="share of dropped frames")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "waiting.json")
    options = parser.parse_args()
    if reason := NetworkLab.unavailable_reason():
        sys.exit(reason)
    task = {"model": "resnet18", "device": "cpu", "bucket_view": False, "timeout_seconds": 300}
    task |= {"pause": options.pause, "turns": options.turns, "methods": options.methods}
    results = {}
    for situation in ("even", "pauses", "one slow", "lossy"):
        with NetworkLab(options.hosts) as lab:
            lab.shape(options.rate)
            if situation == "lossy":
                lab.lose(options.lost)
            command = [sys.executable, "-m", "benchmarks.waiting", json.dumps(task | {"situation": situation})]
            results[situation] = read_results(lab.run(command, 1800, env=KEEP_MEMORY)[:1])[0]
    rows = []
    for method in options.methods:
        medians = {situation: 1e3 * by_method[method]["median"] for situation, by_method in results.items()}
        more = [f"{median:.1f} (+{median - medians['even']:.1f})" for name, median in medians.items() if name != "even"]
        rows.append([method, f"{medians['even']:.1f}", *more])
    print(report.table(["ms per step", *results], rows))
    report.write(options, results)


if __name__ == "__main__":
    run_worker(train) if sys.argv[1:] and sys.argv[1].startswith("{") else main()
