"""Measures the bytes per coordinate on the wire.

    python -m benchmarks.payload        (as root: it needs the network lab)

Two hosts exchange a bucket over Gloo with exchange="gather". The number of coordinates is constant or varies by 3 %
between steps and workers. After the forecast of the capacity has settled, each host counts the bytes that its network
interface sends, and divides them by the coordinates sent. The table shows the mean over the hosts. The bytes are

    coordinates   values and offsets: 6 bytes each in fp32, 4 in bf16 and fp16, 3 in fp8
    padding       up to 7 coordinates per message, and second rounds for values beyond the capacity
    header        counts per block and the step's numbers, 8-byte aligned: a constant size
    frames        Ethernet, IP and TCP headers, acknowledgements, and Gloo's overhead

The target applies to coordinates and padding. A lab's interface counts headers once per frame of TCP, of up to 16 kB.
Therefore all cases run again with frames of 1500 bytes, as on a cable. "less empty" subtracts the bytes of an exchange
without coordinates.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import report
from benchmarks.network_lab.lab import INTERFACE, NetworkLab, interface_bytes
from benchmarks.network_lab.workers import MARK, read_results
from lightning_sparse.exchange.exchange import Exchange
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes.reduce_scatter import slice_bounds
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.selection.statistics import FIXED_FIELDS, SLOTS
from lightning_sparse.sparsifiers.protocol import Selection

RESNET_18 = 11_173_962
TARGETS = {"float32": 6.1, "bfloat16": 4.1, "float8": 3.1}
VARIATION = 0.03
"""Relative standard deviation of the number of coordinates."""


def exchange_once(exchange: Exchange, selection: Selection, out: Tensor, wire: Wire) -> int:
    """Exchange a bucket like the communication hook and return the bytes passed to collectives. Collective."""
    header = torch.zeros(FIXED_FIELDS, dtype=torch.float64)
    header[SLOTS["selected"]] = selection.indices.numel()
    bounds = torch.tensor(slice_bounds(out.numel(), exchange.workers.num_workers))
    header[SLOTS["largest_slice"]] = torch.searchsorted(selection.indices, bounds).diff().amax()
    transfer = exchange.new_transfer(0, wire, header.numel(), out, is_last=True)
    if transfer.payload is None:
        out.zero_()
        out[selection.indices] = selection.values / transfer.divisor
    else:
        transfer.format.fill(transfer.payload, selection)
        capacity = transfer.format.capacity(transfer.payload.numel())
        transfer.overflow = lambda: Selection(selection.indices[capacity:], selection.values[capacity:])
    exchange.start(transfer, header)
    return exchange.finish()[1]


def draw_selection(num_elements: int, selected: int, seed: int) -> Selection:
    """Return exactly ``selected`` random coordinates, drawn independently for every seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_elements, (selected + selected // 4 + 64,), generator=generator).unique()
    chosen = torch.randperm(drawn.numel(), generator=generator)[:selected]
    indices = drawn[chosen.sort().values]
    assert indices.numel() == selected, "the density is too high for this way of drawing"
    return Selection(indices, torch.ones(selected))


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every case in a worker and return its bytes per step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = [(dtype, 0, 0.0) for dtype in TARGETS]
    for density in options.densities:
        selected = round(density * options.elements)
        cases += [(dtype, selected, share) for share in (0.0, VARIATION) for dtype in TARGETS]
    return [_run_case(*case, options) for case in cases]


def _run_case(dtype: str, selected: int, variation: float, options: argparse.Namespace) -> dict[str, Any]:
    wire = Wire(torch.float8_e4m3fn, 2.0**-10) if dtype == "float8" else Wire(getattr(torch, dtype))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    pool = draw_selection(options.elements, round(selected * (1 + 4 * variation)), seed=rank)
    exchange, out = Exchange("gather"), torch.empty(options.elements)
    handed_bytes: list[int] = []
    coordinates: list[int] = []
    interface_counts = [0]
    for step in range(options.warm_up + options.steps):
        draw = torch.randn(1, generator=generator).clamp_(-3.9, 3.9).item()
        count = round(selected * (1 + variation * draw))
        keep = torch.randperm(pool.indices.numel(), generator=generator)[:count].sort().values
        if step == options.warm_up:
            dist.barrier()
            interface_counts = [interface_bytes()[1]]
            dist.barrier()
        handed_bytes.append(exchange_once(exchange, Selection(pool.indices[keep], pool.values[keep]), out, wire))
        coordinates.append(count)
        if step >= options.warm_up:
            interface_counts.append(interface_bytes()[1])
    payload_format = PayloadFormat(options.elements, wire, FIXED_FIELDS)
    return {
        "dtype": dtype,
        "selected": selected,
        "variation": variation,
        "coordinate_bytes": payload_format.coordinate_bytes,
        "header_bytes": payload_format.fixed_bytes,
        "coordinates": coordinates,
        "handed_bytes": handed_bytes,
        "interface_bytes": [after - before for before, after in itertools.pairwise(interface_counts)],
    }


def mean_over_hosts(of_hosts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Return a case with the means of its counts per step."""
    columns = {
        name: zip(*(case[name] for case in of_hosts), strict=True)
        for name in ("coordinates", "handed_bytes", "interface_bytes")
    }
    return of_hosts[0] | {name: [fmean(counts) for counts in column] for name, column in columns.items()}


def summarise(case: dict[str, Any], empty: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """Return the bytes per coordinate of a case, over the steps after the warmup."""
    coordinates, handed_bytes = sum(case["coordinates"][warm_up:]), sum(case["handed_bytes"][warm_up:])
    steps, sent_bytes = len(case["interface_bytes"]), sum(case["interface_bytes"])
    header, needed = steps * case["header_bytes"], coordinates * case["coordinate_bytes"]
    return {
        **{name: case[name] for name in ("dtype", "selected", "variation", "header_bytes")},
        "interface": sent_bytes / coordinates,
        "interface_less_empty": (sent_bytes - sum(empty["interface_bytes"])) / coordinates,
        "coordinate": case["coordinate_bytes"],
        "padding": (handed_bytes - needed - header) / coordinates,
        "header": header / coordinates,
        "frames": (sent_bytes - handed_bytes) / coordinates,
        "target": TARGETS[case["dtype"]],
        "interface_bytes_of_a_step": report.quartiles(case["interface_bytes"]),
        "padding_while_settling": [
            (bytes_ - case["header_bytes"]) / count - case["coordinate_bytes"]
            for bytes_, count in zip(case["handed_bytes"][:warm_up], case["coordinates"], strict=False)
        ],
    }


def measure(options: argparse.Namespace, *, short_frames: bool) -> list[dict[str, Any]]:
    """Run all cases in a lab and return their summaries."""
    with NetworkLab(hosts=2) as lab:
        if short_frames:  # one segment per frame
            for host in range(lab.hosts):
                change = ["ip", "link", "set", "dev", INTERFACE, "gso_max_segs", "1"]
                subprocess.run(lab.on_host(host, change), check=True)
        lab.shape(rate=options.rate)
        hosts = read_results(lab.run([sys.executable, "-m", "benchmarks.payload", *sys.argv[1:], "--worker"]))
    cases = [mean_over_hosts(of_hosts) for of_hosts in zip(*hosts, strict=True)]
    empties = {case["dtype"]: case for case in cases if not case["selected"]}
    return [summarise(case, empties[case["dtype"]], options.warm_up) for case in cases if case["selected"]]


def show(cases: list[dict[str, Any]]) -> None:
    """Print the table for a length of frames."""
    rows = []
    for case in cases:
        sizes = [case[name] for name in ("interface", "interface_less_empty", "coordinate", "padding")]
        rest = [case[name] for name in ("header", "frames")]
        rows.append(
            [case["dtype"], f"{case['selected']:,}", f"{case['variation']:.0%}"]
            + [f"{size:.3f}" for size in sizes + rest]
            + [f"{case['coordinate'] + case['padding']:.3f}", f"<= {case['target']}"]
        )
    head = ["values", "k", "varies", "interface", "less empty", "coordinate", "padding", "header", "frames"]
    print(report.table([*head, "coord. + padding", "target"], rows))


def main() -> None:
    """Measure in long and short frames, print and write; or run a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=RESNET_18)
    parser.add_argument("--densities", type=float, nargs="+", default=[1e-3, 1e-2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=60, help="untimed steps at the start")
    parser.add_argument("--rate", help="rate of each link, such as 1gbit (default: unshaped)")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "payload.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(MARK + json.dumps(work(options)), flush=True)
        dist.destroy_process_group()
        return
    if reason := NetworkLab.unavailable_reason():
        parser.error(reason)
    results = {}
    for name, short_frames in (("frames_of_up_to_16_kB", False), ("frames_of_1500_bytes", True)):
        results[name] = measure(options, short_frames=short_frames)
        print(f"\nBytes per coordinate, {name.replace('_', ' ')}")
        show(results[name])
    report.write(options, results)


if __name__ == "__main__":
    main()
