from itertools import pairwise

import numpy
import pytest
import torch
from scipy.stats import norm

from lightning_sparse import (
    Accordion,
    Dense,
    GaussianK,
    HardThreshold,
    RandomK,
    ScaledIntegerRounding,
    StochasticRounding,
    TopK,
)
from tests.distributed.simulation import Plan, simulate
from tests.distributed.training import OPTIMIZERS, STEPS, Result, build_batches, build_model, train
from tests.workers import run_workers

THRESHOLD = 0.05


def reaches(threshold):
    return lambda name, p: ~(p.abs() < threshold)


def largest_share(density):
    def select(name, p):
        k = max(1, int(density * p.numel()))
        return p.abs() >= p.abs().flatten().sort(descending=True).values[k - 1]

    return select


def through_bfloat16(values):
    return values.to(torch.bfloat16).to(values.dtype)


def through_float8(values):
    """Four significant bits of multiples of a step, which is the largest power of two up to an eighth of THRESHOLD."""
    scale = 512 * 2.0**-8
    scaled = (values / scale).float().double()  # PyTorch goes by way of float32
    last = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / last).round() * last * scale


SCENARIOS = {
    "gathered": ({"exchange": "gather"}, {}),
    "dense": ({"exchange": "dense"}, {}),
    "auto": ({"exchange": "auto"}, {}),
    "clipped": ({"local_clip_norm": 0.3}, {"clip_norm": 0.3}),
    "learning_rate": ({"error_feedback": "learning_rate", "step_size": 9}, {"feedback": "learning_rate"}),
    "none": ({"error_feedback": "none"}, {"feedback": "none"}),
    "bfloat16": ({"value_dtype": "bfloat16"}, {"round_values": through_bfloat16}),
}
OF_A_THRESHOLD = SCENARIOS | {
    "float8": ({"value_dtype": "float8"}, {"round_values": through_float8}),
}


def assert_matches_simulation(results: list[Result], optimizer_name, plan, step_size=None, steps=STEPS):
    model = build_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size, 0.5) if step_size else None
    records = simulate(model, optimizer, build_batches(len(results), steps=steps), plan, scheduler)
    for result in results:
        for name, expected in model.named_parameters():
            torch.testing.assert_close(result.weights[name], expected.data, rtol=1e-9, atol=1e-11)
        assert [step.step for step in result.steps] == list(range(steps))
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
def test_hard_threshold_in_float64_trains_as_the_simulation_does(scenario, optimizer_name):
    options, plan = OF_A_THRESHOLD[scenario]
    results = run_workers(_train, 3, HardThreshold(threshold=THRESHOLD), optimizer_name, options)
    assert_matches_simulation(results, optimizer_name, Plan(reaches(THRESHOLD), **plan), options.get("step_size"))
    assert results[0].buckets_per_step[0] == 1  # DDP rebuilds its buckets after the first step
    assert results[0].buckets_per_step[-1] > 2


def test_top_k_in_float64_trains_as_the_simulation_does():
    results = run_workers(_train, 3, TopK(0.05), "nesterov", {})
    assert_matches_simulation(results, "nesterov", Plan(largest_share(0.05)))


def largest_of_the_model(density):
    def select(compensated):
        magnitudes = torch.cat([p.abs().flatten() for p in compensated.values()]).sort(descending=True).values
        kth = magnitudes[max(1, int(density * len(magnitudes))) - 1]
        return {name: p.abs() >= kth for name, p in compensated.items()}

    return select


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_top_k_of_the_model_in_float64_trains_as_the_simulation_does(scenario):
    options, plan = SCENARIOS[scenario]
    results = run_workers(_train, 3, TopK(0.05, granularity="model"), "adam", options)
    plan = Plan(None, select_in_model=largest_of_the_model(0.05), **plan)
    assert_matches_simulation(results, "adam", plan, options.get("step_size"))
    assert results[0].buckets_per_step[-1] > 2


def gaussian_share(density):
    def select(name, p):
        layer = p.numpy()
        k = max(1, int(density * layer.size))
        threshold = abs(layer.mean()) + norm.isf(density / 2) * layer.std()
        for _ in range(3):
            count = int((numpy.abs(layer) > threshold).sum())
            if count < 2 * k / 3:
                threshold *= 0.5
            elif count > 4 * k / 3:
                threshold *= 1.5
            else:
                break
        exceeds = numpy.abs(layer) > threshold
        return torch.from_numpy(exceeds if exceeds.any() else numpy.abs(layer) == numpy.abs(layer).max())

    return select


@pytest.mark.parametrize("scenario", ["gathered", "auto", "bfloat16"])
def test_gaussian_k_in_float64_trains_as_the_simulation_does(scenario):
    options, plan = SCENARIOS[scenario]
    results = run_workers(_train, 3, GaussianK(0.05), "nesterov", options)
    assert_matches_simulation(results, "nesterov", Plan(gaussian_share(0.05), **plan))


class AccordionInNumpy:
    """What the authors' code does, in a class of its own: whether each layer's gradients are in a critical regime."""

    def __init__(self, epoch_steps, interval, change):
        self.epoch_steps, self.interval, self.change = epoch_steps, interval, change
        self.norms, self.critical, self.rates, self.regimes = [], {}, [], set()

    def begin_step(self, step, rate):
        if step % self.epoch_steps:
            return
        epoch = step // self.epoch_steps
        if epoch and (epoch - 1) % self.interval == 0:
            norms = {name: float(numpy.linalg.norm(one)) for name, one in self.sums.items()}
            old = self.norms[-1] if self.norms else None
            self.critical = {
                name: old is None or abs(old[name] - norm) / old[name] >= self.change for name, norm in norms.items()
            }
            self.norms.append(norms)
        if self.rates and rate < self.rates[-1]:
            self.critical = {}
        self.rates.append(rate)
        self.sums = {}

    def observe(self, averages):
        for name, average in averages.items():
            self.sums[name] = self.sums.get(name, 0.0) + average.numpy()

    def select(self, name, p):
        is_critical = self.critical.get(name, True)
        self.regimes.add((name, is_critical))
        return largest_share(0.2 if is_critical else 0.05)(name, p)


@pytest.mark.parametrize(("interval", "change", "step_size"), [(1, 0.1, None), (2, 0.2, None), (1, 9.0, 14)])
def test_accordion_in_float64_trains_as_the_simulation_does(interval, change, step_size):
    other = AccordionInNumpy(4, interval, change)
    options = {"epoch_steps": 4, "step_size": step_size}
    results = run_workers(_train, 3, Accordion(0.05, 0.2, interval, change), "nesterov", options)
    assert_matches_simulation(
        results, "nesterov", Plan(other.select, observe=other.observe, begin_step=other.begin_step), step_size
    )
    assert {is_critical for _, is_critical in other.regimes} == {True, False}
    if change < 1:
        assert len(set(other.critical.values())) == 2 or len(other.regimes) > len(other.critical) + 1


@pytest.mark.parametrize("exchange", ["auto", "gather", "dense"])
@pytest.mark.parametrize("same_on_all", [True, False])
def test_random_k_in_float64_trains_as_workers_do_that_send_what_it_chose(same_on_all, exchange):
    options = {"record_history": True, "exchange": exchange}
    results = run_workers(_train, 3, RandomK(0.2, same_on_all=same_on_all), "adam", options)
    # What was sent has no residual, and everything else has one: no gradient here is zero.
    masks = [
        {name: (residual == 0).view(weights[name].shape) for name, residual in residuals.items()}
        for of_workers in list(zip(*(result.history for result in results), strict=True))[1:]  # after each step
        for weights, residuals in of_workers
    ]
    chosen = iter(masks)
    assert_matches_simulation(results, "adam", Plan(None, select_in_model=lambda compensated: next(chosen)))
    assert next(chosen, None) is None
    last = [torch.cat([mask.flatten() for mask in one.values()]) for one in masks[-3:]]
    assert torch.equal(last[0], last[1]) == torch.equal(last[0], last[2]) == same_on_all
    assert not torch.equal(last[0], torch.cat([mask.flatten() for mask in masks[-6].values()]))  # the step before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_dtype": "int8"},
        {"value_dtype": "int8", "exchange": "dense"},
        {"value_dtype": "int8", "exchange": "gather"},
    ],
)
def test_scaled_integer_rounding_in_float64_trains_as_the_simulation_does(options):
    step = 2.0**-4  # the largest power of two up to 0.1

    def rounded(values):
        return torch.round(values / step) * step

    results = run_workers(_train, 3, ScaledIntegerRounding(0.1), "nesterov", options)
    assert_matches_simulation(results, "nesterov", Plan(lambda name, p: rounded(p) != 0, round_values=rounded))


@pytest.mark.parametrize("options", [{}, {"value_dtype": "int8", "exchange": "gather"}])
def test_stochastic_rounding_in_float64_keeps_less_than_a_step_and_loses_nothing(options):
    step = 2.0**-5
    results = run_workers(_train, 3, StochasticRounding(0.05), "nesterov", options | {"record_history": True})
    model = build_model()
    parameters, optimizer = dict(model.named_parameters()), OPTIMIZERS["nesterov"](model.parameters())
    for number, batches in enumerate(build_batches(3)):
        sent = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in parameters.items()}
        for result, (inputs, targets) in zip(results, batches, strict=True):
            before, after = result.history[number][1], result.history[number + 1][1]
            model.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            for name, p in parameters.items():
                out = before[name] + p.grad.flatten() - after[name]
                assert (after[name].abs() < step).all()
                torch.testing.assert_close(out / step, (out / step).round(), rtol=0, atol=1e-9)
                sent[name] += out / 3
        for name, p in parameters.items():
            p.grad = sent[name].view(p.shape)
        optimizer.step()
        for name, p in parameters.items():
            torch.testing.assert_close(results[0].history[number + 1][0][name], p.data, rtol=1e-9, atol=1e-11)
    kept = [torch.cat(list(result.history[-1][1].values())) for result in results]
    assert not torch.equal(kept[0], kept[1])


def test_dense_in_float64_trains_as_plain_workers_do():
    results = run_workers(_train, 3, Dense(), "adam", {})
    model = build_model()
    simulate(model, OPTIMIZERS["adam"](model.parameters()), build_batches(3), Plan(lambda name, p: p == p))
    for result in results:
        for name, expected in model.named_parameters():
            torch.testing.assert_close(result.weights[name], expected.data, rtol=1e-9, atol=1e-11)
        assert {(step.density, step.error_norm) for step in result.steps} == {(1.0, 0.0)}


@pytest.mark.parametrize(("control", "changes"), [("calibrate", 0), ("hold", STEPS - 6)])
def test_a_calibrated_threshold_stays_or_is_corrected_alike_on_all(control, changes):
    sparsifier = HardThreshold(density=0.1, calibration_steps=5)
    first, *others = run_workers(_train, 3, sparsifier, "nesterov", {"density_control": control})
    thresholds = [step.threshold for step in first.steps[5:]]
    assert sum(one != other for one, other in pairwise(thresholds)) == changes
    assert all([step.threshold for step in other.steps[5:]] == thresholds for other in others)


def test_multiples_of_a_step_come_to_the_same_bits_on_every_route():
    weights = []
    for exchange in ("gather", "reduce_scatter", "dense", "auto"):
        options = {"exchange": exchange, "value_dtype": "float8"}
        weights += [
            one.weights
            for one in run_workers(_train, 3, HardThreshold(threshold=0.01), "nesterov", options, torch.float32)
        ]
    for name, weight in weights[0].items():
        assert all(torch.equal(weight, other[name]) for other in weights[1:]), name


def _train(sparsifier, optimizer_name, options, dtype=torch.float64):
    return train(sparsifier, optimizer_name, dtype, **options)
