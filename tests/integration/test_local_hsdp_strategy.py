"""``Trainer(strategy="local_hsdp_hardthreshold")``: replicas of two ranks that step optimizers of their own."""

import copy
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from lightning_sparse import (
    Accordion,
    DensityMonitor,
    ErrorMonitor,
    HSDPHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
    SparseHSDPStrategy,
    SparseLocalHSDPStrategy,
)
from lightning_sparse.exchange.sharded_tensors import like_parameter, whole
from tests.distributed.drift_simulation import Simulation, at_least
from tests.integration.hsdp_models import STEPS, Sharded, Stateless, build_network, data, fit, num_ranks, whole_weights
from tests.integration.models import quiet_trainer
from tests.integration.test_hsdp_modes import Numbers, replica_batches
from tests.workers import run_workers

THRESHOLD = 0.02
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


class WithAdam(Sharded):
    """Notes what it says in validation, with the mean of all replicas' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.said.append(self.network(torch.ones(1, 6, dtype=torch.float64)))

    def configure_optimizers(self) -> Any:
        return adam(self.parameters())


class ByHand(WithAdam):
    """Steps with torch's own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.batches.append(batch)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


TRAININGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "every step": (WithAdam, {}, {}),
    "every third step": (WithAdam, {"every_n_steps": 3}, {"every_n_steps": 3}),
    "applied late": (WithAdam, {"overlap": True, "every_n_steps": 2}, {"is_late": True, "every_n_steps": 2}),
    "SparseLoCo with an outer optimizer": (
        WithAdam,
        {"keep_drift": False, "drift_decay": 0.5, "every_n_steps": 2, "outer_optimizer": NESTEROV},
        {"keep_drift": False, "drift_decay": 0.5, "every_n_steps": 2, "outer": (0.7, 0.9)},
    ),
    "by hand": (ByHand, {"every_n_steps": 2}, {"every_n_steps": 2}),
}


def _train_all() -> dict[str, Any]:
    environment, results = dict(os.environ), {}
    for name, (make, options, _) in TRAININGS.items():
        os.environ.update(environment)
        model, numbers = make(), Numbers()
        strategy = LocalHSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2, **options)
        trainer = fit(
            strategy,
            model,
            callbacks=[numbers],
            max_steps=-1,
            max_epochs=1,
            limit_train_batches=STEPS,
            val_check_interval=3,
            limit_val_batches=1,
        )
        results[name] = {
            "weights": torch.cat([whole(one.detach()).flatten() for one in model.network.parameters()]),
            "batches": model.batches,
            "said": model.said,
            "metrics": {key: float(one) for key, one in trainer.callback_metrics.items()},
            "densities": [one.density for one in numbers.steps],
        }
    return results


def test_it_is_local_training_of_so_many_workers() -> None:
    results = run_workers(_train_all, 4, process_group=False, new=True)
    for name, (_, _, options) in TRAININGS.items():
        models = [build_network() for _ in range(2)]
        optimizers = [adam(one.parameters()) for one in models]
        simulation = Simulation(models, optimizers, at_least(THRESHOLD), **options)
        said = [spoken(models[0])]  # before training begins
        steps = replica_batches([one[name]["batches"] for one in results], 2)
        assert len(steps) == STEPS
        for step, batches in enumerate(steps, start=1):
            simulation.step([partial(loss_of, batch=one) for one in batches])
            if step % 3 == 0:
                double = build_network()
                nn.utils.vector_to_parameters(simulation.mean(), double.parameters())
                said.append(spoken(double))
        for one in results:
            found = one[name]
            torch.testing.assert_close(
                found["weights"], simulation.mean(), rtol=0, atol=1e-12, msg=lambda said, what=name: f"{what}: {said}"
            )
            torch.testing.assert_close(
                found["said"], said, rtol=0, atol=1e-12, msg=lambda said, what=name: f"{what}: {said}"
            )
            elements = found["weights"].numel()
            expected = [count / (2 * elements) for count in simulation.sent]
            assert found["densities"] == pytest.approx(expected[: len(found["densities"])]), name
            assert found["metrics"]["sparse/threshold"] == pytest.approx(THRESHOLD)
            assert found["metrics"]["sparse/largest_drift"] >= THRESHOLD
        assert 0.02 < expected[-1] < 0.98


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def spoken(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 6, dtype=torch.float64)).detach()


# Checkpoints.


class WithBuffers(WithAdam):
    """Has statistics of its batches, and a frozen layer that follows the first by itself, its bias on one rank only."""

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
            self.target = nn.Linear(6, 9, dtype=torch.float64).requires_grad_(False)
            nn.init.zeros_(self.target.weight)
            nn.init.zeros_(self.target.bias)
            for one in (self.norm, self.target):
                fully_shard(one, mesh=self.network[0].weight.device_mesh)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(self.norm(batch[0])), batch[1]) + self.target(batch[0]).mean()

    def on_train_batch_start(self, *_: Any) -> None:
        with torch.no_grad():
            self.target.weight.lerp_(self.network[0].weight.detach(), 0.1)
            if self.target.bias.device_mesh.get_local_rank() == 0:
                self.target.bias.to_local()[0] += 0.1


class Unfrozen(Stateless):
    """Trains its first layer from the fourth step on, also in a process that has just begun."""

    def configure_model(self) -> None:
        super().configure_model()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.network[0].requires_grad_(self.trainer.global_step >= 3)


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "threshold": (WithAdam, {"threshold": THRESHOLD}),
    "density": (WithAdam, {"density": 0.2, "every_n_steps": 2}),
    "share of each layer": (WithAdam, {"density": 0.2, "granularity": "layer"}),
    "buffers": (WithBuffers, {"threshold": THRESHOLD, "every_n_steps": 3}),
    "SparseLoCo": (
        WithAdam,
        {"threshold": THRESHOLD, "keep_drift": False, "every_n_steps": 2, "outer_optimizer": NESTEROV},
    ),
    "late": (WithAdam, {"threshold": THRESHOLD, "overlap": True}),
    "no state": (Stateless, {"threshold": THRESHOLD}),
    "unfrozen": (Unfrozen, {"threshold": THRESHOLD, "outer_optimizer": partial(torch.optim.Adam, lr=0.01)}),
}


class AtStart(Callback):
    """Notes what a replica has when training begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = snapshot(trainer.strategy)


def snapshot(strategy: Any) -> dict[str, Any]:
    """What this rank's replica has, whole."""
    averager = strategy.averager
    parameters, state = averager.parameters, averager.snapshot()

    def wholes(tensors: Any) -> dict[str, Tensor]:
        parts = {name: like_parameter(parameters[name], one.reshape(-1)) for name, one in tensors.items()}
        return {name: whole(one).clone() for name, one in parts.items()}

    own = averager.shared.weights() | averager.shared.own
    [optimizer] = strategy.optimizers
    states = (optimizer.state.get(one, {}).get("exp_avg") for one in parameters.values())
    return {
        "mean": {name: whole(one.detach()).clone() for name, one in parameters.items()},
        "own": wholes({name: one for name, one in own.items() if name in parameters}),
        "anchor": wholes(averager.anchor()),
        "kept": wholes(state.own.get("unsent", {})),
        "outer": {key: wholes(held) for key, held in state.shared.items() if key != "anchor"},
        "momentum": [None if one is None else whole(one).clone() for one in states],
        "buffers": {name: one.clone() for name, one in own.items() if name not in parameters},
        "threshold": averager.sparsifier.threshold,
        "thresholds of layers": dict(averager.sparsifier.of_layers),
        "steps": averager.num_steps,
        "history": state.history["exchange"],
    }


def _train(
    setting: str, replicas: int, epochs: int, save: str | None, resume: str | None, is_folder: bool, **others: Any
) -> dict[str, Any]:
    make, options = SETTINGS[setting]
    model = make()
    strategy = LocalHSDPHardThresholdStrategy(
        replicas=replicas, save_distributed_checkpoint=is_folder, **(options | others)
    )
    witness = AtStart()
    callbacks: list[Callback] = [witness]
    if save is not None:
        folder, _, name = save.rpartition("/")
        name = name.removesuffix(".ckpt")
        callbacks.append(ModelCheckpoint(folder, name, every_n_train_steps=2, save_on_train_epoch_end=False))
    trainer = quiet_trainer(
        strategy,
        num_workers=num_ranks(),
        max_steps=-1,
        max_epochs=epochs,
        limit_train_batches=4,
        callbacks=callbacks,
        enable_checkpointing=save is not None,
    )
    trainer.fit(model, data(), ckpt_path=resume)
    result = snapshot(strategy) | {"at start": witness.seen}
    if save is not None:
        trainer.save_checkpoint(save + ".end")
    return result


def _stop_and_resume(folder: str, is_folder: bool) -> dict[str, list[dict[str, Any]]]:
    environment, results = dict(os.environ), {}
    for name in SETTINGS:
        if issubclass(SETTINGS[name][0], Stateless) and not is_folder:
            continue  # Lightning cannot resume from such a file, with its own strategy neither
        results[name] = []
        path = f"{folder}/{name}.ckpt"
        # All of them save: what travels late has arrived when it is saved.
        for epochs, save, resume in ((2, "a", None), (1, name, None), (2, "b", path), (2, "c", path + ".end")):
            os.environ.update(environment)
            results[name].append(_train(name, 2, epochs, f"{folder}/{save}.ckpt", resume, is_folder))
    return results


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_resume_equals_a_run_without_a_stop(tmp_path: Path, is_folder: bool) -> None:
    results = run_workers(_stop_and_resume, 4, str(tmp_path), is_folder, process_group=False, new=True)
    for of_rank in results:
        for name, (straight, _, *resumed) in of_rank.items():
            for one in resumed:
                for key in straight.keys() - {"at start"}:
                    expected = straight[key]
                    torch.testing.assert_close(
                        one[key], expected, rtol=0, atol=0, msg=lambda said, what=f"{name}: {key}": f"{what}: {said}"
                    )
    own = [one["threshold"][0]["own"]["network.0.weight"] for one in results]
    assert torch.equal(own[0], own[1])
    assert not torch.equal(own[0], own[2])  # each replica has its own
    assert (tmp_path / "threshold.ckpt.end").is_dir() == is_folder


def _resume_elsewhere(folder: str, replicas: int, is_folder: bool) -> dict[str, Any]:
    environment, results = dict(os.environ), {}
    for name in ("threshold", "SparseLoCo"):
        os.environ.update(environment)
        results[name] = _train(name, replicas, 2, None, f"{folder}/{name}.ckpt.end", is_folder)
    return results


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_others_resume(tmp_path: Path, is_folder: bool) -> None:
    saved = run_workers(_save_two, 4, str(tmp_path), is_folder, process_group=False, new=True)
    for ranks, replicas in ((2, 2), (3, 3)):
        results = run_workers(
            _resume_elsewhere, ranks, str(tmp_path), replicas, is_folder, process_group=False, new=True
        )
        for name in ("threshold", "SparseLoCo"):
            of_replicas = [saved[0][name], saved[2][name]]
            for rank, one in enumerate(results):
                at_start = one[name]["at start"]
                expected = of_replicas[rank] if replicas == 2 else averaged(of_replicas)
                for key in ("own", "kept"):
                    torch.testing.assert_close(at_start[key], expected[key], rtol=0, atol=1e-15)
                if replicas == 2:
                    for key in ("anchor", "outer", "momentum"):
                        torch.testing.assert_close(at_start[key], expected[key], rtol=0, atol=0)
                else:
                    torch.testing.assert_close(at_start["anchor"], expected["own"], rtol=0, atol=1e-15)
                    torch.testing.assert_close(at_start["momentum"], of_replicas[0]["momentum"], rtol=0, atol=0)


def _save_two(folder: str, is_folder: bool) -> dict[str, Any]:
    environment, results = dict(os.environ), {}
    for name in ("threshold", "SparseLoCo"):
        os.environ.update(environment)
        results[name] = _train(name, 2, 1, f"{folder}/{name}.ckpt", None, is_folder)
    return results


def averaged(of_replicas: list[dict[str, Any]]) -> dict[str, Any]:
    one, other = of_replicas
    return {key: {name: (one[key][name] + other[key][name]) / 2 for name in one[key]} for key in ("own", "kept")}


# What else a Trainer can do, each once.


def _read_by_another(folder: str) -> Any:
    environment = dict(os.environ)
    expected = _train("threshold", 2, 1, f"{folder}/a.ckpt", None, True)["mean"]
    os.environ.update(environment)
    model = WithAdam()
    trainer = quiet_trainer(
        ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1), num_workers=num_ranks(), max_steps=0
    )
    trainer.fit(model, data(), ckpt_path=f"{folder}/a.ckpt.end")
    return expected, whole_weights(model)


def test_lightnings_own_strategy_reads_the_mean(tmp_path: Path) -> None:
    for expected, found in run_workers(_read_by_another, 4, str(tmp_path), process_group=False, new=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Tensors(WithAdam):
    """Shares the tensors of its first two layers between two ranks."""

    def configure_model(self) -> None:
        if self.network is None:
            self.network = build_network(8)
            assert self.device_mesh is not None
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


def _train_tensors() -> Any:
    model = Tensors()
    strategy = LocalHSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2, tensor_parallel_size=2, every_n_steps=2)
    fit(strategy, model, max_steps=STEPS)
    return flat_weights(model), model.batches


def flat_weights(model: Any) -> Tensor:
    return torch.cat([whole(one.detach()).flatten() for one in model.network.parameters()])


def test_tensor_parallelism_inside_a_replica() -> None:
    results = run_workers(_train_tensors, 4, process_group=False, new=True)
    models = [build_network(8) for _ in range(2)]
    simulation = Simulation(models, [adam(one.parameters()) for one in models], at_least(THRESHOLD), every_n_steps=2)
    for batches in replica_batches([batches for _, batches in results[::2]], 1):
        simulation.step([partial(loss_of, batch=one) for one in batches])
    for weights, _ in results:
        torch.testing.assert_close(weights, simulation.mean(), rtol=0, atol=1e-10)


def _train_logged(folder: str) -> Any:
    model, numbers, monitor = WithAdam(), Numbers(), DensityMonitor()
    trainer = fit(
        LocalHSDPHardThresholdStrategy(density=0.1, calibration_steps=8, replicas=2, every_n_steps=2),
        model,
        callbacks=[monitor, ErrorMonitor(per_layer=True), numbers],
        max_steps=-1,
        max_epochs=24,
        logger=TensorBoardLogger(folder, name="tb"),
        log_every_n_steps=1,
        gradient_clip_val=10.0,
    )
    return {
        "thresholds": [one.threshold for one in numbers.steps],
        "densities": [one.density for one in numbers.steps if not one.is_calibration],
        "dense bytes": {one.dense_bytes for one in numbers.steps},
        "table": monitor.table(),
        "metrics": {name: float(one) for name, one in trainer.callback_metrics.items()},
    }


def test_a_density_is_met_and_everything_is_logged(tmp_path: Path) -> None:
    results = run_workers(_train_logged, 4, str(tmp_path), process_group=False, new=True)
    first = results[0]
    for one in results:
        assert one["thresholds"] == first["thresholds"]
        assert one["densities"] == first["densities"]
    later = first["densities"][len(first["densities"]) // 2 :]
    assert sum(later) / len(later) == pytest.approx(0.1, rel=0.2)
    elements = sum(one.numel() for one in build_network().parameters())
    assert first["dense bytes"] == {2 * 8 * elements}  # of every second step
    assert "bytes sent per replica" in first["table"]
    assert "median dense step" in first["table"]
    assert "median sparse step" in first["table"]
    held = EventAccumulator(str(next((tmp_path / "tb").rglob("events*")).parent))
    held.Reload()
    tags = set(held.Tags()["scalars"])
    assert {"sparse/density", "sparse/error_norm", "sparse/threshold", "sparse/largest_drift"} <= tags


def _train_by_name() -> str:
    trainer = fit("local_hsdp_hardthreshold", WithAdam())
    return f"{type(trainer.strategy).__name__}, density {trainer.strategy.state.last_step.density}"


def test_by_name_a_node_is_a_replica() -> None:
    for said in run_workers(_train_by_name, 2, process_group=False, new=True):
        assert said == "LocalHSDPHardThresholdStrategy, density 1.0"  # there is nobody to exchange with


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "Invalid replicas=0"),
        ({"every_n_steps": 0}, "Invalid every_n_steps=0"),
        ({"drift_checkpoint": "none"}, "Must be one of 'full', 'mean'"),
        ({"optimizer_checkpoint": "mean"}, "Must be one of 'full', 'first'"),
        ({"drift_decay": 0.5}, "keep_drift=False"),
        ({"value_dtype": "float8", "threshold": 0.0}, "float8"),
    ],
)
def test_a_wrong_option_is_told_of_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalHSDPHardThresholdStrategy(**options)


def _validate_first() -> Any:
    environment, results = dict(os.environ), []
    for looks_first in (False, True):
        os.environ.update(environment)
        model = WithAdam()
        strategy = LocalHSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2)
        trainer = quiet_trainer(strategy, num_workers=num_ranks(), max_steps=STEPS)
        if looks_first:
            trainer.validate(model, data(), verbose=False)
        trainer.fit(model, data())
        results.append(flat_weights(model))
    return results


def test_a_validation_before_changes_nothing() -> None:
    for without, after in run_workers(_validate_first, 4, process_group=False, new=True):
        torch.testing.assert_close(after, without, rtol=0, atol=0)


class BreaksOff(Callback):
    """Breaks off the exchange of the fourth step, on all ranks, and saves what is there then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.strategy.state._engine.finish = self.fail

    def fail(self) -> None:
        raise RuntimeError("in the middle")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.anchor = trainer.strategy.averager.anchor()["network.0.weight"].clone()
        trainer.save_checkpoint(self.path)


def _save_what_is_broken(folder: str) -> Any:
    path, environment = f"{folder}/a.ckpt", dict(os.environ)
    breaks = BreaksOff(path)
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(LocalHSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2), WithAdam(), callbacks=[breaks])
    os.environ.update(environment)
    witness = AtStart()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = LocalHSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2)
        trainer = quiet_trainer(strategy, num_workers=num_ranks(), max_steps=6, callbacks=[witness])
        trainer.fit(WithAdam(), data(), ckpt_path=path)
    said = "\n".join(str(one.message) for one in caught)
    return said, witness.seen, breaks.anchor


def test_half_an_exchange_is_not_saved(tmp_path: Path) -> None:
    results = run_workers(_save_what_is_broken, 4, str(tmp_path), process_group=False, new=True)
    assert "holds no drifts (it was saved in the middle of an exchange" in results[0][0]
    for _, seen, anchor in results:
        torch.testing.assert_close(seen["own"], seen["anchor"], rtol=0, atol=0)
        torch.testing.assert_close(seen["own"], results[0][1]["own"], rtol=0, atol=0)
        whole_anchor = seen["anchor"]["network.0.weight"]
        assert any(torch.equal(anchor, one) for one in whole_anchor.split(5))  # of nine rows


def _train_again_and_again() -> list[tuple[int, int]]:
    environment, counts = dict(os.environ), []
    for make in (LocalHSDPHardThresholdStrategy, HSDPHardThresholdStrategy) * 3:
        os.environ.update(environment)
        fit(make(threshold=THRESHOLD, replicas=2), WithAdam(), max_steps=2)
        counts.append((len(_world.pg_map), len(os.listdir("/proc/self/task"))))
    return counts


def test_a_training_after_another_needs_no_more_groups_and_threads() -> None:
    for counts in run_workers(_train_again_and_again, 4, process_group=False, new=True):
        assert len(set(counts)) == 1


class Unfrozen(WithAdam):
    """Trains its first layer from the sixth batch on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.network[0].requires_grad_(True)


class SavesInTheMiddle(WithBuffers):
    """Saves, where it is asked to, between forward and backward."""

    folder: str | None = None

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.folder is not None:
            self.trainer.save_checkpoint(f"{self.folder}/middle.ckpt")


def _save_often(folder: str) -> Any:
    environment, results = dict(os.environ), []
    for make in (Unfrozen, SavesInTheMiddle):
        for saves in (False, True):
            os.environ.update(environment)
            model = make()
            if isinstance(model, SavesInTheMiddle) and saves:
                model.folder = folder
            callbacks = [ModelCheckpoint(folder, every_n_train_steps=1)] if saves and make is Unfrozen else []
            strategy = LocalHSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2, every_n_steps=4)
            fit(strategy, model, callbacks=callbacks, enable_checkpointing=bool(callbacks), max_steps=STEPS)
            results.append(flat_weights(model))
    return results


def test_who_saves_trains_no_other_way(tmp_path: Path) -> None:
    for unfrozen, saved, whole_steps, in_the_middle in run_workers(
        _save_often, 4, str(tmp_path), process_group=False, new=True
    ):
        torch.testing.assert_close(saved, unfrozen, rtol=0, atol=0)
        torch.testing.assert_close(in_the_middle, whole_steps, rtol=0, atol=0)


class Remembers(Callback):
    """Notes what the sparsifier has seen, when training begins and at its end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.at_start = seen_by_sparsifier(trainer.strategy.state)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.at_end = seen_by_sparsifier(trainer.strategy.state)


def seen_by_sparsifier(state: Any) -> Any:
    return copy.deepcopy(state.snapshot().history["sparsifier"])


def _remember(folder: str, is_folder: bool) -> Any:
    environment, results = dict(os.environ), []
    for make in (SparseHSDPStrategy, SparseLocalHSDPStrategy):
        found = []
        for steps, resume in ((3, None), (4, f"{folder}/{make.__name__}.ckpt")):
            os.environ.update(environment)
            witness = Remembers()
            strategy = make(Accordion(interval=1), replicas=2, save_distributed_checkpoint=is_folder)
            trainer = quiet_trainer(strategy, num_workers=num_ranks(), max_steps=steps, callbacks=[witness])
            trainer.fit(WithAdam(), data(), ckpt_path=resume)
            if resume is None:
                trainer.save_checkpoint(f"{folder}/{make.__name__}.ckpt")
            found.append(witness)
        results.append((found[0].at_end, found[1].at_start))
    return results


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_sparsifier_remembers_what_it_saw_of_each_ranks_shards(tmp_path: Path, is_folder: bool) -> None:
    results = run_workers(_remember, 4, str(tmp_path), is_folder, process_group=False, new=True)
    for of_rank in results:
        for saved, resumed in of_rank:
            torch.testing.assert_close(resumed, saved, rtol=0, atol=0)
    for one, other in zip(results[0], results[1], strict=True):
        assert str(one[0]) != str(other[0])  # of other shards
