"""Do early buckets travel while backward goes on? One step of ResNet-18 on two hosts, seen by PyTorch's profiler.

    python -m benchmarks.overlap --rate 200mbit

prints when each bucket's gather was issued and when it ended, in milliseconds from the start of backward, and how much
of its way it made while convolutions were still being differentiated. The hosts are network namespaces with shaped links.
"""

import argparse
import json
import sys

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.network_lab import NetworkLab
from lightning_sparse import HardThreshold, register_comm_hook

WARM_UP_STEPS = 5
THRESHOLD = 0.03


def profiled_step() -> dict[str, list[tuple[float, float]]]:
    """Returns the intervals, in microseconds, of backward, of its convolutions and of the gathers, of one step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torchvision.models.resnet18(num_classes=10))
    state = register_comm_hook(model, HardThreshold(THRESHOLD), exchange="gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        with record_function("backward"):
            loss.backward()
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    assert state.last_step is not None
    print(f"density {state.last_step.density:.2%}, {state.last_step.payload_bytes:,} bytes", file=sys.stderr)
    names = {"backward": "backward", "aten::convolution_backward": "convolutions", "gloo:all_gather": "gathers"}
    intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
    for event in profiler.events() or []:
        if event.name in names:
            intervals[names[event.name]].append((event.time_range.start, event.time_range.end))
    return intervals


def report(intervals: dict[str, list[tuple[float, float]]]) -> str:
    """Returns the table."""
    begin, end = intervals["backward"][0]
    last_convolution = max(stop for _, stop in intervals["convolutions"])
    lines = [
        f"backward with its hooks {(end - begin) / 1e3:.1f} ms, "
        f"its last convolution ends at {(last_convolution - begin) / 1e3:.1f} ms",
        "bucket   issued    ended   on the way   of it while convolutions went on",
    ]
    for bucket, (start, stop) in enumerate(sorted(intervals["gathers"])):
        overlapped = max(0.0, min(stop, last_convolution) - start)
        lines.append(
            f"{bucket:6d} {(start - begin) / 1e3:8.1f} {(stop - begin) / 1e3:8.1f} {(stop - start) / 1e3:9.1f} ms"
            f" {overlapped / max(stop - start, 1e-9):8.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Starts two workers and prints what the first one saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of each host's link, as tc writes it; or unshaped")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        dist.init_process_group("gloo")
        intervals = profiled_step()
        if dist.get_rank() == 0:
            print(json.dumps(intervals), flush=True)
        dist.destroy_process_group()
        return
    reason = NetworkLab.unavailable_reason()
    if reason is not None:
        sys.exit(f"{reason} For loopback: torchrun --nproc-per-node 2 -m benchmarks.overlap --worker")
    with NetworkLab(hosts=2) as lab:
        lab.shape(rate=None if arguments.rate == "unshaped" else arguments.rate)
        outputs = lab.run([sys.executable, "-m", "benchmarks.overlap", "--worker"])
    *notes, last = outputs[0].strip().splitlines()
    print(next((note for note in notes if note.startswith("density")), ""))
    print(report(json.loads(last)))


if __name__ == "__main__":
    main()
