import dataclasses

import pytest
import torch
from hypothesis import given

from lightning_sparse import AverageDensity, StepStats, TotalError
from lightning_sparse.engine.step_stats import LayerStats, numbers_of_headers
from lightning_sparse.exchange.routes.shipment import LARGEST_SLICE, NUM_SELECTED
from lightning_sparse.selection.numbers import (
    SLOTS,
    STEP_NUMBERS,
    LocalNumbers,
    StepNumber,
    combined,
    layer_errors,
    layer_fields,
    squared_norm,
)
from lightning_sparse.sparsifiers import LayerLayout
from lightning_sparse.strategies.step_log import step_metrics
from tests.unit.strategies import buckets


def stats(step=0, *, workers=2, elements=100, selected=10, squared_error=1.0):
    return StepStats(step, workers, elements, selected, squared_error, 0.0, 0, 60, 4 * elements)


def header(selected=0, non_finite=0, squared_error=0.0, squared_gradient_norm=0.0, layers=None):
    numbers = LocalNumbers(selected, non_finite, squared_error, squared_gradient_norm=squared_gradient_norm)
    if layers is not None:
        numbers.of_layers = {"selected": torch.tensor(layers[0]), "squared_error": torch.tensor(layers[1])}
    return numbers.header(torch.device("cpu"))


def test_a_header_has_each_number_at_its_place():
    layout, layers = LayerLayout(("a", "b"), (2, 5)), ([1.0, 2.0], [0.5, 0.25])
    found = header(3, 1, 4.0, 9.0, layers)
    assert {name: found[slot].item() for name, slot in SLOTS.items()} == {
        "selected": 3,
        "largest_slice": 0,
        "non_finite": 1,
        "squared_gradient_norm": 9,
        "squared_error": 4,
    }
    assert [found[layer_fields(name, layout)].tolist() for name in ("selected", "squared_error")] == list(layers)
    assert (SLOTS["selected"], SLOTS["largest_slice"]) == (NUM_SELECTED, LARGEST_SLICE)  # which the exchange reads


def test_the_table_names_what_statistics_hold():
    of_step, of_layer = ({field.name for field in dataclasses.fields(kind)} for kind in (StepStats, LayerStats))
    for number in STEP_NUMBERS:
        if number.name != "largest_slice":  # only the exchange reads it
            assert number.name in of_step
            assert number.workers or not number.in_header
        assert not number.per_layer or number.name in of_layer
        assert number.logged is None or hasattr(stats(), number.logged)


def test_every_number_is_combined_by_its_own_rule():
    rows = torch.tensor([[1.0, 1.0, 5.0], [3.0, 3.0, -2.0]], dtype=torch.float64)
    numbers = [StepNumber("a", workers="sum"), StepNumber("b", workers="mean"), StepNumber("c", workers="max")]
    assert combined(rows, numbers, "workers", num_workers=2) == [4, 2, 5]
    assert combined(rows, [StepNumber("a", is_count=True, shards="max")] * 3, "shards") == [3, 3, 5]


def test_exchanges_that_are_logged_together_are_added_up_but_for_error_norm_and_threshold():
    steps = [stats(step, elements=100, selected=10 * 3**step, squared_error=4.0**step) for step in range(2)]
    steps[1] = dataclasses.replace(steps[1], threshold=0.5, num_elements=200)
    expected = {"sparse/density": 40 / 600, "sparse/error_norm": 2.0, "sparse/payload_bytes": 120.0}
    assert step_metrics(steps) == expected | {"sparse/threshold": 0.5}
    assert step_metrics(steps[:1]) == {
        "sparse/density": 10 / 200,
        "sparse/error_norm": 1.0,
        "sparse/payload_bytes": 60.0,
    }


@given(buckets(finite=True, low=-2, high=2))
def test_the_errors_of_layers_sum_to_that_of_the_bucket(bucket):
    layout, residual = bucket
    errors = layer_errors(residual, layout)
    assert len(errors) == len(layout.names)
    torch.testing.assert_close(errors.sum(), squared_norm(residual), rtol=1e-5, atol=0)


def test_a_step_averages_over_workers_and_adds_up_buckets():
    layouts = [LayerLayout(("a", "b"), (2, 2)), LayerLayout(("c",), (6,))]
    of_worker = [
        [header(1, 1, 25.0, 0.0, ([1, 0], [9.0, 16.0])), header(3, 0, 0.0, 0.0, ([3], [0.0]))],
        [header(3, 0, 0.0, 8.0, ([1, 2], [0.0, 0.0])), header(0, 2, 24.0, 8.0, ([0], [24.0]))],
    ]
    headers = [torch.stack([of_worker[worker][bucket] for worker in range(2)]) for bucket in range(2)]
    numbers = {"payload_bytes": 70, "dense_bytes": 40, "dense_elements": 6, "threshold": 0.5, "is_calibration": False}
    result = StepStats(step=5, **numbers, **numbers_of_headers(layouts, headers))
    assert {name: getattr(result, name) for name in numbers} == numbers
    assert (result.step, result.num_workers, result.num_elements, result.selected) == (5, 2, 10, 7)
    assert result.density == pytest.approx(7 / 20)
    assert result.error_norm == pytest.approx(((25 + 24) / 2) ** 0.5)
    assert result.squared_gradient_norm == 8.0
    assert result.non_finite == 3
    assert {name: layer.density for name, layer in result.layers.items()} == {"a": 0.5, "b": 0.5, "c": 0.25}
    assert {name: layer.squared_error for name, layer in result.layers.items()} == {"a": 4.5, "b": 8.0, "c": 12.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5_000_001])
def test_a_squared_norm_is_accurate_for_many_values_of_any_precision(size, dtype):
    values = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert squared_norm(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-6)


def test_average_density_is_a_ratio_of_sums_beyond_what_float32_holds():
    metric = AverageDensity()
    metric.update(stats(elements=100, selected=100))
    metric.update(stats(elements=300, selected=60))
    assert metric.compute().item() == pytest.approx(160 / 800)  # the mean of the ratios would be 0.3
    metric.reset()
    for _ in range(4):
        metric.update(stats(elements=2**40, selected=2**25 + 1))
    assert metric.selected.item() == 4 * (2**25 + 1)


def test_total_error_sums_squared_error_norms():
    metric = TotalError()
    for squared_error in (1.0, 2.5):
        metric.update(stats(squared_error=squared_error))
    assert metric.compute().item() == 3.5
