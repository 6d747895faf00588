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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.network_lab.workers import MARK
from benchmarks.step_time.training import make_training

MIN_ROUNDS = 4


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
