import pytest
import torch

from lightning_sparse.exchange.routes.transfer import NUM_SELECTED, Largest
from lightning_sparse.selection.statistics import SLOTS, Statistic, combined, squared_norm


def test_headers_begin_with_the_numbers_that_the_exchange_reads():
    names = [*SLOTS][:3]
    assert names == ["selected", "largest_slice", "non_finite"]
    assert [name.removeprefix("largest_") for name in names] == list(Largest._fields[:3])
    assert SLOTS["selected"] == NUM_SELECTED


def test_statistics_are_summed_or_averaged_over_workers():
    rows = torch.tensor([[1.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    statistics = [Statistic("a", workers="sum"), Statistic("b", workers="mean")]
    assert combined(rows, statistics, num_workers=2) == [4, 2]
    assert combined(rows, [Statistic("a", is_count=True, shards=True)] * 2) == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5_000_001])
def test_a_squared_norm_is_accurate_for_many_values_of_any_precision(size, dtype):
    values = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert squared_norm(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-6)
