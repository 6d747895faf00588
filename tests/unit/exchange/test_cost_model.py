import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.exchange.exchange import Exchange
from lightning_sparse.exchange.payload import CAPACITY_STEP
from lightning_sparse.exchange.routes.cost_model import MIN_CAPACITY, Costs, Forecast, speeds
from lightning_sparse.exchange.workers import Workers
from tests.markdown import PROJECT


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=30), st.integers(0, 10**6))
def test_a_capacity_fits_the_last_count_and_never_exceeds_the_bucket(first, counts, limit):
    forecast = Forecast.first(first)
    for count in counts:
        forecast = forecast.after(count)
    last = counts[-1] if counts else first
    capacity = forecast.capacity(limit)
    assert capacity % CAPACITY_STEP == 0
    assert min(last, limit) <= capacity < limit + CAPACITY_STEP
    assert capacity <= max(6 * last, MIN_CAPACITY) + CAPACITY_STEP


def test_a_steady_count_needs_no_padding():
    forecast = Forecast.first(10_000)
    for _ in range(80):
        forecast = forecast.after(10_000)
    assert forecast.capacity(10**9) <= 10_000 + CAPACITY_STEP


def test_a_noisy_count_overflows_rarely_and_needs_little_padding():
    # k of a hard threshold over steps: noise of a few per cent around a slow trend.
    noise = random.Random(0)
    forecast, overflows, padding = Forecast.first(10_000), 0, 0
    for step in range(2000):
        count = int(10_000 * (1 + 0.3 * step / 2000) * noise.gauss(1, 0.03))
        overflows += count > forecast.capacity(10**9)
        padding += max(forecast.capacity(10**9) - count, 0) / count
        forecast = forecast.after(count)
    assert overflows < 2000 * 0.065
    assert padding < 2000 * 0.065


@pytest.mark.parametrize("num_workers", [2, 4, 16, 256])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_route_goes_from_gather_to_dense_as_density_grows(num_workers, on_gpu):
    costs = Costs(num_workers, 10**7, 4, 4)
    routes = []
    for exponent in range(40):
        selected = 10**7 * 10 ** (-exponent / 8)
        route = costs.cheapest(selected, 1.2 * selected / num_workers, speeds(10.0, on_gpu=on_gpu))
        received = costs.received_bytes(selected, selected / num_workers)
        assert on_gpu or received[route] <= received["dense"]
        if not routes or routes[-1] != route:
            routes.append(route)
    expected = ["dense", "reduce_scatter", "gather"] if num_workers > 2 else ["dense", "gather"]
    assert routes in (expected, ["dense", "gather"])
    if num_workers >= 16:
        assert "reduce_scatter" in routes


@given(
    st.sampled_from([2, 3, 8, 64]),
    st.sampled_from([1000, 260_000, 6_500_000]),
    st.floats(1e-5, 1.0),
    st.booleans(),
    st.floats(0.01, 3000),
    st.floats(1.0, 100.0),
)
def test_a_slower_link_never_brings_more_bytes(num_workers, size, density, on_gpu, link, times_slower):
    costs, k = Costs(num_workers, size, 4, 4), density * size
    fast, slow = (
        costs.cheapest(k, k / num_workers, speeds(rate, on_gpu=on_gpu)) for rate in (link, link / times_slower)
    )
    received = costs.received_bytes(k, k / num_workers)
    assert received[slow] <= received[fast] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_workers", "size", "density", "link", "is_one_node", "route"),
    [
        (8, 260_000, 0.01, None, True, "dense"),  # a bucket of 1 MB is all latency on NVLink
        (8, 260_000, 0.01, None, False, "gather"),
        (8, 260_000, 0.01, 10.0, True, "gather"),
        (8, 6_500_000, 0.001, None, True, "gather"),
        (8, 6_500_000, 0.1, None, True, "dense"),
        (8, 6_500_000, 0.1, 10.0, True, "reduce_scatter"),
        (64, 6_500_000, 0.001, 2400.0, False, "dense"),  # 64 payloads, one after the other
        (64, 6_500_000, 0.001, None, False, "gather"),
        (16, 1_000_000, 0.03, None, False, "gather"),  # to sum by slices takes 44 kernels more
    ],
)
def test_a_gpu_takes_sparse_routes_only_on_links_where_they_win(num_workers, size, density, link, is_one_node, route):
    known, k = speeds(link, on_gpu=True, is_one_node=is_one_node), density * size
    costs = Costs(num_workers, size, 4, 4)
    assert costs.cheapest(k, k / num_workers, known) == route
    exchange = Exchange("auto", None, link, workers=Workers(None, 0, num_workers))
    exchange._is_one_node = is_one_node
    exchange._forecasts["selected"][0, size] = Forecast.first(int(k))
    exchange._forecasts["slices"][0, size] = Forecast.first(int(k / num_workers))
    assert exchange._route((0, size), costs, on_gpu=True) == route


def test_without_a_rate_two_cpu_workers_send_sparsely_up_to_13_percent():
    """The demo's first steps are this dense; dense, they would double its bytes."""
    costs, known = Costs(2, 700_000, 4, 4), speeds(None, on_gpu=False)
    routes = [costs.cheapest(share * 700_000, share * 350_000, known) for share in (0.13, 0.15)]
    assert routes == ["gather", "dense"]


@pytest.mark.parametrize(("num_workers", "times"), [(8, 17), (64, 3)])
def test_at_one_percent_a_worker_receives_as_many_times_fewer_bytes_as_documented(num_workers, times):
    elements = 11_170_000  # ResNet-18
    received = Costs(num_workers, elements, 4, 4).received_bytes(0.01 * elements, 0.01 * elements / num_workers)
    assert round(received["dense"] / min(received.values())) == times
    words = f"Each of {num_workers} receives" if num_workers > 8 else f"each of {num_workers} workers receives"
    assert f"{words} {times} times fewer" in " ".join((PROJECT / "README.md").read_text().split())
