"""One command that shows whether all of this works on the GPUs of a machine, and how fast: ``make gpu-check``.

    python -m benchmarks.gpu_check [--device cpu] [--output gpu-report.md]

Runs, as many workers as there are GPUs (with one, a group of one that goes through the motions of every route):

    tests      those that need a GPU
    kernels    taking out and adding up at 100, 6.5 and 0.26 million elements, against what the bytes moved must take
    steps      routes x sparsifiers x precisions: launches, waits of the host, peak memory, replicas bit by bit
    training   ResNet-18 on CIFAR-10, plain DDP and hard threshold, where LIGHTNING_SPARSE_DATA has it
    faults     with two workers or more: a long run with equal replicas, and one whose last worker is killed

and writes a report with all figures, versions and verdicts. With ``--device cpu`` the same goes over two Gloo workers,
smaller: that shows that the harness works, and nothing about GPUs.
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

from benchmarks import gpu_check_worker, report, selection

DENSITY = 0.001
MOST_SECONDS = 50e-6
"""What a bucket may take beyond its bytes."""
SECTION_SECONDS = 900.0
"""What hangs is ended after that long."""
MOST_LINES = 20
TEST_PROCESSES = 4
Section = tuple[str, str, bool | None]
"""Heading, text, and whether what it shows is as it should be; None where nothing was to be shown."""


def tests(options: argparse.Namespace) -> Section:
    """The tests that need a GPU."""
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
    reasons = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))][:MOST_LINES]
    verdict = done.returncode == 0 if " passed" in summary else (None if done.returncode in (0, 5) else False)
    return "Tests", "\n".join([summary, *reasons, *_end_of(done)]), verdict


def kernels(options: argparse.Namespace) -> Section:
    """Walk, pack and decode against the bytes that they move."""
    rows, verdict = [], True
    for elements in options.elements:
        arguments = argparse.Namespace(device=options.device, elements=elements, warm_up=3, repetitions=15)
        found = selection.measure(DENSITY, arguments)
        ways = {name: way["seconds"]["median"] for name, way in found["ways"].items()}
        rate = found["floor_bytes_per_second"]
        needed, took = 12 * elements / rate, ways["take_out"] + ways["average"]
        holds = took <= 1.3 * needed + MOST_SECONDS
        verdict &= holds
        times = (ways["take_out"], ways["take_out_masked"], ways["average"], needed)
        cells = [f"{1e6 * seconds:,.0f}" for seconds in times]
        rows.append([f"{elements:,}", f"{rate / 1e9:,.0f}", *cells, "yes" if holds else "no"])
    head = ["elements", "GB/s", "take out, µs", "masked, µs", "add up 2, µs", "12 bytes an element, µs", "in bounds"]
    bound = "Bound: take out + add up ≤ 1.3 x (12 bytes an element at the rate of a copy) + 50 µs, at 0.1 %."
    return "Kernels", f"{report.table(head, rows)}\n\n{bound}", verdict if options.device == "cuda" else None


def steps(options: argparse.Namespace) -> Section:
    """Routes, sparsifiers and precisions: what a step launches, waits for and holds."""
    with tempfile.TemporaryDirectory() as folder:
        _run(gpu_check_worker.table, options, folder)
        found: dict[str, dict[str, Any]] = torch.load(f"{folder}/rows.pt", weights_only=True)
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
        for name, row in found.items()
    ]
    head = ["", "ms a step", "launches", "operators", "waits", "MiB in steps 1 / 2 / 3", "density", "replicas equal"]
    about = "Waits are the profiler's own as well, and a loss scale's; DDP has them too. MiB: beyond what was held."
    return "Steps", f"{report.table(head, rows)}\n\n{about}", all(row["same"] for row in found.values())


def training(options: argparse.Namespace) -> Section:
    """The ResNet-18 recipe, dense and sparse."""
    data = os.environ.get("LIGHTNING_SPARSE_DATA")
    if data is None:
        return "Training", "Not run: LIGHTNING_SPARSE_DATA does not name a folder with CIFAR-10.", None
    rows, reasons, verdict = [], list[str](), True
    for name, changes in {"DDP": ["--trainer.strategy=ddp"], "hard threshold": []}.items():
        command = [sys.executable, "-m", "recipes", "fit", "--config=recipes/resnet18_cifar10/laptop.yaml"]
        command += [f"--data.root={data}", f"--trainer.devices={options.workers}", *changes, *options.recipe_changes]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECTION_SECONDS)
        seconds = time.perf_counter() - started
        accuracy = re.findall(r"val/accuracy\D+([\d.]+)", done.stdout)
        verdict &= done.returncode == 0
        rows.append([name, f"{seconds:.0f}", accuracy[-1] if accuracy else "-", done.returncode])
        reasons += _end_of(done)
    table = report.table(["ResNet-18, CIFAR-10", "s", "accuracy", "exit"], rows)
    if options.workers == 1:
        reasons.append("One worker alone: nothing is exchanged, and both rows are the same training.")
    return "Training", "\n".join([table, *reasons]), verdict


def faults(options: argparse.Namespace) -> Section:
    """Replicas after many steps, and a worker that is gone."""
    if options.workers < 2:
        return "Faults", "Not run: one worker has no replica and nobody who would notice.", None
    with tempfile.TemporaryDirectory() as folder:
        _run(gpu_check_worker.long_run, options, folder)
        same = bool(torch.load(f"{folder}/long.pt", weights_only=True))
        started = time.perf_counter()
        ended = _run(gpu_check_worker.dying, options, folder, limit=240.0)
        seconds = time.perf_counter() - started
        noticed = ended and Path(f"{folder}/gone").exists()
    lines = [
        f"replicas after {options.long_steps} steps: {'the same bits' if same else 'DIFFERENT'}",
        f"a worker that is killed: the others {'ended' if noticed else 'did NOT end'}, {seconds:.0f} s after all began",
    ]
    return "Faults", "\n".join(lines), same and noticed


def _end_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The last lines that a command said before it failed; none if it did not."""
    return done.stderr.strip().splitlines()[-MOST_LINES:] if done.returncode not in (0, 5) else []


def _run(work: Callable[..., None], options: argparse.Namespace, folder: str, limit: float = 600.0) -> bool:
    """Runs it in one process a worker; returns whether all ended in time. Errors of a fault are expected."""
    store = f"{folder}/store.{work.__name__}"
    arguments = (options.workers, options.device, store, folder, vars(options))
    # What is forked may not use CUDA once its parent has so much as counted devices.
    start = "forkserver" if options.device == "cpu" else "spawn"
    context = torch.multiprocessing.start_processes(
        work, arguments, nprocs=options.workers, join=False, start_method=start
    )
    deadline = time.monotonic() + limit
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                return False
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        if work is not gpu_check_worker.dying:
            raise
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return True


def write(options: argparse.Namespace, sections: list[Section], seconds: float) -> None:
    """Writes the report of the sections so far."""
    about = report.surroundings()
    lines = [
        "# GPU report",
        "",
        f"`{about['command']}`, {about['date']}, commit {about['commit']}, {seconds:.0f} s.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in (about["hardware"] | about["versions"]).items()]
    lines += [f"- workers: {options.workers} on {options.device}", ""]
    words = {True: "as it should be", False: "**NOT as it should be**", None: "nothing shown"}
    lines += [f"- {heading}: {words[verdict]}" for heading, _, verdict in sections]
    for heading, text, _ in sections:
        lines += ["", f"## {heading}", "", "```", text.strip(), "```"]
    options.report = "\n".join(lines)
    options.output.write_text(options.report + "\n")


SECTIONS = (tests, kernels, steps, training, faults)


def main() -> int:
    """Runs all sections; returns 1 if one of them shows what should not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--only", nargs="+", choices=[section.__name__ for section in SECTIONS])
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} ({torch.version.cuda or 'no CUDA'}) sees no CUDA device: there is none, "
            "or its driver is too old for that. --device cpu runs the same harness, which says nothing about GPUs."
        )
    torch.set_num_threads(1)
    options.workers = torch.cuda.device_count() if on_gpu else 2
    options.elements = [100_000_000, 6_500_000, 260_000] if on_gpu else [1_000_000, 260_000]
    options.width, options.depth, options.steps = (1024, 24, 30) if on_gpu else (64, 4, 8)
    options.long_steps = 1000 if on_gpu else 30
    options.recipe_changes = ["--trainer.accelerator=gpu"] if on_gpu else ["--trainer.fast_dev_run=3"]
    started, sections = time.perf_counter(), list[Section]()
    try:
        write(options, sections, 0.0)  # before anything is measured that could not be kept
    except OSError as error:
        parser.error(f"argument --output: {error}. Name a file in a folder that exists.")
    for section in SECTIONS:
        if options.only is None or section.__name__ in options.only:
            try:
                sections.append(_guarded(section, options))
            except KeyboardInterrupt:
                sections.append((section.__name__.capitalize(), "interrupted", False))
            write(options, sections, time.perf_counter() - started)
            if sections[-1][1] == "interrupted":
                break
    print(options.report)
    return int(any(verdict is False for _, _, verdict in sections))


def _guarded(section: Callable[[argparse.Namespace], Section], options: argparse.Namespace) -> Section:
    """What fails is part of the report, and the rest still runs."""
    try:
        return section(options)
    except Exception as error:
        return section.__name__.capitalize(), f"{type(error).__name__}: {error}"[-3000:], False


if __name__ == "__main__":
    sys.exit(main())
