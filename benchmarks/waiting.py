"""What do workers lose that are not equally fast, or whose network loses frames, and how much of it do fewer exchanges?

    python -m benchmarks.waiting [--hosts 2] [--rate 1gbit] [--pause 20] [--lost 0.01]

Needs root and Linux, for hosts of the network lab. Training steps as in benchmarks.step_time (ResNet-18, 8 images of
32 x 32, one core a host), of

    floor                   no exchange at all
    ddp_fp32                DDP
    hard_threshold_0.001    gradients
    drift_0.001_every_H     local training with an exchange every H steps, of the same volume

in four situations:

    even      as it is
    pauses    each worker stops before each step, on its own, for a time drawn from an exponential distribution of mean
              --pause ms: a slow read, a garbage collection, another job
    one slow  the first worker stops for --pause ms before every step
    lossy     of the frames (up to 16 kB) that reach a host a share of --lost is dropped, and TCP sends them again

A time is the mean over so many steps in a row, on the worker that is the last to end. Methods take turns; the table
shows medians over the turns, and what a step takes longer than under ``even``.
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
from benchmarks.network_lab import NetworkLab
from benchmarks.payload import read_results
from benchmarks.step_time import KEEP_MEMORY
from benchmarks.step_time_worker import DriftTrainee, Trainee, drift_of, serve, slowest

METHODS = ["floor", "ddp_fp32", "hard_threshold_0.001", "drift_0.001", "drift_0.001_every_8", "drift_0.001_every_30"]
STEPS = 30
"""In a row, for one time; a multiple of every H, or less than one of its rounds more."""


def pausing(loss: Callable[..., Any], draw: Callable[[], float]) -> Callable[..., Any]:
    """Returns the loss with a pause of so many seconds before it."""

    def paused(*arguments: Any) -> Any:
        time.sleep(draw())
        return loss(*arguments)

    return paused


def draw_of(task: dict[str, Any]) -> Callable[[], float]:
    """What a worker pauses before a step, in seconds."""
    rank, pause = dist.get_rank(), task["pause"] / 1e3
    if task["situation"] == "pauses":
        generator = random.Random(rank)
        return lambda: generator.expovariate(1 / pause)
    return lambda: pause if task["situation"] == "one slow" and rank == 0 else 0.0


def train(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Times the methods in turn. Collective; the result is the first worker's."""
    trainees: list[Trainee] = []
    for method in task["methods"]:
        trainees.append((DriftTrainee if drift_of(method)[0] else Trainee)(method, task, device))
        trainees[-1].warm_up()
        trainees[-1].loss = pausing(trainees[-1].loss, draw_of(task))
    seconds: dict[str, list[float]] = {method: [] for method in task["methods"]}
    for _ in range(task["turns"]):
        for trainee in trainees:
            rounds = -(-STEPS // getattr(trainee, "every", 1))
            dist.barrier()
            started = time.perf_counter()
            for _ in range(rounds):
                trainee.step()
            elapsed = time.perf_counter() - started
            seconds[trainee.method].append(elapsed / (rounds * getattr(trainee, "every", 1)))
    return {method: report.quartiles(slowest(ones, device)) for method, ones in seconds.items()}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, in each direction")
    parser.add_argument("--pause", type=float, default=20.0, help="ms")
    parser.add_argument("--lost", type=float, default=0.01, help="share of frames")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "waiting.json")
    options = parser.parse_args()
    if reason := NetworkLab.unavailable_reason():
        sys.exit(reason)
    task = {"model": "resnet18", "device": "cpu", "bucket_view": False, "patience": 300}
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
        medians = {situation: 1e3 * found[method]["median"] for situation, found in results.items()}
        more = [f"{median:.1f} (+{median - medians['even']:.1f})" for name, median in medians.items() if name != "even"]
        rows.append([method, f"{medians['even']:.1f}", *more])
    print(report.table(["ms a step", *results], rows))
    report.write(options, results)


if __name__ == "__main__":
    serve(train) if sys.argv[1:] and sys.argv[1].startswith("{") else main()
