"""Estimates of an exchange against measured steps and against sums by hand."""

import json
from math import inf

import pytest
import torch
from torch import nn

from lightning_sparse import estimate
from tests.markdown import PROJECT

RESULTS = PROJECT / "benchmarks/results/step_time_bucket_view.json"
RATES = {"200mbit": 0.2, "1gbit": 1.0, "10gbit": 10.0}
"""Gbit/s by name."""


def measured() -> list[tuple[str, float, float, float, float]]:
    rows = []
    for result in json.loads(RESULTS.read_text())["results"]:
        methods = {name: method for name, method in result["methods"].items() if result["rate"] in RATES}
        for name, method in methods.items():
            if name == "ddp_fp32" or name.startswith("hard_threshold_0"):
                density = method["density"]["mean"] if "density" in method else 1.0
                floor = methods["floor"]["seconds"]["median"]
                rows.append((name, RATES[result["rate"]], density, method["seconds"]["median"], floor))
    return rows


MEASURED = measured()
assert len(MEASURED) == 12


@pytest.mark.parametrize(("method", "rate", "density", "seconds", "floor"), MEASURED)
def test_estimates_match_measured_steps(method, rate, density, seconds, floor):
    result = estimate(11_181_642, num_workers=2, link_gbit_s=rate, density=density, compute_seconds=floor)
    exchange = result.dense_seconds if method == "ddp_fp32" else result.sparse_seconds
    assert floor + exchange == pytest.approx(seconds, rel=0.2)


def test_estimated_bytes_match_the_routes():
    result = estimate(1_000_000, num_workers=4, link_gbit_s=1.0, density=0.01)
    assert result.dense_bytes == 3 / 4 * 1_000_000 * 8
    assert result.sparse_bytes == 3 * 10_000 * 6
    half = estimate(1_000_000, num_workers=4, link_gbit_s=1.0, density=0.01, value_dtype="bfloat16")
    assert half.sparse_bytes == 3 * 10_000 * 4


def test_estimate_counts_only_trained_parameters():
    model = nn.Sequential(nn.Linear(100, 10), nn.Linear(10, 10))
    model[1].requires_grad_(False)
    assert estimate(model, num_workers=2, link_gbit_s=1).num_elements == 1010
    assert (
        estimate(nn.ParameterList([torch.zeros(3, dtype=torch.complex64)]), num_workers=2, link_gbit_s=1).num_elements
        == 6
    )


def test_an_estimate_prints_a_verdict():
    text = str(estimate(11_173_962, num_workers=8, link_gbit_s=1, compute_seconds=0.06))
    assert text == (
        "11,173,962 parameters, 8 workers, 1 Gbit/s each: without overlap with backward, a dense exchange takes 634 "
        "ms, and one at a density of 0.1 % takes 22.9 ms. With 60 ms of computation, a dense step takes 694 ms and a "
        "sparse step 82.9 ms. The exchange is 91 % of the dense step, and a sparse step is 8.4 times as fast. "
        "Densities above 32 % gain nothing."
    )
    assert "computation" not in str(estimate(1000, num_workers=2, link_gbit_s=1))
    fast = estimate(10_000, num_workers=2, link_gbit_s=5000, on_gpu=True)
    assert fast.break_even == pytest.approx(0, abs=1e-6)
    slow = estimate(11_000_000, num_workers=32, link_gbit_s=100, density=0.2)
    assert slow.break_even < 0.2
    assert slow.sparse_seconds > slow.dense_seconds
    # Between routes, the sparse one would win at low densities, but selecting costs more than it saves.
    assert estimate(124_000_000, num_workers=8, link_gbit_s=2400, on_gpu=True).break_even == 0
    assert "2 workers, 5000 Gbit/s each" in str(fast)
    assert str(fast).endswith("A dense exchange is fastest at any density: use strategy='ddp'.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_workers": 1},
            "Invalid num_workers=1. Must be a whole number of at least 2: a single worker exchanges nothing",
        ),
        ({"link_gbit_s": 0}, "Invalid link_gbit_s=0. Must be a worker's link in Gbit/s, within 1e-6 and 1e6"),
        ({"link_gbit_s": "1gbit"}, "Invalid link_gbit_s='1gbit'"),
        ({"density": 0.0}, "Invalid density=0.0"),
        ({"value_dtype": "half"}, "Invalid value_dtype='half'. Must be one of 'float32'"),
        ({"on_gpu": "yes"}, "Invalid on_gpu='yes'. Must be True or False"),
        ({"compute_seconds": -1.0}, "Invalid compute_seconds=-1.0. Must be at least 0"),
        ({"compute_seconds": inf}, "Invalid compute_seconds=inf. Must be at least 0 and finite"),
        ({"model": nn.ReLU()}, "Got 0 parameters to exchange"),
        ({"model": nn.LazyLinear(3)}, "The model has uninitialised layers"),
    ],
)
def test_estimate_rejects_numbers_out_of_range(options, message):
    options = {"model": 1000, "num_workers": 2, "link_gbit_s": 1.0} | options
    with pytest.raises(ValueError, match=message):
        estimate(options.pop("model"), **options)


@pytest.mark.parametrize("model", ["resnet18", True, None])
def test_estimate_rejects_other_types_than_models_and_numbers(model):
    with pytest.raises(TypeError, match=f"Invalid {model=}. Must be a module or the number"):
        estimate(model, num_workers=2, link_gbit_s=1.0)
