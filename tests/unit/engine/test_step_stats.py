import pytest
import torch

from lightning_sparse.selection.statistics import Statistic, combined, squared_norm


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
