"""``Trainer(strategy="hsdp_hardthreshold")``: replicas of two ranks each, against torch's own and plain workers."""

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_sparse import HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy
from lightning_sparse.exchange.sharded_tensors import like_parameter, whole
from tests.distributed.simulation import Plan, simulate
from tests.integration.hsdp_models import (
    STEPS,
    Sharded,
    Stateless,
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


LOST_BY_TORCH = {"an optimizer of its own": "manual, torch's optimizer"}
"""Where torch's own way goes wrong, and a program that trains as it should: its validation leaves the last layer
gathered, and an optimizer made after that steps on what has no gradient."""


@pytest.mark.full
@pytest.mark.xdist_group("programs of shards")
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_held_back_is_torchs_own(name: str) -> None:
    _, _, atol = PROGRAMS[name]
    for weights in trained_in_all_ways():
        _, ours, drifting = weights[name]
        native, _, _ = weights[LOST_BY_TORCH.get(name, name)]
        torch.testing.assert_close(ours, native, rtol=0, atol=atol)
        if name == "weights in bfloat16":  # where rounding is much, as far from exact training as torch's own
            exact, _, _ = weights["plain"]
            assert distance(drifting, exact) < 1.5 * distance(native, exact)
        elif not name.startswith("clipping"):  # each replica clips its own
            # Of SGD with momentum: all that becomes of a gradient is linear, also where each replica has its own.
            torch.testing.assert_close(drifting, native, rtol=0, atol=atol)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@functools.cache
def trained_in_all_ways() -> Any:
    """What every rank has after each program, one after the other in the same processes."""
    return run_workers(_train_in_all_ways, 4, process_group=False, new=True)


def _train_in_all_ways() -> dict[str, tuple[dict[str, Tensor], ...]]:
    return {name: _train_program_in_all_ways(name) for name in PROGRAMS}


def _train_program_in_all_ways(name: str) -> tuple[dict[str, Tensor], ...]:
    make, options, _ = PROGRAMS[name]
    native, ours, drifting = make(native=True), make(), make()
    environment = dict(os.environ)
    for model, strategy in (
        (native, ModelParallelStrategy(data_parallel_size=num_ranks(), tensor_parallel_size=1)),
        (ours, HSDPHardThresholdStrategy(threshold=0.0, replicas=2)),
        (drifting, LocalHSDPHardThresholdStrategy(threshold=0.0, replicas=2)),
    ):
        try:
            fit(strategy, model, **options)
        except Exception as error:
            raise RuntimeError(f"{name}, {type(strategy).__name__}") from error
        finally:
            os.environ.update(environment)  # of which a Trainer takes its part away at its end
    return whole_weights(native), whole_weights(ours), whole_weights(drifting)


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
        self.history: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.residuals = whole_residuals(trainer.strategy.state)
        self.threshold = trainer.strategy.state.sparsifier.threshold
        self.history = trainer.strategy.state.snapshot().history["exchange"]


def whole_residuals(exchange: Any) -> dict[str, Tensor]:
    named = exchange.snapshot().own["residual"].items()
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
        "history": strategy.state.snapshot().history["exchange"],
        "history at start": witness.history,
    }


def epochs_of(ranks: int, replicas: int, epochs: int, *, save: Any = None, resume: Any = None, **options: Any) -> Any:
    paths = [None if one is None else str(one) for one in (save, resume)]
    return run_workers(_train_epochs, ranks, replicas, epochs, *paths, options, process_group=False, new=True)


def _train_stop_and_resume(path: str, options: dict[str, Any]) -> Any:
    environment, results = dict(os.environ), []
    for epochs, save, resume in ((2, None, None), (1, path, None), (2, None, path)):
        os.environ.update(environment)
        results.append(_train_epochs(2, epochs, save, resume, options))
    return results


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(
    "options",
    [{}, {"threshold": None, "density": 0.2}, {"threshold": None, "density": 0.2, "granularity": "layer"}],
    ids=["threshold", "density", "share of each layer"],
)
def test_a_resume_equals_a_run_without_a_stop(tmp_path: Path, is_folder: bool, options: dict[str, Any]) -> None:
    path = tmp_path / "a.ckpt"
    options = options | {"save_distributed_checkpoint": is_folder}
    found = run_workers(_train_stop_and_resume, 4, str(path), options, process_group=False, new=True)
    for straight, saved, resumed in found:
        assert resumed["threshold at start"] == saved["threshold"]
        assert resumed["history at start"] == saved["history"]  # of each rank's own shards
        torch.testing.assert_close(resumed["weights"], straight["weights"], rtol=0, atol=0)
        torch.testing.assert_close(resumed["residuals"], straight["residuals"], rtol=0, atol=0)
        assert resumed["threshold"] == straight["threshold"] == found[0][0]["threshold"]
    assert path.is_dir() == is_folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Path, Any]]:
    """Returns what a run saved as a folder or as one file, and what its ranks had."""

    @functools.cache
    def save(is_folder: bool) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp("saved") / "a.ckpt"
        return path, epochs_of(4, 2, 1, save=path, save_distributed_checkpoint=is_folder)

    return save


@pytest.mark.xdist_group("checkpoints of shards")
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (6, 2), (3, 3), (2, 1)])
def test_others_keep_what_is_pending(saved: Any, is_folder: bool, ranks: int, replicas: int) -> None:
    path, before = saved(is_folder)
    after = epochs_of(ranks, replicas, 2, resume=path, save_distributed_checkpoint=is_folder)
    shards = ranks // replicas
    old = [before[0]["residuals"], before[2]["residuals"]]
    for rank, one in enumerate(after):
        mean = {name: (old[0][name] + old[1][name]) / 2 for name in old[0]}
        wanted = old[rank // shards] if replicas == 2 else mean
        torch.testing.assert_close(one["at start"], wanted, rtol=0, atol=1e-15)
    assert max(float(one.abs().max()) for one in old[0].values()) > 0


class Narrower(Sharded):
    """Layers of other sizes but for the last."""

    def make_network(self) -> Any:
        return build_network(width=8)


class RestoresResiduals(Callback):
    """Restores from the checkpoint of another model when training begins."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        meta = f"{self.path}/meta.pt" if os.path.isdir(self.path) else self.path
        content = torch.load(meta, weights_only=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.strategy._restore(content, path=Path(self.path))
        self.messages = [str(warning.message) for warning in caught]
        self.residuals = whole_residuals(trainer.strategy.state)


def _restore_narrower(path: str) -> tuple[list[str], dict[str, Tensor]]:
    callback = RestoresResiduals(path)
    fit(HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2), Narrower(), callbacks=[callback], max_steps=1)
    return callback.messages, callback.residuals


@pytest.mark.xdist_group("checkpoints of shards")
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_changed_model_keeps_what_fits_and_names_the_norm_of_the_rest(saved: Any, is_folder: bool) -> None:
    path, before = saved(is_folder)
    results = run_workers(_restore_narrower, 4, str(path), process_group=False, new=True)
    lost = ["network.0.bias", "network.0.weight", "network.2.weight"]
    norm = sum(float(before[0]["residuals"][name].square().sum()) for name in lost) ** 0.5
    [message] = [told for told in results[0][0] if "the model is not the one of the checkpoint" in told]
    told_lost, told_new = message.split("Not in the checkpoint, so their residuals start from zero: ")
    assert f"so their residuals (norm {norm:.3g}) are lost: " in told_lost
    assert all(name in told_lost and name in told_new for name in lost), message
    for rank, (_, residuals) in enumerate(results):
        kept = before[2 * (rank // 2)]["residuals"]
        for name, residual in residuals.items():
            expected = torch.zeros_like(residual) if name in lost else kept[name]
            torch.testing.assert_close(residual, expected, rtol=0, atol=0)


def _save_often(folder: str) -> Any:
    environment, results = dict(os.environ), []
    for callbacks in ([], [ModelCheckpoint(folder, every_n_train_steps=1)]):
        os.environ.update(environment)
        model = Stateless()
        strategy = HSDPHardThresholdStrategy(density=0.2, replicas=2)
        fit(strategy, model, callbacks=callbacks, enable_checkpointing=bool(callbacks))
        results.append((whole_weights(model), whole_residuals(strategy.state), strategy.state.last_step))
    return results


def test_who_saves_trains_no_other_way(tmp_path: Path) -> None:
    """torch steps an optimizer that has no state on gradients of zero, to have one to save."""
    for quiet, saved in run_workers(_save_often, 4, str(tmp_path), process_group=False, new=True):
        torch.testing.assert_close(saved[:2], quiet[:2], rtol=0, atol=0)
        assert saved[2] == quiet[2]
