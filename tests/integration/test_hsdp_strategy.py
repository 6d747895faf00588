"""``Trainer(strategy="hsdp_hardthreshold")``: replicas of two ranks each, against torch's own and plain workers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_sparse import HSDPHardThresholdStrategy
from lightning_sparse.shards.whole_tensors import like_parameter, whole
from tests.distributed.simulation import Plan, simulate
from tests.integration.hsdp_models import (
    STEPS,
    Sharded,
    build_network,
    data,
    fit,
    make_optimizer,
    num_ranks,
    whole_weights,
)
from tests.integration.hsdp_programs import PROGRAMS
from tests.integration.models import quiet_trainer
from tests.workers import run_workers

THRESHOLD = 0.03


def _train(threshold: float, options: dict[str, Any]) -> Any:
    model = Sharded()
    strategy = HSDPHardThresholdStrategy(threshold=threshold, replicas=2)
    trainer = fit(strategy, model, **options)
    return whole_weights(model.network), model.batches, dict(trainer.callback_metrics), strategy.state.last_step


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_held_back_is_torchs_own(name: str) -> None:
    _, _, atol = PROGRAMS[name]
    for native, ours in run_workers(_train_in_both_ways, 4, name, process_group=False, new=True):
        torch.testing.assert_close(ours, native, rtol=0, atol=atol)


def _train_in_both_ways(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    make, options, _ = PROGRAMS[name]
    native, ours = make(native=True), make()
    environment = dict(os.environ)
    fit(ModelParallelStrategy(data_parallel_size=num_ranks(), tensor_parallel_size=1), native, **options)
    os.environ.update(environment)  # of which a Trainer takes its part away at its end
    fit(HSDPHardThresholdStrategy(threshold=0.0, replicas=2), ours, **options)
    return whole_weights(native), whole_weights(ours)


def test_a_threshold_is_that_of_plain_workers() -> None:
    results = run_workers(_train, 4, THRESHOLD, {}, process_group=False, new=True)
    steps = zip(*(batches for _, batches, _, _ in results), strict=True)
    batches = [[tuple(map(torch.cat, zip(*step[i : i + 2], strict=True))) for i in (0, 2)] for step in steps]
    assert len({tuple(one[0].flatten().tolist()) for step in batches for one in step}) == 2 * STEPS  # data of its own
    model = build_network()
    records = simulate(
        model, make_optimizer(model.parameters()), batches, Plan(lambda _, whole: ~(whole.abs() < THRESHOLD))
    )
    for weights, _, metrics, last in results:
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=1e-12)
        assert last.density == pytest.approx(records[-1].density)
        assert metrics["sparse/density"] == pytest.approx(records[-1].density)
        assert metrics["sparse/error_norm"] == pytest.approx(records[-1].error_norm)
        assert metrics["sparse/threshold"] == pytest.approx(THRESHOLD)
        assert metrics["sparse/payload_bytes"] > 0
    assert 0.1 < records[-1].density < 0.9


# Checkpoints.


class AtStart(Callback):
    """Notes every parameter's residual, whole, when training begins."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.threshold: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.residuals = whole_residuals(trainer.strategy.state)
        self.threshold = trainer.strategy.state.sparsifier.threshold


def whole_residuals(exchange: Any) -> dict[str, Tensor]:
    named = exchange.residuals().items()
    return {name: whole(like_parameter(exchange.parameters[name], one)).clone() for name, one in named}


def _train_epochs(
    replicas: int, epochs: int, save: str | None, resume: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    model, witness = Sharded(), AtStart()
    strategy = HSDPHardThresholdStrategy(**({"threshold": THRESHOLD} | options), replicas=replicas)
    trainer = quiet_trainer(
        strategy,
        num_workers=num_ranks(),
        max_steps=-1,
        max_epochs=epochs,
        limit_train_batches=4,
        callbacks=[witness],
    )
    trainer.fit(model, data(), ckpt_path=resume)
    residuals = whole_residuals(strategy.state)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "weights": whole_weights(model.network),
        "residuals": residuals,
        "at start": witness.residuals,
        "threshold": strategy.state.sparsifier.threshold,
        "threshold at start": witness.threshold,
    }


def epochs_of(ranks: int, replicas: int, epochs: int, *, save: Any = None, resume: Any = None, **options: Any) -> Any:
    paths = [None if one is None else str(one) for one in (save, resume)]
    return run_workers(_train_epochs, ranks, replicas, epochs, *paths, options, process_group=False, new=True)


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("options", [{}, {"threshold": None, "density": 0.2}], ids=["threshold", "density"])
def test_a_resume_equals_a_run_without_a_stop(tmp_path: Path, is_folder: bool, options: dict[str, Any]) -> None:
    options = options | {"save_distributed_checkpoint": is_folder}
    one = epochs_of(4, 2, 2, **options)
    epochs_of(4, 2, 1, save=tmp_path / "a.ckpt", **options)
    two = epochs_of(4, 2, 2, resume=tmp_path / "a.ckpt", **options)
    for straight, resumed in zip(one, two, strict=True):
        torch.testing.assert_close(resumed["weights"], straight["weights"], rtol=0, atol=0)
        torch.testing.assert_close(resumed["residuals"], straight["residuals"], rtol=0, atol=0)
        assert resumed["threshold"] == straight["threshold"] == one[0]["threshold"]
    assert (tmp_path / "a.ckpt").is_dir() == is_folder


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (6, 2), (3, 3), (2, 1)])
def test_others_keep_what_is_pending(tmp_path: Path, is_folder: bool, ranks: int, replicas: int) -> None:
    path, options = tmp_path / "a.ckpt", {"save_distributed_checkpoint": is_folder}
    before = epochs_of(4, 2, 1, save=path, **options)
    after = epochs_of(ranks, replicas, 2, resume=path, **options)
    shards = ranks // replicas
    old = [before[0]["residuals"], before[2]["residuals"]]
    for rank, one in enumerate(after):
        mean = {name: (old[0][name] + old[1][name]) / 2 for name in old[0]}
        wanted = old[rank // shards] if replicas == 2 else mean
        torch.testing.assert_close(one["at start"], wanted, rtol=0, atol=1e-15)
    assert max(float(one.abs().max()) for one in old[0].values()) > 0
