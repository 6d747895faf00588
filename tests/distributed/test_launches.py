"""What a step launches on a GPU, and how often the host waits for it: counted, so that it does not grow unnoticed."""

import pytest
import torch
from torch.torch_version import TorchVersion

from lightning_sparse import (
    Accordion,
    GaussianK,
    HardThreshold,
    RandomK,
    ScaledIntegerRounding,
    StochasticRounding,
    TopK,
)
from tests.distributed.launches import measure
from tests.workers import run_workers

pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 11), reason=f"torch {torch.__version__} asks for a GPU where tensors are fake"
)
BUCKETS, LAYERS = 17, 150
THRESHOLD = HardThreshold(threshold=0.1)
MODEL_TOP_K = TopK(0.01, granularity="model")
LAYERWISE = HardThreshold(threshold=0.1, layer_thresholds={"*.2": 0.2})
HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("sparsifier", "options", "of_bucket", "of_layer", "of_step"),
    [
        # walk, summarise, pack, and adding up; beside them one collective, NCCL's own kernel. For all buckets together
        # headers into the last payload (2), out of all payloads (1), to the host (1).
        (THRESHOLD, {}, 4, 0, 4),
        (THRESHOLD, {"exchange": "auto"}, 4, 0, 4),
        (THRESHOLD, {"scaled": True}, 5, 0, 4),  # the average gets S back
        (THRESHOLD, HALF, 6, 0, 4),  # the average does not fit the gradient: its memory is cleared
        # Marks to the device and into the header, and unused gradients set to zero.
        (THRESHOLD, {"has_unused": True}, 7, 0, 4),
        (THRESHOLD, {"per_layer": True}, 9, 0, 4),
        (THRESHOLD, {"exchange": "dense"}, 2, 0, 2),
        (THRESHOLD, {"exchange": "dense", "per_layer": True}, 7, 0, 2),
        (LAYERWISE, {}, 4, 0, 4),
        (THRESHOLD, {"exchange": "reduce_scatter"}, 49, 0, 6),
        (TopK(0.01), {}, 52, 2, 6),
        (TopK(0.01), {"exchange": "dense"}, 41, 2, 4),
        (TopK(0.01), {"exchange": "reduce_scatter"}, 100, 2, 6),
        (MODEL_TOP_K, {}, 71, 0, 10),  # 22 of them to look at p twice more, and to find the k-th
        (RandomK(0.01), {}, 70, 2, 6),
        (GaussianK(0.01), {}, 84, 11, 6),
        (Accordion(0.001, 0.01), {}, 54, 2, 6),
        (ScaledIntegerRounding(0.01), {}, 61, 0, 6),
        (StochasticRounding(0.01), {}, 107, 0, 6),
    ],
)
def test_launches_and_waits_of_a_step(sparsifier, options, of_bucket, of_layer, of_step):
    (counts,) = run_workers(measure_once, 1, sparsifier, options)
    assert counts.waits == ["headers"]
    assert counts.launches.total() <= BUCKETS * of_bucket + LAYERS * of_layer + of_step, counts.launches


def measure_once(sparsifier, options):
    return measure(sparsifier, num_buckets=BUCKETS, num_layers=LAYERS, **options)


def test_without_kernels_only_adding_up_waits():
    (dense,) = run_workers(measure_once, 1, THRESHOLD, {"has_kernels": False, "exchange": "dense"})
    assert dense.waits == ["headers"]
    (gathered,) = run_workers(measure_once, 1, THRESHOLD, {"has_kernels": False})
    assert gathered.waits.count("headers") == 1
    assert len(gathered.waits) > BUCKETS
