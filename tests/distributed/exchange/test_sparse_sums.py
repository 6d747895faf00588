"""Laws of ``exchange="sparse_sums"``: small sums stay in the residual of the worker of their slice."""

import os
from dataclasses import dataclass
from math import inf, nan, sqrt

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import HardThreshold, TopK, register_comm_hook
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.exchange.routes import cost_model
from tests.distributed.training import Weights
from tests.workers import of_all_workers, on_workers, run_workers


@dataclass(frozen=True)
class Case:
    """A random training; ``scales`` are factors on the gradients of each step."""

    num_workers: int = 3
    sizes: tuple[int, ...] = (40, 7)
    threshold: float = 1.0
    scales: tuple[float, ...] = (1.0, 0.3, 1.0, 0.0, 5.0, 1.0)
    dtype: torch.dtype = torch.float64
    overshoot: float = 0.0
    value_dtype: str = "float32"
    per_layer: bool = False


@st.composite
def cases(draw):
    return Case(
        num_workers=draw(st.integers(1, 4)),
        sizes=tuple(draw(st.lists(st.sampled_from([1, 2, 7, 200, 5000]), min_size=1, max_size=4))),
        threshold=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        scales=tuple(draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 20.0]), min_size=1, max_size=8))),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        overshoot=draw(st.sampled_from([0.0, 0.0, 0.6])),
        value_dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        per_layer=draw(st.booleans()),
    )


def gradient(case, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [case.scales[step] * torch.randn(size, generator=generator, dtype=torch.float64) for size in case.sizes]


def trainer_of(case, **options):
    """Return the state of a DDP module, and a function that trains a step on gradients and returns the averages."""
    module = Weights(**{f"weight{place}": torch.zeros(size, dtype=case.dtype) for place, size in enumerate(case.sizes)})
    model = DistributedDataParallel(module, **options)
    sparsifier = HardThreshold(threshold=case.threshold, overshoot=case.overshoot)
    exchange_options = GradientOptions(exchange="sparse_sums", value_dtype=case.value_dtype)
    state = register_comm_hook(model, sparsifier, exchange_options, per_layer_stats=case.per_layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(moves):
        optimizer.zero_grad()
        model(*moves).backward()
        averages = [weight.grad.clone() for weight in module.parameters()]
        optimizer.step()
        return averages

    return state, step


def run_case(case):
    """Return the average, the residual and the statistics of every step on this worker."""
    state, train = trainer_of(case)
    history = []
    for step in range(len(case.scales)):
        average = torch.cat(train(gradient(case, dist.get_rank(), step)))
        residuals = state.residuals.layers()
        residual = torch.cat([residuals[name] for name in sorted(residuals)])
        history.append((average.double(), residual.double(), state.last_step))
    return history


@settings(max_examples=int(os.environ.get("LIGHTNING_SPARSE_EXAMPLES", "25")))
@given(cases())
@example(Case(num_workers=4, sizes=(5000,), threshold=0.0, scales=(0.3, 20.0, 1.0, 20.0)))
@example(Case(sizes=(5000,), scales=(0.3, 0.3, 20.0, 0.0, 0.0, 0.0)))  # the bound holds once gradients are calm
@example(Case(num_workers=4, sizes=(5000, 200), threshold=0.3, scales=(0.3, 0.3, 20.0), dtype=torch.float32))
def test_nothing_is_lost_and_small_sums_wait(case):
    results = run_workers(run_case, case.num_workers, case)
    n, tolerance = case.num_workers, 1e-9 if case.dtype == torch.float64 else 1e-3
    before = torch.zeros(sum(case.sizes), dtype=torch.float64)
    for step, states in enumerate(zip(*results, strict=True)):
        averages, residuals, statistics = zip(*states, strict=True)
        assert all(torch.equal(average, averages[0]) for average in averages)
        assert len(set(map(repr, statistics))) == 1
        moved = sum(torch.cat(gradient(case, rank, step)) for rank in range(n))
        after = sum(residuals)
        torch.testing.assert_close(after + n * averages[0], before + moved, rtol=tolerance, atol=tolerance)
        before = after
        sent = averages[0] != 0
        if n > 1 and step:  # the first step is dense
            assert (averages[0][sent].abs() > case.threshold / sqrt(n) - tolerance).all()
    calm = case.scales[-3:] == (0.0, 0.0, 0.0)  # then no capacity is exceeded
    if calm and case.value_dtype == "float32":
        assert (before.abs() / n < (1 + 1 / sqrt(n)) * case.threshold + tolerance).all()


def run_with_room(case):
    """Run a case with payloads for all coordinates."""
    cost_model.MIN_CAPACITY = sum(case.sizes)
    return run_case(case)


def simulate(case):
    """Return averages and residuals of all steps for a single parameter."""
    n, (size,) = case.num_workers, case.sizes
    owner = torch.arange(size) // -(-size // n)
    residuals = torch.zeros(n, size, dtype=torch.float64)
    history = []
    for step in range(len(case.scales)):
        whole = residuals + torch.stack([gradient(case, rank, step)[0] for rank in range(n)])
        is_own = (owner == torch.arange(n)[:, None]) & (step > 0)  # the first step is dense
        is_sent = ~(whole.abs() < case.threshold) & ~is_own
        sums = torch.where(is_sent | is_own, whole, 0).sum(0) / n
        averages = torch.where((sums.abs() < case.threshold / sqrt(n)) & (step > 0), 0, sums)
        residuals = torch.where(is_own, n * (sums - averages), torch.where(is_sent, 0, whole))
        history.append((averages, residuals))
    return history


@on_workers(3)
def test_a_threshold_of_zero_sends_everything_at_once():
    case = Case(sizes=(5000,), threshold=2.0, scales=(1.0,) * 6)
    state, train = trainer_of(case)
    for step in range(6):
        if step == 4:
            state.set_threshold(0.0)
        (average,) = train(gradient(case, dist.get_rank(), step))
        assert bool(state.residuals.layers()["weight0"].any()) == (step < 4)
    expected = sum(gradient(case, rank, 5)[0] for rank in range(3)) / 3
    torch.testing.assert_close(average, expected, rtol=0, atol=1e-12)


@on_workers(2)
def test_the_residual_of_an_unused_layer_stays():
    """The second layer of the bucket is the slice of rank 1, which does not use it in the last step."""
    rank = dist.get_rank()
    case = Case(num_workers=2, sizes=(500, 500), scales=(1.0,) * 6, per_layer=True)
    cost_model.MIN_CAPACITY = 1000
    state, train = trainer_of(case, find_unused_parameters=True)
    for step in range(5):
        train(gradient(case, rank, step))
    name = list(state.last_step.layers)[1]
    layer = int(name.removeprefix("weight"))
    before = state.residuals.layers()[name].clone()
    moves = gradient(case, rank, 5)
    is_sent = (before + moves[layer]).abs() >= case.threshold
    average = train([None if rank == 1 and at == layer else move for at, move in enumerate(moves)])[layer]
    assert 0 < is_sent.sum() < 500
    if rank == 0:
        assert torch.equal(average != 0, is_sent)
        assert (average[is_sent].abs() < case.threshold / sqrt(2)).any()
    else:
        assert torch.equal(state.residuals.layers()[name], before)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_exchange_equals_a_simulation(num_workers):
    case = Case(num_workers, sizes=(900,), threshold=1.2, scales=(1.0, 0.3, 1.0, 0.5) * 4)
    results = run_workers(run_with_room, num_workers, case)
    num_sent = 0
    for states, (averages, residuals) in zip(zip(*results, strict=True), simulate(case), strict=True):
        for rank, (average, residual, _) in enumerate(states):
            torch.testing.assert_close(average, averages, rtol=0, atol=1e-12)
            torch.testing.assert_close(residual, residuals[rank], rtol=0, atol=1e-12)
        num_sent += int(averages.count_nonzero())
    assert num_sent > 100


@pytest.mark.parametrize(
    ("size", "place", "dtype"),
    # With 72, only averages exceed their capacity, in a slice so small that it is sent densely.
    [(450, 0, torch.float32), (450, -1, torch.float32), (450, 200, torch.float64), (72, 45, torch.float32)],
)
@pytest.mark.parametrize("burst", [1.0, 1000.0])
@pytest.mark.parametrize("value", [nan, inf])
@on_workers(3)
def test_every_worker_gets_values_that_are_not_finite(value, burst, size, place, dtype):
    """In the same step, even if more values are selected than the capacity of a payload."""
    case = Case(sizes=(size,), threshold=10.0, dtype=dtype)
    state, train = trainer_of(case)
    for step, scale in enumerate([1.0, 1.0, burst, 0.0, 0.0, 0.0]):
        moves = scale * torch.randn(size, dtype=dtype)
        if size == 72 and scale == burst:
            moves = F.pad(moves[24:48] * (dist.get_rank() == 1), (24, 24))
        if step == 2 and dist.get_rank() == 1:
            moves[place] = value
        (average,) = train([moves])
        assert average.isfinite().tolist() == of_all_workers(average.isfinite().tolist())[0]
        assert average.isfinite().all() == (step != 2)
        assert state.last_step.non_finite == (step == 2)
        assert state.residuals.layers()["weight0"].isfinite().all()


def test_sums_need_a_threshold():
    with pytest.raises(ValueError, match="needs a HardThreshold"):
        GradientOptions(exchange="sparse_sums").validate(TopK(0.1))
