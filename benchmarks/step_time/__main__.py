"""Measures the time of a complete training step with each exchange method, relative to a step without exchange.

    python -m benchmarks.step_time [--models resnet18 lstm neumf gpt] [--hosts 4] [--rates 1gbit unshaped]
    python -m benchmarks.chart                            (draws the result of --bucket-view)

As root, each worker is a host of the network lab, with one core and one thread. Otherwise the workers use loopback
without a rate limit, after a message. With more hosts than cores, workers share cores, which also raises the floor.

    resnet18     torchvision's, with 10 classes and 8 images of 32 x 32: little compute relative to its gradient
    lstm         the recipe's, 3 x 650 with WikiText-2's vocabulary, 2 columns of 30 words
    neumf        the recipe's for MovieLens-20M, 16,384 pairs
    neumf_small  the laptop recipe's, 332,433 parameters, 4,096 pairs
    gpt          the recipe's, 16 windows of 64 bytes: the smallest model, with 279,168 parameters

    floor                 DDP's no_sync: a step without any exchange
    ddp_idle              DDP with an empty hook: its copies and its broadcast of buffers
    ddp_message           DDP with a hook that only exchanges a message of 8 bytes
    ddp_pass              like ddp_message, and a pass of the compiled function over gradient and residual: the least
                          that a hard threshold on a CPU costs
    ddp_hook              DDP with torch's allreduce_hook: the least that a hook which sends everything costs
    ddp_fp32, ddp_bf16    DDP, and DDP with torch's bf16_compress_hook
    powersgd_4            torch's PowerSGD hook of rank 4. It chains collectives in callbacks, which can crash Gloo, so
                          it runs in separate processes with a separate floor
    top_k_0.001           lightning_sparse with TopK
    hard_threshold_ρ      lightning_sparse with HardThreshold and the λ that gives a density of ρ in the timed steps;
                          ρ = 1 is λ = 0, which sends every coordinate
    drift_ρ               local training, which exchanges drifts of density ρ after the step. With _every_8, drifts of
                          density 8 ρ after every eighth step; the time is then the mean of eight steps. With _float8,
                          values are sent in float8

Each method has its own model with equal initial weights. The methods take turns in the same processes: each round is an
untimed step, a barrier, then the timed steps. A step draws a random batch and runs forward, backward with the exchange,
SGD and, for the sparse methods, a logger. Its time is that of the slowest worker, and the table shows medians.

SGD's rate is small and constant, so that gradients hardly change. Before the timing, λ starts at sqrt(E‖g‖² / (ρ d))
and is corrected until the density is within 7 % of ρ. Residuals start spread over (−λ, λ), as after a long training.
The table shows the mean density over the timed steps, with an exclamation mark if it is more than 15 % off.

Processes keep freed memory. By default, glibc may return it to the kernel in every step. With new pages in each step,
the floor takes 1.5 times as long. The result holds the page faults per step.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.step_time.hosts import UNSHAPED, Hosts

RATES = ["200mbit", "1gbit", "10gbit", UNSHAPED]
MODELS = ["resnet18", "lstm", "neumf", "neumf_small", "gpt"]
FLOOR, POWER_SGD = "floor", "powersgd_4"
LIMITS = ["ddp_message", "ddp_pass", "ddp_hook"]
HARD_THRESHOLDS = ["hard_threshold_0.01", "hard_threshold_0.001", "hard_threshold_0.0001", "hard_threshold_1"]
DRIFTS = ["drift_0.01", "drift_0.02_float8", "drift_0.001", "drift_0.001_every_8"]
METHODS = [FLOOR, "ddp_idle", "ddp_fp32", "ddp_bf16", POWER_SGD, "top_k_0.001", *HARD_THRESHOLDS, *DRIFTS]
DENSITY_TOLERANCE = 0.15


def measure(hosts: Hosts, model: str, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time all methods with a model at a rate."""
    task = {
        "model": model,
        "device": options.device,
        "bucket_view": options.bucket_view,
        "seconds": options.seconds,
        "steps": options.steps,
        "timeout_seconds": 300,
    }
    other_methods = [method for method in options.methods if method != POWER_SGD]
    results = hosts.run(task | {"methods": other_methods}, rate, timeout=3600)
    add_ratios(results["methods"])
    if POWER_SGD in options.methods:
        alone = task | {"methods": [FLOOR, POWER_SGD], "seconds": options.seconds / 4, "timeout_seconds": 30}
        try:
            methods = hosts.run(alone, rate, timeout=300 + options.seconds)["methods"]
            add_ratios(methods)
            results["methods"][POWER_SGD] = methods[POWER_SGD]
        except (RuntimeError, TimeoutError) as error:
            results["methods"][POWER_SGD] = {"failure": extract_reason(error)}
    results["methods"] = {method: results["methods"][method] for method in options.methods}
    return results


def add_ratios(methods: dict[str, Any]) -> None:
    """Add the ratio of each method's median to the floor of its run."""
    floor = methods[FLOOR]["seconds"]["median"]
    for result in methods.values():
        result |= {"floor_seconds": floor, "ratio": result["seconds"]["median"] / floor}


def extract_reason(error: Exception) -> str:
    """Return the most informative line of a failed worker's output."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines[1:] if re.search(r"error|enforce|what\(\)|terminate", line, re.IGNORECASE)]
    return re.sub(r"^what\(\):\s*|enforce fail at \S*/", "", (informative or lines)[-1])[:300]


def show(model: str, rate: str, results: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table of a model at a rate."""
    print(f"\n{model}, {results['parameters']:,} parameters, {options.hosts} hosts, {rate}")
    rows, failures = [], []
    for method, result in results["methods"].items():
        if "failure" in result:
            failures.append(f"{method} failed: {result['failure']}")
            continue
        median, (low, high) = result["seconds"]["median"], result["seconds"]["quartiles"]
        cells = [method, f"{1e3 * median:.1f}", f"{1e3 * low:.1f} - {1e3 * high:.1f}", f"{result['ratio']:.3f}"]
        if "density" in result:
            density = result["density"]["mean"]
            density_of, _, every = method.removesuffix("_float8").partition("_every_")
            target = float(density_of.rpartition("_")[2]) * int(every or 1)
            cells.append(f"{density:.4%}{'' if abs(density / target - 1) <= DENSITY_TOLERANCE else '!'}")
            cells.append(f"{result['payload_bytes']['median']:,.0f}")
            cells.append(result["steps_with_more_collectives"])
        rows.append(cells)
    head = ["", "ms", "quartiles", "x floor", "density", "payload bytes", "second rounds"]
    print(report.table(head, [[*row, *[""] * (len(head) - len(row))] for row in rows]))
    print("\n".join(failures), flush=True)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS[:1], help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--methods", nargs="+", default=METHODS, help=f"some of {', '.join(METHODS)}; any density")
    parser.add_argument("--rates", nargs="+", default=RATES, help="rates of each direction of a link, such as 1gbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of timing per model and rate")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per turn")
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view")
    parser.add_argument("--output", type=Path, help="default: a file in benchmarks/results")
    options = parser.parse_args()
    for name in ("models", "methods", "rates"):  # separated by spaces or commas
        setattr(options, name, [given for text in getattr(options, name) for given in text.split(",") if given])
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"Unknown models {sorted(unknown)}. Must be some of {', '.join(MODELS)}.")
    pattern = "|".join(
        [
            *METHODS[:5],
            *LIMITS,
            r"(top_k|hard_threshold|overshoot)_\d+(\.\d+)?",
            r"drift_\d+(\.\d+)?(_every_\d+)?(_float8)?",
        ]
    )
    if unknown := {method for method in options.methods if not re.fullmatch(pattern, method)}:
        known = ", ".join([*METHODS, *LIMITS, "overshoot_0.001"])
        parser.error(f"Unknown methods {sorted(unknown)}. Must be some of {known}.")
    if FLOOR not in options.methods:
        options.methods.insert(0, FLOOR)
    if options.output is None:
        options.output = report.RESULTS / f"{'step_time_bucket_view' if options.bucket_view else 'step_time'}.json"
    return options


def main() -> None:
    """Measure, print and write."""
    options = parse()
    results = []
    with Hosts(options) as hosts:
        if hosts.lab is None:
            options.rates = [UNSHAPED]
        for model in options.models:
            for rate in options.rates:
                measured = measure(hosts, model, rate, options)
                show(model, rate, measured, options)
                results.append({"model": model, "rate": rate, "hosts": options.hosts} | measured)
    report.write(options, results)


if __name__ == "__main__":
    main()
