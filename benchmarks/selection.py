"""Measures the time to add a gradient to the residual, select coordinates and clear them.

    python -m benchmarks.selection [--device cuda]

On a CPU, a single core works. The floor is `torch.add(out=)` of equal size, which reads two vectors and writes one. On
a GPU, the floor is the time to move the required bytes at the measured rate of a copy. The methods take turns. Before
each timing, the residual is restored, so that every repetition selects the same coordinates.

    take_out         p = e + g, select into a payload, keep the rest, ‖e'‖² (compiled functions; Triton kernels)
    take_out_masked  as take_out, but into a dense tensor with zeros, for the dense route
    plain            compensate, HardThreshold.select, keep_residual: as take_out, but without reused buffers
    topk             only abs().topk(k) of p, with the threshold's k; does not add or clear

The receiver's part is also measured:

    average          adds two payloads of this density to zeros and divides

Selected coordinates are at random positions; those of gradients are closer together. Page faults count new memory: one
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
from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat, aligned
from lightning_sparse.exchange.routes import adding
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels.launching import is_available
from lightning_sparse.selection.bucket import FlatBucket, Residual, compensate, keep_residual
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.sparsifiers.protocol import LayerLayout

RESNET_18 = 11_173_962
THRESHOLD = 1.0
SLEEP_CYCLES = 2_000_000
"""About a millisecond on a GPU."""
CPU_TARGETS = {"take_out": "<= 1.4", "take_out_masked": "<= 2.2", "topk": ">= 10 x take_out"}
GPU_TARGETS = {"take_out": "<= 1.5", "take_out_masked": "<= 1.5"}

Way = Callable[[Tensor], object]
"""A function that selects from the residual."""


def make_bucket(num_elements: int, density: float, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return a residual, a gradient and the number of coordinates whose sum reaches the threshold.

    The sum is uniform in (−λ, λ), like a residual between steps, and slightly above λ at random coordinates.
    """
    generator = torch.Generator(device).manual_seed(0)
    like = {"generator": generator, "device": device}
    compensated = torch.rand(num_elements, **like).mul_(1.998 * THRESHOLD).sub_(0.999 * THRESHOLD)
    positions = (torch.rand(num_elements, **like) < density).nonzero().squeeze(1)
    above = THRESHOLD * (1.001 + 0.1 * torch.rand(positions.numel(), **like))
    compensated[positions] = above.copysign(compensated[positions])
    gradient = torch.randn(num_elements, **like).mul_(0.01 * THRESHOLD)
    return compensated.sub_(gradient), gradient, positions.numel()


class Transfer:
    """The target of a method: a payload, or a dense tensor if the payload is None."""

    def __init__(self, payload_format: PayloadFormat, out: Tensor, payload: Tensor | None) -> None:
        self.format, self.out, self.payload = payload_format, out, payload
        self.is_cleared, self.divisor, self.buffers = False, 2, Buffers()
        self.overflow: Any = None


def selection_methods(start: Tensor, gradient: Tensor, selected: int) -> dict[str, tuple[Way, float]]:
    """Return each method with the bytes that it must move."""
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
        keep_residual(residual, selected, wire)

    def topk(residual: Tensor) -> Tensor:
        return residual.abs().topk(selected, sorted=False).indices

    extraction = Extraction(sparsifier, num_slices=0, per_layer=False)
    payload = torch.zeros(payload_format.payload_bytes(aligned(selected)), dtype=torch.uint8, device=gradient.device)

    def fill(transfer: Transfer) -> Way:
        return lambda residual: extraction.fill(flat(residual), transfer)

    def average(residual: Tensor) -> None:
        adding.average(payload_format, rows, sums.zero_(), space)

    space, sums = Buffers(), torch.empty(size, device=gradient.device)
    # In addition to the vectors, each coordinate is written once into a payload.
    moved_bytes = 12 * size + selected * payload_format.coordinate_bytes
    results: dict[str, tuple[Way, float]] = {"take_out": (fill(Transfer(payload_format, out, payload)), moved_bytes)}
    masked = fill(Transfer(payload_format, out, None)), 16 * size
    extraction.fill(flat(compensated.copy_(start)), Transfer(payload_format, out, payload))
    rows = payload.repeat(2, 1)
    results["average"] = average, 4 * size
    if gradient.device.type == "cpu":
        results["floor"] = (lambda residual: torch.add(residual, gradient, out=compensated)), 12 * size
    else:
        results["floor"] = compensated.copy_, 8 * size
    return {**results, "take_out_masked": masked, "plain": (plain, 12 * size), "topk": (topk, 4 * size)}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of the work, on a GPU by the GPU's clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # keeps the host ahead of the device, as in a training step
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(density: float, options: argparse.Namespace) -> dict[str, Any]:
    """Time all methods in turn at a density."""
    device = torch.device(options.device)
    start, gradient, selected = make_bucket(options.elements, density, device)
    methods = selection_methods(start, gradient, selected)
    residual = start.clone()
    times: dict[str, list[float]] = {name: [] for name in methods}
    faults: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    own_seconds = 0.0
    for repetition in range(options.warm_up + options.repetitions):
        turn = repetition % len(names)  # rotate, because the previous method determines the content of the caches
        for name in names[turn:] + names[:turn]:
            residual.copy_(start)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            own_before = time.process_time()
            duration = seconds(lambda name=name: methods[name][0](residual), device)
            if repetition >= options.warm_up:
                own_seconds += time.process_time() - own_before
                times[name].append(duration)
                faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    medians = {name: report.quartiles(times[name])["median"] for name in names}
    rate = methods["floor"][1] / medians["floor"]
    floors = {
        name: medians["floor"] if device.type == "cpu" else needed / rate for name, (_, needed) in methods.items()
    }
    return {
        "density": density,
        "selected": selected,
        "floor_bytes_per_second": rate,
        "core_share": own_seconds / sum(sum(samples) for samples in times.values()),
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


def show(results: dict[str, Any], targets: dict[str, str]) -> None:
    """Print the table of a density."""
    rate = results["floor_bytes_per_second"] / 1e9
    print(f"\ndensity {results['density']:.2%}, {results['selected']:,} coordinates, floor at {rate:,.1f} GB/s")
    if targets is CPU_TARGETS and results["core_share"] < 0.97:
        print(f"The core was busy: this process had {results['core_share']:.0%} of its time.")
    rows = []
    for name, way in results["ways"].items():
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
    """Measure at each density, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--elements", type=int, help="default: 11.17 million on a CPU (ResNet-18), 100 on a GPU")
    parser.add_argument("--densities", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 1e-1])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3, help="untimed repetitions at the start")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not (torch.cuda.is_available() and is_available(torch.device("cuda"))):
        parser.error("Got --device cuda, but found no GPU or no triton. Use --device cpu or install triton.")
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
