"""How long does it take to add a gradient to the residual, take out what is sent and clear it?

    python -m benchmarks.selection [--device cuda]

On a CPU one core works, and every time is compared with the floor: `torch.add(out=)` of the same size, which reads two
vectors and writes one. On a GPU it is compared with what the bytes that must be moved take at the measured rate of a
copy. The ways are timed in turn within one run; before each, outside the time, the residual is put back, so that every
repetition finds the same coordinates at or above λ.

    take_out         p = e + g, select into a payload, keep the rest, ‖e'‖² (compiled functions; Triton's kernels)
    take_out_masked  the same into a dense tensor with zeros between, for the dense route
    plain            compensate, HardThreshold.select, keep_rest: the same step without kept buffers
    topk             abs().topk(k) of p alone, with the k that the threshold selects; it neither adds nor clears

and beside them what a receiver does:

    average          two payloads of that density added to zeros and divided

Selected coordinates lie at random places; in gradients they lie closer together. Page faults count fresh memory: one
per page of 4 KiB.
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from lightning_sparse.exchange import Buffers
from lightning_sparse.exchange.payload import PayloadFormat, aligned
from lightning_sparse.exchange.routes import adding
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import is_available
from lightning_sparse.selection.bucket import FlatBucket, Residual, compensate, keep_rest
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.sparsifiers import HardThreshold, LayerLayout

RESNET_18 = 11_173_962
THRESHOLD = 1.0
SLEEP_CYCLES = 2_000_000
"""A millisecond of a GPU."""
CPU_TARGETS = {"take_out": "<= 1.4", "take_out_masked": "<= 2.2", "topk": ">= 10 x take_out"}
GPU_TARGETS = {"take_out": "<= 1.5", "take_out_masked": "<= 1.5"}

Way = Callable[[Tensor], object]
"""One way of selecting, applied to the residual."""


def bucket(num_elements: int, density: float, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """A residual, a gradient and the number of coordinates at which their sum reaches the threshold.

    The sum is uniform in (−λ, λ), and a little above λ at random places. Such is a residual between steps.
    """
    generator = torch.Generator(device).manual_seed(0)
    like = {"generator": generator, "device": device}
    compensated = torch.rand(num_elements, **like).mul_(1.998 * THRESHOLD).sub_(0.999 * THRESHOLD)
    places = (torch.rand(num_elements, **like) < density).nonzero().squeeze(1)
    above = THRESHOLD * (1.001 + 0.1 * torch.rand(places.numel(), **like))
    compensated[places] = above.copysign(compensated[places])
    gradient = torch.randn(num_elements, **like).mul_(0.01 * THRESHOLD)
    return compensated.sub_(gradient), gradient, places.numel()


class Shipment:
    """What a way fills: a payload, or without one a dense tensor."""

    def __init__(self, payload_format: PayloadFormat, out: Tensor, payload: Tensor | None) -> None:
        self.format, self.out, self.payload = payload_format, out, payload
        self.is_cleared, self.divisor = False, 2
        self.rest: Any = None


def ways(start: Tensor, gradient: Tensor, selected: int) -> dict[str, tuple[Way, float]]:
    """Each way of selecting and the bytes that it cannot but move."""
    size = gradient.numel()
    layout = LayerLayout(("weight",), (size,))
    sparsifier = HardThreshold(threshold=THRESHOLD)
    out = torch.empty_like(gradient)
    compensated = torch.empty_like(gradient)
    wire = Wire(torch.float32)
    payload_format = PayloadFormat(size, wire)

    new_residual = torch.empty_like(gradient)

    def flat(residual: Tensor) -> FlatBucket:
        return FlatBucket(0, layout, gradient, Residual(residual, new_residual), is_last=True)

    def plain(residual: Tensor) -> None:
        selected = sparsifier.select(compensate(Residual(residual, residual), gradient), layout)
        keep_rest(residual, selected, wire)

    def topk(residual: Tensor) -> Tensor:
        return residual.abs().topk(selected, sorted=False).indices

    extraction = Extraction(sparsifier, num_slices=0, per_layer=False, keeps_rest=True)
    payload = torch.zeros(payload_format.payload_bytes(aligned(selected)), dtype=torch.uint8, device=gradient.device)

    def into(shipment: Shipment) -> Way:
        return lambda residual: extraction.fill(flat(residual), shipment)

    def average(residual: Tensor) -> None:
        adding.average(payload_format, rows, sums.zero_(), space)

    space, sums = Buffers(), torch.empty(size, device=gradient.device)
    found: dict[str, tuple[Way, float]] = {"take_out": (into(Shipment(payload_format, out, payload)), 12 * size)}
    masked = into(Shipment(payload_format, out, None)), 16 * size
    extraction.fill(flat(compensated.copy_(start)), Shipment(payload_format, out, payload))
    rows = payload.repeat(2, 1)
    found["average"] = average, 4 * size
    if gradient.device.type == "cpu":
        found["floor"] = (lambda residual: torch.add(residual, gradient, out=compensated)), 12 * size
    else:
        found["floor"] = compensated.copy_, 8 * size
    # Beyond the vectors themselves: a coordinate is written once into a payload.
    found["take_out"] = found["take_out"][0], 12 * size + selected * payload_format.coordinate_bytes
    return {**found, "take_out_masked": masked, "plain": (plain, 12 * size), "topk": (topk, 4 * size)}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the work takes; on a GPU by the GPU's own clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # so that the host is ahead, and no time of it counts that a step would hide
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(density: float, options: argparse.Namespace) -> dict[str, Any]:
    """Times all ways in turn at one density."""
    device = torch.device(options.device)
    start, gradient, selected = bucket(options.elements, density, device)
    candidates = ways(start, gradient, selected)
    residual = start.clone()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    faults: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    own_seconds = 0.0
    for repetition in range(options.warm_up + options.repetitions):
        turn = repetition % len(names)  # nobody always comes after the same one, whose leavings are in the cache
        for name in names[turn:] + names[:turn]:
            residual.copy_(start)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            own_before = time.process_time()
            duration = seconds(lambda name=name: candidates[name][0](residual), device)
            if repetition >= options.warm_up:
                own_seconds += time.process_time() - own_before
                times[name].append(duration)
                faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    medians = {name: report.quartiles(times[name])["median"] for name in names}
    rate = candidates["floor"][1] / medians["floor"]
    floors = {
        name: medians["floor"] if device.type == "cpu" else needed / rate for name, (_, needed) in candidates.items()
    }
    return {
        "density": density,
        "selected": selected,
        "floor_bytes_per_second": rate,
        "core_share": own_seconds / sum(sum(some) for some in times.values()),
        "ways": {
            name: {
                "seconds": report.quartiles(times[name]),
                "ratio_to_floor": medians[name] / floors[name],
                "ratio_to_take_out": medians[name] / medians["take_out"],
                "page_faults": report.quartiles(faults[name])["median"],
            }
            for name in names
        },
    }


def show(found: dict[str, Any], targets: dict[str, str]) -> None:
    """Prints the table of one density."""
    rate = found["floor_bytes_per_second"] / 1e9
    print(f"\ndensity {found['density']:.2%}, {found['selected']:,} coordinates, floor at {rate:,.1f} GB/s")
    if targets is CPU_TARGETS and found["core_share"] < 0.97:
        print(f"The core was not free: this process had it for {found['core_share']:.0%} of the time.")
    rows = []
    for name, way in found["ways"].items():
        low, high = way["seconds"]["quartiles"]
        rows.append(
            [
                name,
                f"{1e3 * way['seconds']['median']:.2f}",
                f"{1e3 * low:.2f} … {1e3 * high:.2f}",
                f"{way['ratio_to_floor']:.2f}",
                targets.get(name, ""),
                f"{way['ratio_to_take_out']:.1f}",
                f"{way['page_faults']:,.0f}",
            ]
        )
    print(report.table(["", "ms", "quartiles", "x floor", "target at 0.1 %", "x take_out", "page faults"], rows))


def main() -> None:
    """Measures at each density, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--elements", type=int, help="default: 11.17 million on a CPU (ResNet-18), 100 on a GPU")
    parser.add_argument("--densities", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 1e-1])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3, help="repetitions before those that count")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not (torch.cuda.is_available() and is_available(torch.device("cuda"))):
        parser.error("There is no GPU here, or no triton.")
    options.elements = options.elements or (RESNET_18 if options.device == "cpu" else 100_000_000)
    options.output = options.output or report.RESULTS / f"selection_{options.device}.json"
    torch.set_num_threads(1)
    results = []
    for density in options.densities:
        results.append(measure(density, options))
        show(results[-1], CPU_TARGETS if options.device == "cpu" else GPU_TARGETS)
    report.write(options, results)


if __name__ == "__main__":
    main()
