"""Validates three choices of weights after local training: ``python -m recipes.weights FOLDER… [-- ARGUMENTS]``.

For each run of local training, validates the mean of the workers' weights, the anchor and rank 0's weights. Validation
and checkpoints use the mean::

    python -m recipes.weights comparison/gpt_wikitext/drift_1_/0.003/seed_1 -- --data.root=data

A folder is the log folder of a recipe, with its ``config.yaml`` and one checkpoint of all workers
(``worker_state: full``).
"""

import argparse
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lightning_sparse.checkpointing.content import KEY
from recipes.__main__ import main as run_command_line


def candidate_weights(saved: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the module's state with the mean, the anchor and rank 0's weights.

    Args:
        saved: a checkpoint of local training.
    """
    state, content = saved["state_dict"], saved.get(KEY, {})
    if "weights" not in next(iter(content.get("workers", [])), {}):
        sys.exit("The checkpoint lacks the weights of each worker. Train with worker_state: full.")
    candidates = {"anchor": content["shared"]["anchor"], "rank 0": content["workers"][0]["weights"]}
    found = {"mean": state}
    for source, weights in candidates.items():
        found[source] = deepcopy(state)  # keeps tied weights tied, which a state lists under each name
        for name, flat in weights.items():
            found[source][name].copy_(flat.view_as(found[source][name]))
    return found


def only_file(folder: Path, name: str) -> Path:
    """Return the only file of this name below a folder, or exit with a message."""
    found = list(folder.rglob(name))
    if len(found) != 1:
        sys.exit(f"{folder} holds {len(found)} files {name}. It must hold one run with one checkpoint.")
    return found[0]


def validate(folder: Path, arguments: list[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of each choice of weights in the only checkpoint below a folder."""
    path, config = (only_file(folder, name) for name in ("*.ckpt", "config.yaml"))
    saved = torch.load(path, weights_only=True, map_location="cpu")
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, state in candidate_weights(saved).items():
            checkpoint = Path(temporary, f"{name}.ckpt")
            torch.save({**saved, "state_dict": state}, checkpoint)
            command = ["recipes", "validate", f"--config={config}", f"--ckpt_path={checkpoint}"]
            command += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.logger=false"]
            command += ["--trainer.callbacks=null", "--trainer.enable_progress_bar=false"]
            command += [f"--trainer.default_root_dir={temporary}"]
            with patch.object(sys, "argv", [*command, *arguments]):
                metrics = run_command_line().trainer.callback_metrics
            found[name] = {key: float(value) for key, value in metrics.items()}
    return found


def main() -> None:
    """Print a table with one row per folder."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    folders = parser.parse_args(given[:end]).folders
    rows = {folder: validate(folder, given[end + 1 : -1]) for folder in folders}
    names = list(next(iter(rows.values())))
    print(f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", sep="\n")
    for folder, found in rows.items():
        cells = [", ".join(f"{key} {value:.4f}" for key, value in found[name].items()) for name in names]
        print(f"| {folder} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
