"""How long does a whole training step take under every way of exchanging gradients, as a ratio to no exchange at all?

    python -m benchmarks.step_time [--models resnet18 lstm neumf gpt] [--hosts 4] [--rates 1gbit unshaped] [--quick]
    python -m benchmarks.step_time --exchange-only        (one gradient, without a training step around it)
    python -m benchmarks.chart                            (draws the result)

As root the workers are hosts of the network lab, one a host, each on one core with one thread; otherwise they talk over
loopback, unshaped, and a line says so. With more hosts than cores they share cores, and the floor is higher too.

    resnet18   torchvision's with 10 classes and its max-pool, 8 images of 32 x 32: little compute beside its gradient
    lstm       the recipe's, 3 x 650 with WikiText-2's vocabulary, 2 columns of 30 words
    neumf      the recipe's for MovieLens-20M, 16,384 pairs
    gpt        the recipe's, 16 windows of 64 bytes: the smallest, with 279,168 parameters

    floor                 DDP's no_sync: the same step without any exchange
    ddp_idle              DDP with a hook that does nothing: its copies, and the buffers that it sends around
    ddp_fp32, ddp_bf16    DDP, and DDP with torch's bf16_compress_hook
    powersgd_4            torch's PowerSGD hook of rank 4. It chains collectives in callbacks, which Gloo need not
                          survive: so it runs in processes of its own, beside a floor of its own
    top_k_0.001           lightning_sparse with TopK
    hard_threshold_ρ      lightning_sparse with HardThreshold, λ such that the density in the timed steps is ρ; 1 is
                          λ = 0, everything sent
    drift_ρ               local training, which exchanges drifts of density ρ after the step; with _every_8 drifts of
                          density 8 ρ after every eighth, and the time is the mean of eight

Each way has a model of its own, started alike, and they take turns within the same processes: in each round one step
that does not count, a barrier, then the timed steps. A step is drawing a random batch, forward, backward with the
exchange, SGD, and for the sparse ways what a logger keeps of the step's numbers. It takes as long as on the slowest
worker; the table shows medians. SGD's rate is small and constant, so that gradients stay what they are. λ is found
before the timing: sqrt(E‖g‖² / (ρ d)), corrected by the density measured until that is within 7 % of ρ. Residuals begin
as long training leaves them, spread over (−λ, λ). The density shown is the mean over the timed steps; an exclamation
mark stands where it is more than 15 % off.

Freed memory stays with the processes. Under glibc's own rules it goes back to the kernel at every step or never, as it
happens to lie: the same floor takes half as long again where its gradients are new pages each time. `--allocator glibc`
leaves it to that; page faults a step are in the result.

The exchange alone is that of a gradient of the model's size in DDP's buckets, N(0, 1) and so without any locality in
what is selected, handed to the hooks directly; only the first of the models.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.network_lab import NetworkLab, start_on_loopback
from benchmarks.payload import read_results

UNSHAPED = "unshaped"
RATES = ["200mbit", "1gbit", "10gbit", UNSHAPED]
MODELS = ["resnet18", "lstm", "neumf", "gpt"]
FLOOR, POWER_SGD = "floor", "powersgd_4"
HARD_THRESHOLDS = ["hard_threshold_0.01", "hard_threshold_0.001", "hard_threshold_0.0001", "hard_threshold_1"]
DRIFTS = ["drift_0.001", "drift_0.001_every_8"]
METHODS = [FLOOR, "ddp_idle", "ddp_fp32", "ddp_bf16", POWER_SGD, "top_k_0.001", *HARD_THRESHOLDS, *DRIFTS]
TOLERATED = 0.15
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_TOP_PAD_": "67108864"}


class Hosts:
    """Hosts of the network lab, or processes on loopback where there can be no lab or they share GPUs' machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.count, self.on_gpus = options.hosts, options.device == "cuda"
        self.module = "benchmarks.step_time_exchange" if options.exchange_only else "benchmarks.step_time_worker"
        self.variables = KEEP_MEMORY if options.allocator == "keep" else {}
        reason = "GPUs are on one machine." if self.on_gpus else NetworkLab.unavailable_reason()
        self.lab = None if reason else NetworkLab(options.hosts)
        if reason:
            print(f"{reason} Running on loopback, unshaped.", file=sys.stderr)

    def __enter__(self) -> "Hosts":
        if self.lab is not None:
            self.lab.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.lab is not None:
            self.lab.close()

    def run(self, task: dict[str, Any], rate: str, timeout: float) -> dict[str, Any]:
        """Runs a task on workers of its own over links of a rate; returns its result.

        Raises:
            RuntimeError: a worker failed; ends with what it wrote.
            TimeoutError: they were not done in time.
        """
        command = [sys.executable, "-m", self.module, json.dumps(task)]
        if self.lab is not None:
            self.lab.shape(None if rate == UNSHAPED else rate)
            return read_results(self.lab.run(command, timeout, env=self.variables)[:1])[0]
        hosts, each = (1, self.count) if self.on_gpus else (self.count, 1)
        workers = start_on_loopback(command, hosts, each, self.variables, pin=not self.on_gpus)
        return read_results(workers.outputs(timeout)[:1])[0]


def measure(hosts: Hosts, model: str, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times all methods with one model at one rate."""
    task = {
        "model": model,
        "device": options.device,
        "bucket_view": options.bucket_view,
        "seconds": options.seconds,
        "least_rounds": 2 if options.quick else 4,
        "steps": options.steps,
        "repetitions": options.repetitions,
        "patience": 300,
    }
    usual = [method for method in options.methods if method != POWER_SGD]
    found = hosts.run(task | {"methods": usual}, rate, timeout=3600)
    if options.exchange_only:
        return found
    relate(found["methods"])
    if POWER_SGD in options.methods:
        alone = task | {"methods": [FLOOR, POWER_SGD], "seconds": options.seconds / 4, "patience": 30}
        try:
            methods = hosts.run(alone, rate, timeout=300 + options.seconds)["methods"]
            relate(methods)
            found["methods"][POWER_SGD] = methods[POWER_SGD]
        except (RuntimeError, TimeoutError) as error:
            found["methods"][POWER_SGD] = {"failure": reason_of(error)}
    found["methods"] = {method: found["methods"][method] for method in options.methods}
    return found


def relate(methods: dict[str, Any]) -> None:
    """Adds each method's ratio to the floor of the same run, of medians."""
    floor = methods[FLOOR]["seconds"]["median"]
    for result in methods.values():
        result |= {"floor_seconds": floor, "ratio": result["seconds"]["median"] / floor}


def reason_of(error: Exception) -> str:
    """The line of what a failed worker wrote that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines[1:] if re.search(r"error|enforce|what\(\)|terminate", line, re.IGNORECASE)]
    return re.sub(r"^what\(\):\s*|enforce fail at \S*/", "", (telling or lines)[-1])[:300]


def show(model: str, rate: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the table of one model at result rate."""
    print(f"\n{model}, {found['parameters']:,} parameters, {options.hosts} hosts, {rate}")
    rows, failures = [], []
    for method, result in found["methods"].items():
        if "failure" in result:
            failures.append(f"{method} does not run here: {result['failure']}")
            continue
        median, (low, high) = result["seconds"]["median"], result["seconds"]["quartiles"]
        cells = [method, f"{1e3 * median:.1f}", f"{1e3 * low:.1f} - {1e3 * high:.1f}"]
        cells += [] if options.exchange_only else [f"{result['ratio']:.3f}"]
        if "density" in result:
            density = result["density"]["mean"]
            density_of, _, every = method.partition("_every_")
            aimed = float(density_of.rpartition("_")[2]) * int(every or 1)
            cells.append(f"{density:.4%}{'' if abs(density / aimed - 1) <= TOLERATED else '!'}")
            cells.append(f"{result['payload_bytes']['median']:,.0f}")
            cells += [] if options.exchange_only else [result["steps_with_more_collectives"]]
        rows.append(cells)
    head = ["", "ms", "quartiles", *([] if options.exchange_only else ["x floor"]), "density", "payload bytes"]
    head += [] if options.exchange_only else ["second rounds"]
    print(report.table(head, [[*row, *[""] * (len(head) - len(row))] for row in rows]))
    print("\n".join(failures), flush=True)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS[:1], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--methods", nargs="+", default=METHODS, help=f"of {', '.join(METHODS)}, or other densities")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of each link, in each direction, such as 1gbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing for each model and rate")
    parser.add_argument("--steps", type=int, default=3, help="timed, whenever it is a method's turn")
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view")
    parser.add_argument("--allocator", choices=["keep", "glibc"], default="keep")
    parser.add_argument("--exchange-only", action="store_true")
    parser.add_argument("--repetitions", type=int, default=15, help="of the exchange alone")
    parser.add_argument("--quick", action="store_true", help="two rounds and four repetitions: to see that it runs")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    options = parser.parse_args()
    for name in ("models", "methods", "rates"):  # with commas as well as spaces between them
        setattr(options, name, [given for text in getattr(options, name) for given in text.split(",") if given])
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"Unknown models {sorted(unknown)}. Known are {', '.join(MODELS)}.")
    pattern = "|".join([*METHODS[:5], r"(top_k|hard_threshold)_\d+(\.\d+)?", r"drift_\d+(\.\d+)?(_every_\d+)?"])
    if unknown := {method for method in options.methods if not re.fullmatch(pattern, method)}:
        parser.error(f"Unknown methods {sorted(unknown)}. Known are {', '.join(METHODS)}.")
    if options.quick:
        options.seconds, options.repetitions = 0.0, 4
    if options.exchange_only:
        options.models = options.models[:1]
        options.methods = [
            method for method in options.methods if method not in (FLOOR, "ddp_idle", POWER_SGD, *DRIFTS)
        ]
    elif FLOOR not in options.methods:
        options.methods.insert(0, FLOOR)
    if options.output is None:
        name = "step_time_bucket_view" if options.bucket_view else "step_time"
        options.output = report.RESULTS / f"{'exchange_time' if options.exchange_only else name}.json"
    return options


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    results = []
    with Hosts(options) as hosts:
        if hosts.lab is None:
            options.rates = [UNSHAPED]
        for model in options.models:
            for rate in options.rates:
                found = measure(hosts, model, rate, options)
                show(model, rate, found, options)
                results.append({"model": model, "rate": rate, "hosts": options.hosts} | found)
    report.write(options, results)


if __name__ == "__main__":
    main()
