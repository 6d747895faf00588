"""Two workers that share one GPU over Gloo train, save and resume. Some rows run on CPUs, to test the test."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_sparse import (
    DDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    TopK,
)
from tests.integration.checkpoints.test_checkpoint import ResumableData, SaveAt
from tests.integration.models import QUIET, WEIGHTS_ONLY, Classifier, Normalized, adam, clones, nesterov, sgd
from tests.workers import run_workers

STOP, END = 4, 9


@dataclass(frozen=True)
class Case:
    """A training; ``is_exact`` if a resumed run equals an uninterrupted run to the last bit."""

    strategy: type
    options: dict[str, Any]
    make_optimizer: Any = nesterov
    num_workers: int = 2
    precision: Any = "32-true"
    is_exact: bool = True


DDP, LOCAL = DDPHardThresholdStrategy, LocalHardThresholdStrategy
DENSITY: dict[str, Any] = {"density": 0.1}
MEANS = {"worker_state": "small"}
CASES = {
    "gathered": Case(DDP, {"threshold": 0.01, "exchange": "gather"}),
    "reduce scatter": Case(DDP, {**DENSITY, "exchange": "reduce_scatter"}),
    "by layer": Case(DDP, {**DENSITY, "granularity": "layer"}),
    "unused": Case(DDP, {**DENSITY, "find_unused_parameters": True}),
    "float8": Case(DDP, {"threshold": 0.01, "value_dtype": "float8"}),
    "16-mixed": Case(DDP, DENSITY, precision="16-mixed"),
    "bf16-true": Case(DDP, DENSITY, precision="bf16-true"),
    "mean residuals": Case(DDP, {"threshold": 0.01, "worker_state": "small"}, is_exact=False),
    "top-k": Case(SparseDDPStrategy, {"sparsifier": TopK(0.1)}),
    "top-k of the model": Case(SparseDDPStrategy, {"sparsifier": TopK(0.1, granularity="model")}),
    "drift": Case(LOCAL, DENSITY, adam),
    "drift, means": Case(LOCAL, {**DENSITY, **MEANS}, adam, is_exact=False),
    "simulated": Case(SimulatedWorkersStrategy, {"sparsifier": TopK(0.1), "num_workers": 3}, sgd, num_workers=1),
}


def _fit(name: str, device: str, save: str | None, resume: str | None) -> tuple[dict[str, Tensor], str]:
    case, weights = CASES[name], dict[str, Tensor]()  # at the end of training, on their device
    last = LambdaCallback(on_train_end=lambda _, module: weights.update(clones(module.named_parameters())))
    # Each worker is a separate node, so that all share a GPU.
    os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"
    num_workers = int(os.environ["WORLD_SIZE"])
    options = case.options
    if case.strategy is not SimulatedWorkersStrategy:
        options = {"process_group_backend": "gloo", **options}
    trainer = Trainer(
        strategy=case.strategy(**options),
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        num_nodes=num_workers,
        precision=case.precision,
        max_steps=END,
        callbacks=[last, *([SaveAt(STOP, save)] if save else [])],
        use_distributed_sampler=False,
        **QUIET,
    )
    model = (Classifier if "unused" in name else Normalized)(case.make_optimizer)
    trainer.fit(model, ResumableData(1000), ckpt_path=resume, **WEIGHTS_ONLY)
    [place] = {weight.device.type for weight in weights.values()}
    return {name: weight.cpu() for name, weight in weights.items()}, place


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in ("gathered", "drift", "simulated")]
    + [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in CASES],
)
def test_a_resumed_run_equals_an_uninterrupted_run(name: str, device: str, tmp_path: Path) -> None:
    case, path = CASES[name], str(tmp_path / "stop.ckpt")
    straight = run_workers(_fit, case.num_workers, name, device, path, None, process_group=False)
    resumed = run_workers(_fit, case.num_workers, name, device, None, path, process_group=False)
    start = Normalized().state_dict()
    for (weights, place), (others, _) in zip(straight, resumed, strict=True):
        assert place == device
        assert any(not torch.equal(weight.float(), start[key]) for key, weight in weights.items())
        for key, weight in weights.items():
            assert weight.isfinite().all()
            assert others[key].isfinite().all()
            if case.is_exact:
                torch.testing.assert_close(others[key], weight, rtol=0, atol=0 if device == "cpu" else 1e-6)
            if case.strategy is not LOCAL:
                assert torch.equal(weight, straight[0][0][key])
