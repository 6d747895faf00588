"""Runs of recipes by their command line."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse import StepStats
from recipes import MissingDataError
from recipes.__main__ import main
from recipes.lstm_wikitext2 import corpus
from recipes.ncf_movielens import archive
from recipes.resnet18_cifar10 import images
from tests.markdown import PROJECT

RECIPES = PROJECT / "recipes"
RESNET, NCF, LSTM, GPT_FOLDER = "resnet18_cifar10", "ncf_movielens", "lstm_wikitext2", "gpt_wikitext"
COMPARISONS = sorted(path for name in ("comparison", "overshoot", "rivals") for path in RECIPES.rglob(f"{name}.yaml"))
CONFIGS = {f"{path.parent.name}/{path.stem}": path for path in sorted({*RECIPES.rglob("*.yaml")} - {*COMPARISONS})}
"""Every recipe by its folder and name."""

TWO_STEPS = ("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.fast_dev_run=2", "--data.source=builtin")
SMALL = {
    RESNET: (
        *TWO_STEPS,
        "--model.width=8",  # below 8, torch 2.15 crashes with channels_last on CPUs without AVX-512
        "--data.batch_size=8",
        "--data.num_workers=0",
        "--data.num_train_images=64",
        "--data.num_val_images=17",
    ),
    NCF: (*TWO_STEPS, "--model.factors=4", "--model.mlp_sizes=[8,8,4]", "--data.batch_size=512"),
    LSTM: (*TWO_STEPS, "--model.vocabulary_size=200", "--model.hidden_size=16", "--data.columns=4", "--data.bptt=5"),
}
"""Arguments for a run of two steps on two workers, without a download."""


DATA = Path(os.environ.get("LIGHTNING_SPARSE_DATA", ""))


def needs_data(name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that reads a file or folder of real data."""
    reason = f"set LIGHTNING_SPARSE_DATA to a folder that holds {name} to test with real data"
    return pytest.mark.skipif(not (DATA / name).exists(), reason=reason)


@dataclass
class Fit:
    """The result of training a recipe, on one worker.

    Attributes:
        exchanged: the last step of the sparse exchange, None under plain DDP.
    """

    strategy: type
    world_size: int
    steps: int
    metrics: dict[str, float]
    exchanged: StepStats | None
    num_parameters: int
    hparams: dict[str, Any]


def fit_recipe(*arguments: str) -> Fit | str | int:
    """Train a recipe; return the result, or the exit code or message if it exits early."""
    sys.argv = ["recipes", "fit", *arguments]
    try:
        trainer = main().trainer
    except SystemExit as ended:
        return ended.code
    state, model = getattr(trainer.strategy, "state", None), trainer.lightning_module
    return Fit(
        strategy=type(trainer.strategy),
        world_size=trainer.world_size,
        steps=trainer.global_step,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        exchanged=None if state is None else state.last_step,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        hparams=dict(model.hparams),
    )


def refuse_to_fetch(url: str, path: Path, **_: Any) -> None:
    """Raise the error of a download without a network."""
    reason = "is missing and could not be fetched: no route to host"
    raise MissingDataError(f"{path.name} {reason}. Put the file from {url} at {path}.")


def fit_without_network(folder: str, root: str) -> Fit | str | int:
    """Train a dense recipe on the files below a root, without a network; RANK in the root means the rank."""
    root = root.replace("RANK", os.environ["RANK"])
    source = {RESNET: "cifar10", NCF: "movielens", LSTM: "wikitext2"}[folder]
    with pytest.MonkeyPatch.context() as patches:
        for module in (images, archive, corpus):
            patches.setattr(module, "fetch", refuse_to_fetch)
        arguments = (*SMALL[folder], f"--data.source={source}", f"--data.root={root}")
        return fit_recipe(f"--config={CONFIGS[f'{folder}/dense']}", *arguments)
