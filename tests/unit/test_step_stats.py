import pytest
import torch
from hypothesis import given

from lightning_sparse import AverageDensity, HardThreshold, StepStats, TotalError
from lightning_sparse.sparsifiers import LayerLayout, Selection
from lightning_sparse.step_stats import local_header, squared_norm, step_stats
from tests.unit.strategies import buckets


def stats(step=0, *, workers=2, elements=100, selected=10, squared_error=1.0):
    return StepStats(step, workers, elements, selected, squared_error, 0.0, 0, 60, 4 * elements)


@given(buckets(finite=True, low=-2, high=2))
def test_a_header_with_layers_sums_to_the_one_without(bucket):
    layout, residual = bucket
    selection = HardThreshold(1.0).select(residual, layout)
    plain, layered = (
        local_header(selection, residual, layout, squared_gradient_norm=None, per_layer=flag) for flag in (False, True)
    )
    torch.testing.assert_close(plain, layered[: len(plain)], rtol=1e-5, atol=0)
    assert layered[len(plain) :][: len(layout.names)].sum() == plain[0] == selection.indices.numel()


def test_a_step_averages_over_workers_and_adds_up_buckets():
    layouts = [LayerLayout(("a", "b"), (2, 2)), LayerLayout(("c",), (6,))]
    residuals = [[torch.tensor([3.0, 0, 0, 4]), torch.zeros(6)], [torch.zeros(4), torch.full((6,), 2.0)]]
    indices = [[[1], [0, 2, 3]], [[0, 2, 3], []]]
    headers = [
        torch.stack(
            [
                local_header(
                    Selection(torch.tensor(indices[worker][b], dtype=torch.int64), torch.ones(len(indices[worker][b]))),
                    residuals[worker][b],
                    layouts[b],
                    squared_gradient_norm=torch.tensor(8.0 * worker),
                    per_layer=True,
                )
                for worker in range(2)
            ]
        )
        for b in range(2)
    ]
    result = step_stats(5, layouts, headers, payload_bytes=70, dense_bytes=40, threshold=0.5)
    assert (result.step, result.num_workers, result.num_elements, result.selected) == (5, 2, 10, 7)
    assert result.density == pytest.approx(7 / 20)
    assert result.error_norm == pytest.approx(((25 + 24) / 2) ** 0.5)
    assert result.squared_gradient_norm == 8.0
    assert {name: layer.density for name, layer in result.layers.items()} == {"a": 0.5, "b": 0.5, "c": 0.25}
    assert {name: layer.squared_error for name, layer in result.layers.items()} == {
        "a": pytest.approx(4.5),
        "b": pytest.approx(8.0),
        "c": pytest.approx(12.0),
    }


def test_non_finite_values_are_counted():
    selection = Selection(torch.tensor([0, 1, 2]), torch.tensor([float("nan"), 1.0, float("inf")]))
    header = local_header(
        selection, torch.zeros(4), LayerLayout(("a",), (4,)), squared_gradient_norm=None, per_layer=False
    )
    assert (
        step_stats(
            0, [LayerLayout(("a",), (4,))], [header[None]], payload_bytes=0, dense_bytes=16, threshold=None
        ).non_finite
        == 2
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5_000_001])
def test_a_squared_norm_is_accurate_for_many_values_of_any_precision(size, dtype):
    values = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert squared_norm(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-6)


def test_average_density_is_a_ratio_of_sums():
    metric = AverageDensity()
    metric.update(stats(elements=100, selected=100))
    metric.update(stats(elements=300, selected=60))
    assert metric.compute().item() == pytest.approx(160 / 800)  # the mean of the ratios would be 0.3


def test_average_density_counts_beyond_what_float32_holds():
    metric = AverageDensity()
    for _ in range(4):
        metric.update(stats(elements=2**40, selected=2**25 + 1))
    assert metric.selected.item() == 4 * (2**25 + 1)


def test_total_error_sums_squared_error_norms():
    metric = TotalError()
    for squared_error in (1.0, 2.5):
        metric.update(stats(squared_error=squared_error))
    assert metric.compute().item() == 3.5
