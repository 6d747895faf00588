"""What importing the package takes beyond importing Lightning.

python -m release.import_time
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from subprocess import run

ROUNDS = 7
_LINE = re.compile(r"import time:\s*\d+ \|\s*(\d+) \| (lightning\.pytorch|lightning_sparse)$", re.MULTILINE)


def measure(python: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Returns a sentence: medians of processes that import Lightning alone and of such that import both, in turn."""
    alone, before, added = [], [], []
    for number in range(ROUNDS + 1):
        times = [_import(python, what, folder, variables) for what in ("lightning.pytorch", "lightning_sparse")]
        if number:  # the first compiles
            alone.append(times[0]["lightning.pytorch"])
            before.append(times[1]["lightning.pytorch"])
            added.append(times[1]["lightning_sparse"])
    return (
        f"lightning_sparse adds {median(added):.2f} s ({min(added):.2f} to {max(added):.2f}) to importing Lightning, "
        f"which takes {median(before):.1f} s, and {median(alone):.1f} s alone (medians of {ROUNDS}, in turn)"
    )


def _import(python: str, what: str, folder: Path, variables: Mapping[str, str] | None) -> dict[str, float]:
    command = [python, "-X", "importtime", "-c", f"import lightning.pytorch, {what}"]
    done = run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    return {name: int(microseconds) / 1e6 for microseconds, name in _LINE.findall(done.stderr)}


if __name__ == "__main__":
    print(measure(sys.executable, Path.cwd()))
