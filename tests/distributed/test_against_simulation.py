from functools import partial

import pytest
import torch

from lightning_sparse import HardThreshold, ScaledIntegerRounding, TopK
from tests.distributed.simulation import Plan, simulate, through_float8
from tests.distributed.training import OPTIMIZERS, STEPS, Result, build_batches, build_model, train
from tests.workers import run_workers

THRESHOLD = 0.05


def reaches(threshold):
    return lambda name, p: ~(p.abs() < threshold)


def through_bfloat16(values):
    return values.to(torch.bfloat16).to(values.dtype)


SCENARIOS = {
    "gathered": ({"exchange": "gather"}, {}),
    "dense": ({"exchange": "dense"}, {}),
    "auto": ({"exchange": "auto"}, {}),
    "clipped": ({"local_clip_norm": 0.3}, {"clip_norm": 0.3}),
    "a falling learning rate": ({"step_size": 9}, {}),
    "bfloat16": ({"value_dtype": "bfloat16"}, {"round_values": through_bfloat16}),
}
STEP = 2.0**-8
"""The step of float8: the largest power of two up to an eighth of THRESHOLD."""
OF_A_THRESHOLD = SCENARIOS | {
    "overshoot": ({"exchange": "gather"}, {"round_values": lambda p: p + 0.5 * THRESHOLD * p.sign()}),
    "overshoot, dense": ({"exchange": "dense"}, {"round_values": lambda p: p + 0.5 * THRESHOLD * p.sign()}),
    "float8": ({"value_dtype": "float8"}, {"round_values": partial(through_float8, scale=512 * STEP)}),
}


def assert_matches_simulation(results: list[Result], optimizer_name, plan, step_size=None, rtol=1e-9):
    model = build_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size, 0.5) if step_size else None
    records = simulate(model, optimizer, build_batches(len(results)), plan, scheduler)
    for result in results:
        for name, expected in model.named_parameters():
            torch.testing.assert_close(result.weights[name], expected.data, rtol=rtol, atol=rtol / 100)
            assert torch.equal(result.weights[name], results[0].weights[name])
        assert [step.step for step in result.steps] == list(range(STEPS))
        for step, record in zip(result.steps, records, strict=True):
            assert step.density == pytest.approx(record.density, rel=1e-12, abs=0)
            assert step.error_norm == pytest.approx(record.error_norm, rel=1e-9, abs=1e-12)
            layer_density = {name: layer.density for name, layer in step.layers.items()}
            assert layer_density == pytest.approx(record.layer_density, rel=1e-12, abs=0)
    densities = [record.density for record in records]
    assert 0.001 < sum(densities) / len(densities) < 0.9  # neither nothing nor everything was sent


@pytest.mark.parametrize(
    ("scenario", "optimizer_name"), [*((name, "nesterov") for name in OF_A_THRESHOLD), ("auto", "adam")]
)
def test_hard_threshold_in_float64_equals_the_simulation(scenario, optimizer_name):
    options, plan = OF_A_THRESHOLD[scenario]
    sparsifier = HardThreshold(threshold=THRESHOLD, overshoot=0.5 if "overshoot" in scenario else 0.0)
    results = run_workers(partial(train, sparsifier, optimizer_name, **options), 3)
    assert_matches_simulation(results, optimizer_name, Plan(reaches(THRESHOLD), **plan), options.get("step_size"))
    assert results[0].buckets_per_step[0] == 1  # DDP rebuilds its buckets after the first step
    assert results[0].buckets_per_step[-1] > 2


def largest_of_the_model(density):
    def select(compensated):
        magnitudes = torch.cat([p.abs().flatten() for p in compensated.values()]).sort(descending=True).values
        kth = magnitudes[max(1, int(density * len(magnitudes))) - 1]
        return {name: p.abs() >= kth for name, p in compensated.items()}

    return select


@pytest.mark.parametrize("scenario", ["auto", "clipped", "a falling learning rate"])
def test_top_k_of_the_model_in_float64_equals_the_simulation(scenario):
    options, plan = SCENARIOS[scenario]
    results = run_workers(partial(train, TopK(0.05, granularity="model"), "adam", **options), 3)
    plan = Plan(None, select_in_model=largest_of_the_model(0.05), **plan)
    assert_matches_simulation(results, "adam", plan, options.get("step_size"))
    assert results[0].buckets_per_step[-1] > 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_dtype": "int8"},
        {"value_dtype": "int8", "exchange": "dense"},
        {"value_dtype": "int8", "exchange": "gather"},
    ],
)
def test_scaled_integer_rounding_in_float64_equals_the_simulation(options):
    step = 2.0**-4  # the largest power of two up to 0.1

    def rounded(values):
        return torch.round(values / step) * step

    results = run_workers(partial(train, ScaledIntegerRounding(0.1), "nesterov", **options), 3)
    assert_matches_simulation(results, "nesterov", Plan(lambda name, p: rounded(p) != 0, round_values=rounded))
