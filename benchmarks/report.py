"""Formats tables, computes quartiles and writes results as JSON.

The JSON holds the hardware, the versions, the commit, the date and the command, then settings and results.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lightning_sparse

RESULTS = Path("benchmarks/results")


def quartiles(samples: Sequence[float]) -> dict[str, Any]:
    """Return the median, the lower and upper quartile, and the number of samples."""
    if len(samples) == 1:
        low = median = high = samples[0]
    else:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high], "samples": len(samples)}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a text table with right-aligned columns, except the first."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def write(options: argparse.Namespace, results: Any) -> None:
    """Write results to ``options.output`` with the environment and the settings."""
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "worker")}
    content = {**surroundings(), "settings": settings, "results": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nWritten to {options.output}")


def surroundings() -> dict[str, Any]:
    """Return the command of this process, the date, the commit, the hardware and the versions."""
    commit = _git("rev-parse", "HEAD")
    hardware: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
    }
    versions = {"python": platform.python_version(), "linux": platform.release()}
    versions |= {name: importlib.metadata.version(name) for name in ("torch", "lightning")}
    versions["lightning-sparse"] = lightning_sparse.__version__  # need not be installed
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda)
    return {
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "lightning_sparse", "benchmarks/*.py")),
        "hardware": hardware,
        "versions": versions,
    }


def _module() -> str:
    """Return the name of the running module, as after ``python -m``."""
    spec = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str:
    """Return git's output, or nothing without git or a repository."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
