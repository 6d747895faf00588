"""Nobody looks at what a collective brings before it was waited for, nor writes what still travels."""

import pytest
import torch

from lightning_sparse import HardThreshold, TopK
from tests.distributed.late import train
from tests.workers import run_workers

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none on this machine"),
]


@pytest.mark.parametrize("num_workers", [2, 8])
@pytest.mark.parametrize(
    ("device", "in_side_stream"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=on_gpu),
        pytest.param("cuda", True, marks=on_gpu),
    ],
)
def test_collectives_that_are_over_late_change_nothing(device, in_side_stream, num_workers):
    run_workers(_train_all, 1, torch.device(device), in_side_stream, num_workers)


def _train_all(device, in_side_stream, num_workers):
    # Not a reduce-scatter, which "auto" may take from three on: there workers have different slices.
    for mode in ("gather", "dense", "auto")[: 3 if num_workers == 2 else 2]:
        for dtype in (torch.float32, torch.bfloat16):
            for sparsifier in (
                HardThreshold(threshold=0.9),
                HardThreshold(threshold=0.9, layer_thresholds={"a": 0.3}),
                TopK(0.01),
            ):
                for per_layer in (False, True):
                    options = {"per_layer": per_layer, "in_side_stream": in_side_stream}
                    densities = train(sparsifier, mode, num_workers, device, dtype, **options)
                    if isinstance(sparsifier, HardThreshold):
                        assert min(densities) < 0.05 < 0.5 < max(densities)
