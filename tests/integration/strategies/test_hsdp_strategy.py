"""Sharded replicas train as torch's own HSDP and as plain workers do."""

import functools
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from tests.distributed.drift.drift_simulation import NESTEROV, Simulation, at_least, simulated
from tests.distributed.simulation import Plan, simulate
from tests.integration.models import world_size
from tests.integration.strategies.hsdp_models import (
    DRIFTS,
    GRADIENTS,
    STEPS,
    Manual,
    Numbers,
    Sharded,
    Tensors,
    TensorsWithAdam,
    WithAdam,
    adam,
    build_network,
    fit,
    loss_of,
    make_optimizer,
    replica_batches,
    run_ranks,
    whole_weights,
)
from tests.integration.strategies.hsdp_programs import AS_PLAIN, PROGRAM_STEPS, PROGRAMS

THRESHOLD, LARGEST_DRIFT = 0.03, 0.02


@pytest.mark.slow
@pytest.mark.xdist_group("programs of shards")
@pytest.mark.parametrize("name", PROGRAMS)
def test_sending_everything_equals_torchs_hsdp(name: str) -> None:
    _, _, atol = PROGRAMS[name]
    for weights in trained_in_all_ways():
        ours, drifting, *_ = weights[name]
        native = weights["plain" if name in AS_PLAIN else name][-1]
        torch.testing.assert_close(ours, native, rtol=0, atol=atol)
        if name == "weights in bfloat16":  # rounding dominates: compares the distances from exact training
            assert distance(drifting, weights["plain"][-1]) < 1.5 * distance(native, weights["plain"][-1])
        # Each replica clips its own gradient. The second optimizer's gradient follows the first one's step, which is
        # not averaged yet; test_several_optimizers in test_local_strategy.py has orders that equal DDP.
        elif not name.startswith(("clipping", "two optimizers")):
            # SGD with momentum is linear in the gradients, so averaging weights equals averaging gradients.
            torch.testing.assert_close(drifting, native, rtol=0, atol=atol)


def test_a_closure_keeps_its_place_among_the_arguments_of_a_step() -> None:
    strategy, optimizer = GRADIENTS(), torch.optim.SGD([torch.zeros(1)])
    args, kwargs = strategy._before_any_step(optimizer, ((optimizer, print, 3), {}))
    assert (args[0], callable(args[1]), args[2:], kwargs) == (optimizer, True, (3,), {})
    args, kwargs = strategy._before_any_step(optimizer, ((optimizer,), {"closure": print, "other": 3}))
    assert (args, callable(kwargs["closure"]), kwargs["other"]) == ((optimizer,), True, 3)


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((actual[name].double() - expected[name].double()).abs().max()) for name in actual)


@functools.cache
def trained_in_all_ways() -> Any:
    """Return the weights of every rank after each program; all programs share the processes."""
    return run_ranks(_train_in_all_ways, 4)


def _train_in_all_ways() -> dict[str, list[dict[str, Tensor]]]:
    found: dict[str, list[dict[str, Tensor]]] = {}
    for name, (make, options, _) in PROGRAMS.items():
        strategies: list[Any] = [GRADIENTS(threshold=0.0, replicas=2), DRIFTS(threshold=0.0, replicas=2)]
        if name not in AS_PLAIN:
            strategies.append(ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1))
        found[name] = []
        for strategy in strategies:
            model = make(native=type(strategy) is ModelParallelStrategy)
            try:
                fit(strategy, model, **({"max_steps": PROGRAM_STEPS, "limit_val_batches": 1} | options))
            except Exception as error:
                raise RuntimeError(f"{name}, {type(strategy).__name__}") from error
            found[name].append(whole_weights(model))
    return found


def _train_gradients(make: Any, options: dict[str, Any]) -> Any:
    model = make()
    strategy = GRADIENTS(threshold=THRESHOLD, replicas=2, **options)
    trainer = fit(strategy, model)
    return whole_weights(model.network), model.batches, dict(trainer.callback_metrics), strategy.state.last_step


@pytest.mark.parametrize(("num_ranks", "tensor_parallel_size"), [(4, 1), (4, 2), (8, 2)])
def test_a_threshold_on_gradients_equals_plain_workers(num_ranks: int, tensor_parallel_size: int) -> None:
    make, width = (Sharded, 9) if tensor_parallel_size == 1 else (Tensors, 8)
    results = run_ranks(_train_gradients, num_ranks, make, {"tensor_parallel_size": tensor_parallel_size})
    of_ranks = [batches for _, batches, _, _ in results]
    for rank, batches in enumerate(of_ranks):  # only ranks of tensor parallelism share their data
        is_equal = [torch.equal(mine[0], theirs[0]) for mine, theirs in zip(of_ranks[0], batches, strict=True)]
        assert is_equal == [rank < tensor_parallel_size] * STEPS
    model = build_network(width)
    steps = replica_batches(of_ranks[::tensor_parallel_size], num_ranks // tensor_parallel_size // 2)
    plan = Plan(lambda _, whole: ~(whole.abs() < THRESHOLD))
    records = simulate(model, make_optimizer(model.parameters()), steps, plan)
    for weights, _, metrics, last in results:
        atol = 1e-12 if tensor_parallel_size == 1 else 1e-10
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=atol)
        if tensor_parallel_size > 1:
            continue  # replicated parameters count once per tensor-parallel rank
        assert last.density == pytest.approx(records[-1].density)
        assert metrics["sparse/density"] == pytest.approx(records[-1].density)
        assert metrics["sparse/error_norm"] == pytest.approx(records[-1].error_norm)
        assert metrics["sparse/threshold"] == pytest.approx(THRESHOLD)
        assert metrics["sparse/payload_bytes"] > 0
    assert 0.1 < records[-1].density < 0.9


class WithOutputs(WithAdam):
    """Records an output in each validation, which uses the mean weights of all replicas."""

    def on_fit_start(self) -> None:
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(output_of(self.network))


class ByHand(Manual, WithOutputs):
    pass


SPARSE_LOCO = {"keep_drift": False, "drift_decay": 0.5, "every_n_steps": 2, "outer_optimizer": NESTEROV}
TRAININGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "every step": (WithOutputs, {}),
    "every third step": (WithOutputs, {"every_n_steps": 3}),
    "SparseLoCo with an outer optimizer": (WithOutputs, SPARSE_LOCO),
    "by hand": (partial(ByHand, uses_raw=True), {"every_n_steps": 2}),
    "tensor parallelism": (TensorsWithAdam, {"every_n_steps": 2, "tensor_parallel_size": 2}),
}


def _train_drifts() -> dict[str, Any]:
    results = {}
    for name, (make, options) in TRAININGS.items():
        model, numbers = make(), Numbers()
        trainer = fit(
            DRIFTS(threshold=LARGEST_DRIFT, replicas=2, **options),
            model,
            callbacks=[numbers],
            max_steps=-1,
            max_epochs=1,
            limit_train_batches=STEPS,
            val_check_interval=3,
            limit_val_batches=1,
        )
        results[name] = {
            "weights": torch.cat([weight.flatten() for weight in whole_weights(model.network).values()]),
            "batches": model.batches,
            "outputs": getattr(model, "outputs", None),
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "densities": [step.density for step in numbers.steps],
        }
    return results


def test_drifts_equal_local_training_of_plain_workers() -> None:
    results = run_ranks(_train_drifts, 4)
    for name, (make, options) in TRAININGS.items():
        is_parallel = make is TensorsWithAdam
        models = [build_network(8 if is_parallel else 9) for _ in range(2)]
        optimizers = [adam(model.parameters()) for model in models]
        simulation = Simulation(models, optimizers, at_least(LARGEST_DRIFT), **simulated(options))
        outputs = [output_of(models[0])]  # before training begins
        of_ranks = [of_rank[name]["batches"] for of_rank in results]
        steps = replica_batches(of_ranks[::2], 1) if is_parallel else replica_batches(of_ranks, 2)
        assert len(steps) == STEPS
        for step, batches in enumerate(steps, start=1):
            simulation.step([partial(loss_of, batch=batch) for batch in batches])
            if step % 3 == 0:
                mean_network = build_network(8 if is_parallel else 9)
                nn.utils.vector_to_parameters(simulation.mean(), mean_network.parameters())
                outputs.append(output_of(mean_network))
        expected = [count / (2 * simulation.mean().numel()) for count in simulation.sent]
        for of_rank in results:
            found = of_rank[name]
            atol = 1e-10 if is_parallel else 1e-12
            torch.testing.assert_close(found["weights"], simulation.mean(), rtol=0, atol=atol, msg=in_training(name))
            if not is_parallel:  # replicated parameters count once per tensor-parallel rank
                torch.testing.assert_close(found["outputs"], outputs, rtol=0, atol=atol, msg=in_training(name))
                assert found["densities"] == pytest.approx(expected), name
            assert found["metrics"]["sparse/threshold"] == pytest.approx(LARGEST_DRIFT)
            assert found["metrics"]["sparse/largest_drift"] >= LARGEST_DRIFT
        assert 0.02 < expected[-1] < 0.98


def in_training(name: str) -> Any:
    return lambda text: f"{name}: {text}"


def output_of(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 6, dtype=torch.float64)).detach()
