"""Measures the time that importing the package adds to importing Lightning."""

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from subprocess import run

ROUNDS = 7
_LINE = re.compile(r"import time:\s*\d+ \|\s*(\d+) \| (lightning\.pytorch|lightning_sparse)$", re.MULTILINE)


def measure_import_time(python: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Return a sentence with the median import times of Lightning alone and of both packages."""
    alone, before, added = [], [], []
    for number in range(ROUNDS + 1):
        times = [_import(python, module, folder, variables) for module in ("lightning.pytorch", "lightning_sparse")]
        if number:  # the first round compiles
            alone.append(times[0]["lightning.pytorch"])
            before.append(times[1]["lightning.pytorch"])
            added.append(times[1]["lightning_sparse"])
    return (
        f"lightning_sparse adds {median(added):.2f} s ({min(added):.2f} to {max(added):.2f}) to importing Lightning, "
        f"which takes {median(before):.1f} s, and {median(alone):.1f} s alone (medians of {ROUNDS} rounds)"
    )


def _import(python: str, module: str, folder: Path, variables: Mapping[str, str] | None) -> dict[str, float]:
    command = [python, "-X", "importtime", "-c", f"import lightning.pytorch, {module}"]
    done = run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    return {name: int(microseconds) / 1e6 for microseconds, name in _LINE.findall(done.stderr)}
