"""Checks the package on the GPUs of a machine and measures its speed: ``make gpu-check``.

    python -m benchmarks.gpu_check [--device cpu] [--output gpu-report.md]

Runs these sections with one worker per GPU (a single worker also executes every route) and writes a report:

    tests      the tests that need a GPU
    kernels    selecting and averaging 100, 6.5 and 0.26 million elements, against the time to copy these bytes
    steps      routes x sparsifiers x precisions: launches, host synchronisations, peak memory, equality of replicas
    training   ResNet-18 on CIFAR-10, dense and hard threshold, if LIGHTNING_SPARSE_DATA contains it
    faults     with at least two workers: equality of replicas after a long run, and detection of a killed worker

The report contains all figures, versions and verdicts. ``--device cpu`` runs smaller sections with two Gloo workers. It
tests this script and says nothing about GPUs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from benchmarks import report, selection
from benchmarks.gpu_check import worker

DENSITY = 0.001
MAX_DENSITY = 0.1
"""Density allowed in the last step of the section ``steps``, which asks for 1 %."""
MAX_SECONDS = 50e-6
"""Overhead allowed per bucket, beyond the time to copy its bytes."""
SECTION_SECONDS = 900.0
"""Time limit of a section."""
MAX_LINES = 20
SIMULATED = [
    "--trainer.strategy=lightning_sparse.SimulatedWorkersStrategy",
    "--trainer.strategy.num_workers=2",
    "--trainer.strategy.sparsifier=lightning_sparse.HardThreshold",
]
DENSE_OF_SIMULATED = ["--trainer.strategy.sparsifier=lightning_sparse.Dense", "--trainer.strategy.exchange=dense"]
"""Changes of a recipe for a single GPU."""
TEST_PROCESSES = 8
Section = tuple[str, str, bool | None]
"""Heading, text, and whether the section passed; None for a section without a verdict."""


def tests(options: argparse.Namespace) -> Section:
    """Run the tests that need a GPU."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda",
        "-p",
        "no:cacheprovider",
        *("-n", str(min(TEST_PROCESSES, os.cpu_count() or 1)), "--dist", "loadgroup"),  # kernels take long to build
        "tests/unit",
        "tests/distributed",
        "tests/integration",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECTION_SECONDS)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    reasons = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))][:MAX_LINES]
    verdict = done.returncode == 0 if " passed" in summary else (None if done.returncode in (0, 5) else False)
    return "Tests", "\n".join([summary, *reasons, *_last_lines(done)]), verdict


def kernels(options: argparse.Namespace) -> Section:
    """Time selecting, packing and averaging, relative to copying the bytes."""
    rows, verdict = [], True
    for elements in options.elements:
        arguments = argparse.Namespace(device=options.device, elements=elements, warm_up=3, repetitions=15)
        results = selection.measure(DENSITY, arguments)
        ways = {name: way["seconds"]["median"] for name, way in results["ways"].items()}
        rate = results["floor_bytes_per_second"]
        needed, took = 16 * elements / rate, ways["take_out"] + ways["average"]
        holds = took <= 1.3 * needed + MAX_SECONDS
        verdict &= holds
        times = (ways["take_out"], ways["take_out_masked"], ways["average"], needed)
        cells = [f"{1e6 * seconds:,.0f}" for seconds in times]
        rows.append([f"{elements:,}", f"{rate / 1e9:,.0f}", *cells, "yes" if holds else "no"])
    head = ["elements", "GB/s", "select, µs", "masked, µs", "average 2, µs", "16 bytes per element, µs", "in bounds"]
    bound = (
        "Bound: select + average ≤ 1.3 x (16 bytes per element at the rate of a copy) + 50 µs, at 0.1 %.\n"
        "Selecting moves 12 of these bytes, and clearing the sums 4."
    )
    return "Kernels", f"{report.table(head, rows)}\n\n{bound}", verdict if options.device == "cuda" else None


def steps(options: argparse.Namespace) -> Section:
    """Count launches, host synchronisations and memory per step for routes, sparsifiers and precisions."""
    with tempfile.TemporaryDirectory() as folder:
        _run(worker.measure_all, options, folder)
        results: dict[str, dict[str, Any]] = torch.load(f"{folder}/rows.pt", weights_only=True)
    rows = [
        [
            name,
            f"{row['milliseconds']:.2f}",
            row["launches"],
            row["operators"],
            row["waits"],
            " / ".join(map(str, row["peaks"])) or "-",
            "-" if row["density"] is None else f"{row['density']:.2%}",
            "yes" if row["same"] else "NO",
        ]
        for name, row in results.items()
    ]
    head = ["", "ms per step", "launches", "operators", "waits", "MiB in steps 1 / 2 / 3", "density", "replicas equal"]
    about = "Waits include those of the profiler and the loss scale, as with DDP. MiB: peak minus previous memory."
    passed = all(row["same"] and (row["density"] or 0.0) < MAX_DENSITY for row in results.values())
    return "Steps", f"{report.table(head, rows)}\n\n{about}", passed


def training(options: argparse.Namespace) -> Section:
    """Run the ResNet-18 recipe, dense and sparse."""
    data = os.environ.get("LIGHTNING_SPARSE_DATA")
    if data is None:
        return "Training", "Not run: LIGHTNING_SPARSE_DATA does not name a folder with CIFAR-10.", None
    rows, reasons, verdict = [], list[str](), True
    trainings = {"dense": ["--trainer.strategy=ddp"], "hard threshold": []}
    if options.workers == 1:  # would exchange nothing
        trainings = {"dense": [*SIMULATED, *DENSE_OF_SIMULATED], "hard threshold": SIMULATED}
        reasons.append("Two simulated workers.")
    for name, changes in trainings.items():
        command = [sys.executable, "-m", "recipes", "fit", "--config=recipes/resnet18_cifar10/laptop.yaml"]
        command += [f"--data.root={data}", f"--trainer.devices={options.workers}", *changes, *options.recipe_changes]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECTION_SECONDS)
        seconds = time.perf_counter() - started
        accuracy = re.findall(r"val/accuracy\D+([\d.]+)", done.stdout)
        verdict &= done.returncode == 0
        rows.append([name, f"{seconds:.0f}", accuracy[-1] if accuracy else "-", done.returncode])
        reasons += _last_lines(done)
    table = report.table(["ResNet-18, CIFAR-10", "s", "accuracy", "exit"], rows)
    return "Training", "\n".join([table, *reasons]), verdict


def faults(options: argparse.Namespace) -> Section:
    """Compare replicas after many steps, and kill a worker."""
    if options.workers < 2:
        return "Faults", "Not run: needs at least two workers.", None
    with tempfile.TemporaryDirectory() as folder:
        _run(worker.long_run, options, folder)
        same = bool(torch.load(f"{folder}/long.pt", weights_only=True))
        started = time.perf_counter()
        ended = _run(worker.lose_worker, options, folder, limit=240.0)
        seconds = time.perf_counter() - started
        noticed = ended and Path(f"{folder}/gone").exists()
    lines = [
        f"replicas after {options.long_steps} steps: {'the same bits' if same else 'DIFFERENT'}",
        f"after a killed worker: the others {'ended' if noticed else 'did NOT end'}, {seconds:.0f} s after the start",
    ]
    return "Faults", "\n".join(lines), same and noticed


def _last_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the last error lines of a failed command, else nothing."""
    return done.stderr.strip().splitlines()[-MAX_LINES:] if done.returncode not in (0, 5) else []


def _run(work: Callable[..., None], options: argparse.Namespace, folder: str, limit: float = 600.0) -> bool:
    """Run a function in one process per worker and return whether all processes ended in time.

    Raises:
        TimeoutError: the processes exceeded the limit, except those of ``lose_worker``.
    """
    store = f"{folder}/store.{work.__name__}"
    arguments = (options.workers, options.device, store, folder, vars(options))
    # A forked process cannot use CUDA after its parent has counted devices.
    start = "forkserver" if options.device == "cpu" else "spawn"
    context = torch.multiprocessing.start_processes(
        work, arguments, nprocs=options.workers, join=False, start_method=start
    )
    deadline = time.monotonic() + limit
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                if work is worker.lose_worker:
                    return False
                raise TimeoutError(f"{work.__name__} did not end within {limit:.0f} s.")
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        if work is not worker.lose_worker:
            raise
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return True


def write(options: argparse.Namespace, sections: list[Section], seconds: float) -> None:
    """Write the report of the finished sections."""
    about = report.surroundings()
    lines = [
        "# GPU report",
        "",
        f"`{about['command']}`, {about['date']}, commit {about['commit']}, {seconds:.0f} s.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in (about["hardware"] | about["versions"]).items()]
    lines += [f"- workers: {options.workers} on {options.device}", ""]
    labels = {True: "passed", False: "**FAILED**", None: "no verdict"}
    lines += [f"- {heading}: {labels[verdict]}" for heading, _, verdict in sections]
    for heading, text, _ in sections:
        lines += ["", f"## {heading}", "", "```", text.strip(), "```"]
    options.report = "\n".join(lines)
    options.output.write_text(options.report + "\n")


SECTIONS = (tests, kernels, steps, training, faults)


def main() -> int:
    """Run all sections and return 1 if a section failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--only", nargs="+", choices=[section.__name__ for section in SECTIONS])
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} ({torch.version.cuda or 'no CUDA'}) finds no CUDA device. Check the driver. "
            "--device cpu tests this script only and says nothing about GPUs."
        )
    torch.set_num_threads(1)
    options.workers = torch.cuda.device_count() if on_gpu else 2
    options.elements = [100_000_000, 6_500_000, 260_000] if on_gpu else [1_000_000, 260_000]
    options.width, options.depth, options.steps = (1024, 24, 30) if on_gpu else (64, 4, 8)
    options.long_steps = 1000 if on_gpu else 30
    options.recipe_changes = ["--trainer.accelerator=gpu"] if on_gpu else ["--trainer.fast_dev_run=3"]
    started, sections = time.perf_counter(), list[Section]()
    try:
        write(options, sections, 0.0)  # fail before measuring if the file cannot be written
    except OSError as error:
        parser.error(f"argument --output: {error}. Name a file in a folder that exists.")
    for section in SECTIONS:
        if options.only is None or section.__name__ in options.only:
            try:
                sections.append(_run_section(section, options))
            except KeyboardInterrupt:
                sections.append((section.__name__.capitalize(), "interrupted", False))
            write(options, sections, time.perf_counter() - started)
            if sections[-1][1] == "interrupted":
                break
    print(options.report)
    return int(any(verdict is False for _, _, verdict in sections))


def _run_section(section: Callable[[argparse.Namespace], Section], options: argparse.Namespace) -> Section:
    """Run a section and turn an error into a failed section."""
    try:
        return section(options)
    except Exception as error:
        return section.__name__.capitalize(), f"{type(error).__name__}: {error}"[-3000:], False


if __name__ == "__main__":
    sys.exit(main())
