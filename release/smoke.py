"""Whether a training of a few steps works in an environment, outside of the project."""

import json
import shutil
from pathlib import Path
from typing import Any

from release.distributions import PROJECT, Environment, run

SCRIPT = PROJECT / "release" / "smoke_train.py"


def train(environment: Environment, folder: Path) -> dict[str, Any]:
    """Returns what the script says of a training on two workers that begins in another folder."""
    folder.mkdir()
    script = shutil.copy(SCRIPT, folder / "train.py")
    printed = run([environment.python, str(script)], cwd=folder, variables=environment.variables)
    [told] = [json.loads(line) for line in printed.splitlines() if line.startswith('{"package"')]
    return told


def faults(told: dict[str, Any], environment: Environment, version: str) -> list[str]:
    """Returns what is wrong with a training, a sentence each."""
    first, last = told["losses"]
    promises = {
        f"The package was imported from {told['package']}.": environment.folder in Path(told["package"]).parents,
        f"The versions are {told['version']}, not {version}.": told["version"] == [version, version],
        "There is no py.typed.": told["typed"],
        f"The strategy was {told['strategy']}.": told["strategy"] == "DDPHardThresholdStrategy",
        f"DDP's hook was {told['hook']}.": told["hook"] == "sparse_hook",
        f"There were {told['workers']} workers.": told["workers"] == 2,
        f"The last step sent {told['density']:.1%}.": 0 < told["density"] < 0.1,
        f"The loss went from {first:.3f} to {last:.3f}.": last < first,
        f"Weights differ between workers by {told['spread']:.2g}.": told["spread"] == 0,
    }
    return [sentence for sentence, is_kept in promises.items() if not is_kept]
