"""Predicts bytes and time of each exchange mode for growing numbers of workers.

    python -m benchmarks.scaling [--densities 0.001 0.01] [--bandwidth 10] [--latency 50]
    python -m benchmarks.scaling --check        (as root: it needs the network lab)

For n = 2 … 1,024 workers, prints the bytes that a worker receives and the predicted time for a bucket in every mode. A
star marks the mode that exchange="auto" chooses.

Volumes follow `lightning_sparse.exchange.routes.cost_model.Costs`, for workers that select independent random
coordinates. If workers select equal coordinates, sums are sparser than predicted. Volumes include separately gathered
headers and sizes. Time is latency x rounds + bytes / bandwidth, of which TCP gets 95.6 %:

    mode            consecutive rounds
    gather          1                                     messages of all pairs at once, including headers
    dense           2(n-1) + 1                            a ring all-reduce; headers
    reduce_scatter  4                                     coordinates, headers, sizes, sums: messages of all pairs

NCCL gathers in rings of n-1 rounds of a few µs each.

Every worker has a link with this bandwidth in each direction. The prediction ignores selection, packing and overlap
with backward.

With --shards S, the S ranks of a node share a sharded model. Each rank exchanges its shard, an S-th of the elements,
with the corresponding ranks of other nodes, and has an S-th of the node's bandwidth. Bytes are then per node.

The check runs the modes among 2, 4 and 8 hosts and compares bytes at the interface and seconds with the prediction.
Every worker is a host. The measured bytes include Ethernet, IP and TCP headers, once per frame of up to 16 kB; the
prediction does not. The workers share this machine's cores, which dominate times below about 100 ms.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.network_lab.lab import NetworkLab, interface_bytes
from benchmarks.network_lab.namespaces import UNITS
from benchmarks.network_lab.workers import MARK, read_results
from benchmarks.payload import RESNET_18, draw_selection, exchange_once
from lightning_sparse.exchange.exchange import Exchange
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes.cost_model import Costs, speeds
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.selection.statistics import FIXED_FIELDS

WORKERS = [2**power for power in range(1, 11)]
FLOAT = Wire(torch.float32)
CHECK_WORKERS, CHECK_STEPS = (2, 4, 8), 3
CHECK_ELEMENTS, CHECK_RATE = 4_000_000, "100mbit"
"""A slow link, so that the network dominates and not the cores."""
MODES = ("gather", "reduce_scatter", "dense")
HEADER_BYTES, SIZE_BYTES, FLOAT_BYTES = 8 * FIXED_FIELDS, 8, 4
TCP_SHARE = 1448 / 1514
"""Share of a frame without Ethernet, IP and TCP headers."""


class Traffic(NamedTuple):
    """Bytes into a worker and rounds of a mode."""

    num_bytes: float
    rounds: int


class Network(NamedTuple):
    """A worker's link: bytes per second, and seconds of latency."""

    bandwidth: float
    latency: float

    def seconds(self, traffic: Traffic) -> float:
        """Return the predicted time of a mode."""
        return traffic.rounds * self.latency + traffic.num_bytes / self.bandwidth


def estimate_largest(mean: float, candidates: int) -> float:
    """Return the mean plus sqrt(2 ln candidates) deviations, the likely largest of rare independent counts."""
    return mean + math.sqrt(2 * mean * math.log(max(candidates, 1)))


def bucket_costs(num_workers: int, num_elements: int) -> Costs:
    """Return the package's costs of a bucket of float32 elements."""
    fixed_bytes = PayloadFormat(num_elements, FLOAT).fixed_bytes
    return Costs(num_workers, num_elements, FLOAT_BYTES, FLOAT_BYTES, fixed_bytes)


def predict_traffic(costs: Costs, selected: float) -> dict[str, Traffic]:
    """Return the traffic of each mode."""
    n = costs.num_workers
    headers, sizes = (n - 1) * HEADER_BYTES, (n - 1) * SIZE_BYTES
    received = costs.received_bytes(selected, estimate_largest_slice(selected, n))
    return {
        "gather": Traffic(received["gather"] + headers, 1),
        "reduce_scatter": Traffic(received["reduce_scatter"] + headers + sizes, 4),
        "dense": Traffic(received["dense"] + headers, 2 * (n - 1) + 1),
    }


def estimate_largest_slice(selected: float, num_workers: int) -> float:
    """Return the likely largest count of any worker in any slice."""
    return min(estimate_largest(selected / num_workers, num_workers**2), selected)


def simulate(density: float, network: Network, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the predictions for all numbers of workers at a density."""
    receiver = f"a node with {options.shards} shards" if options.shards > 1 else "a worker"
    print(f"\nDensity {density:.3%}: MB into {receiver}, and ms")
    rows, lines, selected = [], [], density * options.elements
    for n in WORKERS:
        costs = bucket_costs(n, options.elements)
        traffic = predict_traffic(costs, selected)
        seconds = {mode: network.seconds(needed) for mode, needed in traffic.items()}
        chosen = costs.cheapest(selected, estimate_largest_slice(selected, n), speeds(options.bandwidth, on_gpu=False))
        fastest = min(traffic, key=lambda mode: seconds[mode])
        cells = [str(n)]
        for mode, needed in traffic.items():
            cells.append(f"{options.shards * needed.num_bytes / 1e6:,.2f}")
            cells.append(f"{1e3 * seconds[mode]:,.1f}{'*' if mode == chosen else ' '}")
        gain = seconds[chosen] / seconds[fastest]
        lines.append([*cells, f"{fastest} takes 1/{gain:.2f}" if gain > 1.005 else ""])
        modes = {mode: {**needed._asdict(), "seconds": seconds[mode]} for mode, needed in traffic.items()}
        rows.append({"workers": n, "density": density, "taken": chosen, "fastest_of_auto": fastest, "modes": modes})
    head = [cell for mode in MODES for cell in (mode, "ms ")]
    print(report.table(["workers" if options.shards == 1 else "nodes", *head, ""], lines))
    return rows


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run all modes and densities in a worker; return received bytes and seconds of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    out = torch.empty(CHECK_ELEMENTS)
    results = {}
    for density in options.densities:
        selection = draw_selection(CHECK_ELEMENTS, round(density * CHECK_ELEMENTS), seed=rank)
        for mode in MODES:
            exchange = Exchange(mode)
            # The capacities of the sparse modes take some steps to settle.
            for _ in range(40 if mode in ("gather", "reduce_scatter") else 1):
                exchange_once(exchange, selection, out, FLOAT)
            dist.barrier()
            before, times = interface_bytes()[0], []
            dist.barrier()  # no worker sends before all have read their counters
            for _ in range(CHECK_STEPS):
                started = time.perf_counter()
                exchange_once(exchange, selection, out, FLOAT)
                times.append(time.perf_counter() - started)
            received = (interface_bytes()[0] - before) / CHECK_STEPS
            results[f"{mode} {density}"] = {"bytes": received, "seconds": times}
    return results


def check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all modes among 2, 4 and 8 hosts; print and return measurements and predictions."""
    rate = float(CHECK_RATE[:-4]) * UNITS[CHECK_RATE[-4]] / 8 * TCP_SHARE
    network = Network(rate, options.latency / 1e6)
    rows, lines = [], []
    for n in CHECK_WORKERS:
        with NetworkLab(hosts=n) as lab:
            lab.shape(rate=CHECK_RATE)
            workers = read_results(lab.run([sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:], "--worker"]))
        for density in options.densities:
            costs = bucket_costs(n, CHECK_ELEMENTS)
            for mode, traffic in predict_traffic(costs, density * CHECK_ELEMENTS).items():
                cases = [worker[f"{mode} {density}"] for worker in workers]
                steps = [max(step) for step in zip(*(case["seconds"] for case in cases), strict=True)]
                bytes_ = statistics.mean(case["bytes"] for case in cases), traffic.num_bytes
                seconds = statistics.median(steps), network.seconds(traffic)
                row = {"mode": mode, "workers": n, "density": density, "bytes": bytes_[0], "predicted_bytes": bytes_[1]}
                row |= {"seconds": report.quartiles(steps), "predicted_seconds": seconds[1]}
                rows.append(row)
                cells = [mode, n, f"{density:.3%}"]
                for unit, (measured, predicted) in ((1e6, bytes_), (1e-3, seconds)):
                    cells += [f"{measured / unit:,.3f}", f"{predicted / unit:,.3f}", f"{measured / predicted - 1:+.1%}"]
                lines.append(cells)
    print(f"\nMeasured at {CHECK_RATE} with {CHECK_ELEMENTS:,} elements")
    print(report.table(["mode", "workers", "density", "MB", "predicted", "", "ms", "predicted", ""], lines))
    return rows


def main() -> None:
    """Print and write predictions, and measurements with --check; or run a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=RESNET_18)
    parser.add_argument("--densities", type=float, nargs="+", default=[1e-3, 1e-2])
    parser.add_argument("--bandwidth", type=float, default=10.0, help="Gbit/s of a worker's link")
    parser.add_argument("--latency", type=float, default=50.0, help="microseconds between workers")
    parser.add_argument("--shards", type=int, default=1, metavar="S", help="ranks of a node that share a sharded model")
    parser.add_argument("--check", action="store_true", help="also measure among 2, 4 and 8 hosts")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "scaling.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(MARK + json.dumps(work(options)), flush=True)
        dist.destroy_process_group()
        return
    if options.check and (reason := NetworkLab.unavailable_reason()):
        parser.error(reason)
    options.elements, options.bandwidth = -(-options.elements // options.shards), options.bandwidth / options.shards
    unit = 1e9 / 8 * TCP_SHARE  # bytes per second of 1 Gbit/s
    network = Network(options.bandwidth * unit, options.latency / 1e6)
    results = {"predicted": [row for density in options.densities for row in simulate(density, network, options)]}
    if options.check:
        results["checked"] = check(options)
    report.write(options, results)


if __name__ == "__main__":
    main()
