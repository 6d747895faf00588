"""Checks a short training in an environment outside the project."""

import json
import shutil
from pathlib import Path
from typing import Any

from release.distributions import PROJECT, Environment, run

SCRIPT = PROJECT / "release" / "smoke_train.py"


def train(environment: Environment, folder: Path) -> dict[str, Any]:
    """Train on two workers from another folder and return the script's result."""
    folder.mkdir()
    script = shutil.copy(SCRIPT, folder / "train.py")
    printed = run([environment.python, str(script)], cwd=folder, variables=environment.variables)
    [result] = [json.loads(line) for line in printed.splitlines() if line.startswith('{"package"')]
    return result


def find_faults(result: dict[str, Any], environment: Environment, version: str) -> list[str]:
    """Return a sentence for each fault of a training."""
    first, last = result["losses"]
    checks = {
        f"The package was imported from {result['package']}.": environment.folder in Path(result["package"]).parents,
        f"The versions are {result['version']}, not {version}.": result["version"] == [version, version],
        "py.typed is missing.": result["typed"],
        f"The strategy was {result['strategy']}.": result["strategy"] == "DDPHardThresholdStrategy",
        f"DDP's hook was {result['hook']}.": result["hook"] == "sparse_hook",
        f"The training had {result['workers']} workers.": result["workers"] == 2,
        f"The last step sent {result['density']:.1%}.": 0 < result["density"] < 0.1,
        f"The loss changed from {first:.3f} to {last:.3f}.": last < first,
        f"Weights differ between workers by {result['spread']:.2g}.": result["spread"] == 0,
    }
    return [sentence for sentence, is_true in checks.items() if not is_true]
