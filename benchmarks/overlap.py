"""Measures whether early buckets are sent during backward, in a step of ResNet-18 on two hosts.

    python -m benchmarks.overlap --rate 200mbit

Prints the time at which each bucket is sent, from the start of backward, and the number of convolutions that backward
has not reached yet. Also prints the bytes that leave the interface before the last convolution ends. The hosts are
network namespaces with shaped links.
"""

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.network_lab.lab import NetworkLab, interface_bytes
from benchmarks.network_lab.workers import MARK, read_results
from lightning_sparse import GradientOptions, HardThreshold, register_comm_hook

WARM_UP_STEPS = 5
THRESHOLD = 0.03


def profile_step() -> dict[str, Any]:
    """Return the time ranges of backward and its parts in a step, in microseconds, and byte counts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torchvision.models.resnet18(num_classes=10))
    state = register_comm_hook(model, HardThreshold(threshold=THRESHOLD), GradientOptions(exchange="gather"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    sent: list[int] = []
    # Backward reaches the first convolution last.
    model.module.conv1.weight.register_hook(lambda _: sent.append(interface_bytes()[1]))

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        sent.clear()
        sent.append(interface_bytes()[1])
        with record_function("backward"):
            loss.backward()
        sent.append(interface_bytes()[1])
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    assert state.last_step is not None
    kinds = {"backward": "backward", "aten::convolution_backward": "convolutions", "c10d::send": "sends"}
    profiled: dict[str, Any] = {kind: [] for kind in kinds.values()}
    for event in profiler.events() or []:
        if event.name in kinds:
            profiled[kinds[event.name]].append((event.time_range.start, event.time_range.end))
    return profiled | {"bytes": sent, "density": state.last_step.density, "payload": state.last_step.payload_bytes}


def format_report(profiled: dict[str, Any]) -> str:
    """Return the table."""
    begin, end = profiled["backward"][0]
    convolutions = sorted(profiled["convolutions"])
    last = convolutions[-1][1]
    before, during, after = profiled["bytes"]
    lines = [
        f"density {profiled['density']:.2%}, payloads of {profiled['payload']:,} bytes",
        f"backward with the exchange {(end - begin) / 1e3:.1f} ms; the last of its {len(convolutions)} convolutions "
        f"ends at {(last - begin) / 1e3:.1f} ms",
        "bucket       sent at   convolutions to come",
    ]
    for bucket, (start, _) in enumerate(sorted(profiled["sends"])):
        remaining = sum(first > start for first, _ in convolutions)
        lines.append(f"{bucket:6d} {(start - begin) / 1e3:10.1f} ms {remaining:22d}")
    lines.append(
        f"bytes sent before the last convolution ends: {during - before:,} of {after - before:,} "
        f"({(during - before) / (after - before):.0%})"
    )
    return "\n".join(lines)


def main() -> None:
    """Start two workers and print rank 0's report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="rate of each host's link, in tc's notation, or unshaped")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        dist.init_process_group("gloo")
        profiled = profile_step()
        if dist.get_rank() == 0:
            print(MARK + json.dumps(profiled), flush=True)
        dist.destroy_process_group()
        return
    reason = NetworkLab.unavailable_reason()
    if reason is not None:
        sys.exit(reason)
    with NetworkLab(hosts=2) as lab:
        lab.shape(rate=None if arguments.rate == "unshaped" else arguments.rate)
        outputs = lab.run([sys.executable, "-m", "benchmarks.overlap", "--worker"])
    print(format_report(read_results(outputs[:1])[0]))


if __name__ == "__main__":
    main()
