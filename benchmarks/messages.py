"""Measures the cost of a message over Gloo for a worker that computes on a single core.

    python -m benchmarks.messages [--rate 1gbit] [--busy]

Two workers are hosts of the network lab with one core each. They send each other a message, compute for some
milliseconds and wait for the other's message. The table shows the median milliseconds beyond computing alone:

    ready, send     posts the receive, then sends
    send, ready     sends, then posts the receive
    … batch         also gives Gloo's threads SCHED_BATCH (lightning_sparse.exchange.workers.use_batch_scheduling)

The package uses "send, ready, batch" up to lightning_sparse.exchange.workers.SMALL_MESSAGE_BYTES, and "ready, send,
batch" above. With --busy, another process competes for each core, like a data loader.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.network_lab.lab import NetworkLab
from benchmarks.network_lab.workers import MARK, read_results
from benchmarks.report import RESULTS, table, write
from lightning_sparse.exchange.workers import GLOO_THREAD

ORDERS = ("ready, send", "send, ready")
WAYS = [f"{order}{kind}" for order in ORDERS for kind in ("", ", batch")]
ROUNDS, STEPS = 7, 25


def set_scheduling_class(scheduling: int) -> None:
    """Set the scheduling class of all Gloo threads in this process."""
    for folder in Path("/proc/self/task").iterdir():
        if (folder / "comm").read_bytes().strip() == GLOO_THREAD:
            os.sched_setscheduler(int(folder.name), scheduling, os.sched_param(0))


def measure(num_bytes: int) -> dict[str, float]:
    """Return the milliseconds per step of each order, beyond computing alone."""
    other = 1 - dist.get_rank()
    sent, received = torch.zeros(2, num_bytes, dtype=torch.uint8)
    matrix = torch.randn(400, 400)

    def step(way: str) -> None:
        works = []
        if way.startswith("ready"):
            works = [dist.irecv(received, other), dist.isend(sent, other)]
        elif way.startswith("send"):
            works = [dist.isend(sent, other), dist.irecv(received, other)]
        for _ in range(6):
            matrix @ matrix
        for work in works:
            work.wait()

    taken: dict[str, list[float]] = {way: [] for way in ["alone", *WAYS]}
    for _ in range(ROUNDS):
        for way, seconds in taken.items():
            set_scheduling_class(os.SCHED_BATCH if "batch" in way else os.SCHED_OTHER)
            step(way)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step(way)
            seconds.append((time.perf_counter() - begin) / STEPS)
    alone = statistics.median(taken.pop("alone"))
    return {way: (statistics.median(seconds) - alone) * 1e3 for way, seconds in taken.items()}


def work(options: argparse.Namespace) -> None:
    """Measure in a worker; rank 0 prints the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    busy_process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.busy else None
    try:
        measured = [measure(num_bytes) for num_bytes in options.bytes]
    finally:
        if busy_process is not None:
            busy_process.kill()
            busy_process.wait()
    if dist.get_rank() == 0:
        print(MARK + json.dumps(measured), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start two workers and print rank 0's results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="unshaped", help="rate of each host's link, in tc's notation")
    parser.add_argument("--busy", action="store_true", help="run another process on each core")
    parser.add_argument("--bytes", nargs="+", type=int, default=[400, 65_536, 400_000, 4_000_000])
    parser.add_argument("--output", type=Path, help="default: messages.json or messages_busy.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    options.output = options.output or RESULTS / f"messages{'_busy' if options.busy else ''}.json"
    reason = NetworkLab.unavailable_reason()
    if reason is not None:
        sys.exit(reason)
    command = [sys.executable, "-m", "benchmarks.messages", "--worker", "--bytes", *map(str, options.bytes)]
    with NetworkLab(hosts=2) as lab:
        lab.shape(rate=None if options.rate == "unshaped" else options.rate)
        outputs = lab.run([*command, *(["--busy"] if options.busy else [])])
    measured = read_results(outputs[:1])[0]
    results = [{"bytes": size, "milliseconds": times} for size, times in zip(options.bytes, measured, strict=True)]
    rows = [[f"{row['bytes']:,}", *(f"{row['milliseconds'][way]:.2f}" for way in WAYS)] for row in results]
    print(table(["bytes", *WAYS], rows))
    write(options, results)


if __name__ == "__main__":
    main()
