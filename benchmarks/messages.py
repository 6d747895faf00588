"""What does a message over Gloo cost a worker that has one core and computes meanwhile?

    python -m benchmarks.messages [--rate 1gbit] [--busy]

Two workers, hosts of the network lab on one core each, send each other a message, compute some milliseconds and wait
for what the other sent. The table shows medians of the milliseconds that this takes beyond computing alone:

    ready, send     says that it is ready to receive, then sends
    send, ready     the other way round: nothing arrives while it sends
    … batch         and Gloo's threads push nobody aside (lightning_sparse.exchange.workers.let_senders_finish)

What is used: send, ready, batch up to lightning_sparse.exchange.workers.SMALL_MESSAGE_BYTES, and ready, send, batch
above. With --busy another process wants each core all the time, as one that loads data may.
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

from benchmarks.network_lab import NetworkLab
from benchmarks.report import RESULTS, table, write
from lightning_sparse.exchange.workers import GLOO_THREAD

ORDERS = ("ready, send", "send, ready")
WAYS = [f"{order}{kind}" for order in ORDERS for kind in ("", ", batch")]
ROUNDS, STEPS = 7, 25


def set_class(scheduling: int) -> None:
    """Gives all of Gloo's threads in this process a class of scheduling."""
    for folder in Path("/proc/self/task").iterdir():
        if (folder / "comm").read_bytes().strip() == GLOO_THREAD:
            os.sched_setscheduler(int(folder.name), scheduling, os.sched_param(0))


def measured(num_bytes: int) -> dict[str, float]:
    """Returns the milliseconds of a step in each way, beyond those of computing alone."""
    other = 1 - dist.get_rank()
    mine, theirs = torch.zeros(2, num_bytes, dtype=torch.uint8)
    matrix = torch.randn(400, 400)

    def step(way: str) -> None:
        works = []
        if way.startswith("ready"):
            works = [dist.irecv(theirs, other), dist.isend(mine, other)]
        elif way.startswith("send"):
            works = [dist.isend(mine, other), dist.irecv(theirs, other)]
        for _ in range(6):
            matrix @ matrix
        for work in works:
            work.wait()

    taken: dict[str, list[float]] = {way: [] for way in ["alone", *WAYS]}
    for _ in range(ROUNDS):
        for way, seconds in taken.items():
            set_class(os.SCHED_BATCH if "batch" in way else os.SCHED_OTHER)
            step(way)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step(way)
            seconds.append((time.perf_counter() - begin) / STEPS)
    alone = statistics.median(taken.pop("alone"))
    return {way: (statistics.median(seconds) - alone) * 1e3 for way, seconds in taken.items()}


def work(options: argparse.Namespace) -> None:
    """What each worker does; the first one prints what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.busy else None
    try:
        found = [measured(num_bytes) for num_bytes in options.bytes]
    finally:
        if rival is not None:
            rival.kill()
            rival.wait()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts two workers and prints what the first one found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="unshaped", help="of each host's link, as tc writes it")
    parser.add_argument("--busy", action="store_true", help="another process on each core")
    parser.add_argument("--bytes", nargs="+", type=int, default=[400, 65_536, 400_000, 4_000_000])
    parser.add_argument("--output", type=Path, help="by default messages.json or messages_busy.json of the results")
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
    found = json.loads(outputs[0].strip().splitlines()[-1])
    results = [{"bytes": size, "milliseconds": times} for size, times in zip(options.bytes, found, strict=True)]
    rows = [[f"{row['bytes']:,}", *(f"{row['milliseconds'][way]:.2f}" for way in WAYS)] for row in results]
    print(table(["bytes", *WAYS], rows))
    write(options, results)


if __name__ == "__main__":
    main()
