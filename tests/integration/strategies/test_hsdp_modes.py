"""Features of a Trainer with sharded replicas, beyond those of torch's own HSDP."""

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard

from lightning_sparse import DensityMonitor, ErrorMonitor
from tests.integration.models import OptimizerWrapper, assert_equal, quiet_trainer, warnings_of
from tests.integration.strategies.hsdp_models import (
    DRIFTS,
    GRADIENTS,
    STEPS,
    Manual,
    Numbers,
    Sharded,
    WithAdam,
    build_network,
    data,
    fit,
    make_optimizer,
    on_ranks,
    run_ranks,
    whole_weights,
)
from tests.workers import of_all_workers

THRESHOLD = 0.03


class Infinite(Sharded):
    """Has an infinite gradient on one rank, once."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        is_infinite = dist.get_rank() == 3 and len(self.batches) == 4
        return loss * float("inf") if is_infinite else loss


@on_ranks(4)
def test_an_infinite_gradient_reaches_all_ranks_in_the_same_step() -> None:
    model, numbers = Infinite(), Numbers()
    fit(GRADIENTS(threshold=THRESHOLD, replicas=2), model, callbacks=[numbers])
    assert [step.non_finite > 0 for step in numbers.steps].index(True) == 3
    assert numbers.weights[:4] == [True, True, True, False]


LOGGED: dict[str, tuple[Any, Any, int, dict[str, Any], float]] = {
    "drifts": (DRIFTS, WithAdam, 12, {"every_n_steps": 2}, 0.2),
    "gradients": (GRADIENTS, Sharded, 12, {}, 0.35),  # few exchanges, so the controller adjusts λ slowly
}


def _train_logged(name: str) -> Any:
    kind, make, max_epochs, options, _ = LOGGED[name]
    model, numbers, monitor = make(), Numbers(), DensityMonitor()
    trainer = fit(
        kind(density=0.1, replicas=2, **options),
        model,
        max_steps=-1,
        max_epochs=max_epochs,
        limit_val_batches=1,
        callbacks=[monitor, ErrorMonitor(per_layer=True), numbers],
    )
    logged = set(trainer.callback_metrics)
    trainer.validate(model, data(), verbose=False)  # a validation after fit moves the module to its device
    return {
        "thresholds": [step.threshold for step in numbers.steps],
        "densities": [step.density for step in numbers.steps if not step.is_calibration],
        "dense bytes": {step.dense_bytes for step in numbers.steps},
        "layers": set(numbers.steps[-1].layers),
        "table": monitor.table(),
        "logged": logged,
    }


@pytest.mark.parametrize("name", ["drifts", pytest.param("gradients", marks=pytest.mark.slow)])
def test_the_density_is_reached_and_all_numbers_are_logged(name: str) -> None:
    results = run_ranks(_train_logged, 4, name)
    _, _, _, options, tolerance = LOGGED[name]
    first = results[0]
    for result in results:
        assert result["thresholds"] == first["thresholds"]
        assert result["densities"] == first["densities"]
    for words in ("bytes sent per replica", "median step", "waited for the exchange"):
        assert words in first["table"]
    later = first["densities"][len(first["densities"]) // 2 :]
    assert len(later) > 20
    assert sum(later) / len(later) == pytest.approx(0.1, rel=tolerance)
    network = build_network()
    elements = sum(parameter.numel() for parameter in network.parameters())
    assert first["dense bytes"] == {8 * elements * options.get("every_n_steps", 1)}
    assert first["layers"] == {f"network.{layer}" for layer, _ in network.named_parameters()}
    assert {"sparse/density", "sparse/error_norm", "sparse/threshold", "sparse/payload_bytes"} <= first["logged"]
    assert ("sparse/largest_drift" in first["logged"]) == (name == "drifts")


class Empty(Sharded):
    """Is built on the meta device, and gets its first weights on each rank."""

    def configure_model(self) -> None:
        if self.network is None:
            with torch.device("meta"):
                super().configure_model()
            torch.manual_seed(dist.get_rank())

    def on_fit_start(self) -> None:
        self.at_start = whole_weights(self.network)


@on_ranks(4)
def test_replicas_start_equal_after_separate_initialisation() -> None:
    model = Empty()
    fit(GRADIENTS(threshold=0.0, replicas=2), model)
    first, *others = of_all_workers(model.at_start)
    for other in others:
        assert_equal(other, first)


@on_ranks(4)
def test_a_validation_before_fit_changes_nothing() -> None:
    results = []
    for validates_first in (False, True):
        model = WithAdam()
        trainer = quiet_trainer(DRIFTS(threshold=THRESHOLD, replicas=2), max_steps=STEPS)
        if validates_first:
            trainer.validate(model, data(), verbose=False)
        trainer.fit(model, data())
        results.append(whole_weights(model))
    assert_equal(*results)


@on_ranks(4)
def test_a_second_training_needs_no_more_groups_or_threads() -> None:
    counts = []
    for kind in (DRIFTS, GRADIENTS) * 3:
        trainer = fit(kind(threshold=THRESHOLD, replicas=2), WithAdam(), max_steps=2)
        counts.append((len(_world.pg_map), len(os.listdir("/proc/self/task"))))
    assert len(set(counts)) == 1
    groups = trainer.strategy.device_mesh.get_all_groups()  # with two threads, gathers of shards may corrupt memory
    assert [group._get_backend(torch.device("cpu")).options._threads for group in groups] == [2, 1, 1]


# Rejected configurations.


class Forgotten(Sharded):
    """Shards only its first layer, nothing, or all layers over several replicas."""

    def __init__(self, shards: str) -> None:
        super().__init__()
        self.shards = shards

    def configure_model(self) -> None:
        if self.network is None:
            self.network = build_network()
            assert self.device_mesh is not None
            if self.shards == "first":
                fully_shard(self.network[0], mesh=self.device_mesh["data_parallel"])
            elif self.shards == "everywhere":
                fully_shard(self.network)


@pytest.mark.parametrize(
    ("make", "strategy_options", "options", "message"),
    [
        (partial(Forgotten, "first"), {}, {}, "network.2.weight is not sharded"),
        (partial(Forgotten, "nothing"), {}, {}, "network.0.weight is not sharded"),
        (partial(Forgotten, "everywhere"), {}, {}, "over ranks of several replicas"),
        (Sharded, {"replicas": 3}, {}, "4 ranks, which cannot form 3 replicas"),
        (Sharded, {"tensor_parallel_size": 4}, {}, "4 ranks, which cannot form 2 replicas of equal size with"),
        (Sharded, {}, {"precision": "16-mixed"}, "Choose a different precision"),
        (Sharded, {}, {"precision": "64-true"}, "Choose a different precision"),
        (Sharded, {}, {"is_scaled": True}, "Scaled losses (precision='16-mixed') are not supported"),
        (Sharded, {"threshold": [0.1, 0.1, 0.2, 0.2]}, {}, "workers differ in"),
        (Sharded, {"threshold": [0.1, 0.2]}, {}, "workers differ in"),
        (Sharded, {"save_distributed_checkpoint": [True, False]}, {}, "in one file: rank 0: False"),
        (Sharded, {"threshold": [0.2, 0.1, 0.1, 0.1]}, {}, "rank 3: 0.1"),
    ],
)
@on_ranks(4)
def test_unsupported_configurations_raise(make: Any, strategy_options: Any, options: Any, message: str) -> None:
    rank = int(os.environ["RANK"])
    of_rank = {
        name: value[rank % len(value)] if isinstance(value, list) else value for name, value in strategy_options.items()
    }
    if options.pop("is_scaled", False):
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:  # compared below, as plain text
        fit(GRADIENTS(**({"threshold": THRESHOLD, "replicas": 2} | of_rank)), make(), **options)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", [GRADIENTS, DRIFTS])
@on_ranks(2)
def test_a_node_is_a_replica_for_a_strategy_by_name(kind: Any) -> None:
    name = {GRADIENTS: "hsdp_hardthreshold", DRIFTS: "local_hsdp_hardthreshold"}[kind]
    strategy = fit(name, WithAdam()).strategy
    assert type(strategy) is kind
    assert tuple(strategy.device_mesh.shape) == (1, 2, 1)
    assert strategy.state.last_step.density == 1.0  # a single replica exchanges nothing


class ByHand(Sharded):
    """Updates its weights without an optimizer."""

    def __init__(self, *, averages: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.averages = averages

    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.averages:
            self.trainer.strategy.state.average_gradients()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.01 * parameter.grad


ONE_EPOCH = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4}


@on_ranks(4)
def test_updates_by_hand_cause_advice() -> None:
    found = []
    for averages in (False, True):
        model = ByHand(averages=averages)
        messages: list[str] = []
        with warnings_of(messages):
            fit(GRADIENTS(threshold=THRESHOLD, replicas=2), model, **ONE_EPOCH)
        found.append((whole_weights(model), "\n".join(messages)))
    (_, text_without), (weights, text) = found
    if dist.get_rank() == 0:
        assert "in 4 batches no torch.optim.Optimizer stepped" in text_without
    assert "no torch.optim.Optimizer" not in text
    assert_equal(weights, of_all_workers(weights)[0])


class Sleeping(Sharded):
    """Sleeps on one rank until the others have raised, at most 12 seconds."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def loss(self, batch: Any) -> Tensor:
        if dist.get_rank() == 3 and len(self.batches) == 3:
            deadline = time.monotonic() + 12
            while len(os.listdir(self.folder)) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
        return super().loss(batch)


@pytest.mark.full
@on_ranks(4)
def test_a_wait_beyond_the_timeout_raises(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        fit(GRADIENTS(threshold=0.0, replicas=2, timeout=timedelta(seconds=3)), Sleeping(tmp_path))
    (tmp_path / str(dist.get_rank())).touch()
    assert dist.get_rank() == 3 or 3 <= time.monotonic() - started < 11


class Wrapped(Sharded):
    def configure_optimizers(self) -> Any:
        return OptimizerWrapper(make_optimizer(self.parameters()))


class WrappedAndUnknown(Manual, Wrapped):
    """Steps with a wrapper of an optimizer, unknown to the Trainer."""


@on_ranks(4)
def test_a_wrapped_optimizer_exchanges_once_per_step() -> None:
    for make in (Wrapped, partial(WrappedAndUnknown, uses_raw=True)):
        numbers = Numbers()
        fit(GRADIENTS(threshold=THRESHOLD, replicas=2), make(), **ONE_EPOCH, callbacks=[numbers])
        assert len(numbers.steps) == 4
