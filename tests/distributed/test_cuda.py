"""Runs a step on a GPU. Skips without a GPU."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_sparse import HardThreshold, LayerLayout, TopK
from lightning_sparse.exchange.exchange import Exchange
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.wire import Wire
from tests.distributed.exchange.test_exchange import assert_gathered, gather_to_first
from tests.distributed.simulation import Plan
from tests.distributed.test_against_simulation import THRESHOLD, assert_matches_simulation, reaches
from tests.distributed.training import train
from tests.unit.buckets import packed
from tests.workers import run_workers

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("sparsifier", [HardThreshold(threshold=0.5), HardThreshold(threshold=0.0), TopK(0.01)])
def test_selection_and_payload_are_equal_on_both_devices(sparsifier):
    layout = LayerLayout(("a", "b"), (100_000, 50_000))
    compensated = torch.randn(150_000, generator=torch.Generator().manual_seed(0)) * 0.2
    compensated[[5, 70_000, 149_999]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    on_cpu, on_cuda = sparsifier.select(compensated, layout), sparsifier.select(compensated.cuda(), layout)
    assert torch.equal(on_cpu.indices, on_cuda.indices.cpu())
    payload_format = PayloadFormat(150_000, Wire(torch.bfloat16))
    payloads = [packed(payload_format, selection).cpu() for selection in (on_cpu, on_cuda)]
    # Not as bytes: the bits of NaN differ between processors.
    for part, other in zip(*map(payload_format.parts, payloads), strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("backend", "num_workers"), [("gloo", 2), ("nccl", 1)])
@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter", "dense", "auto"])
def test_training_on_a_gpu_matches_the_simulation_and_keeps_replicas_equal(exchange, backend, num_workers):
    on_cuda = partial(train, HardThreshold(threshold=THRESHOLD), exchange=exchange, device="cuda")
    results = run_workers(_on_backend, num_workers, backend, on_cuda)
    assert_matches_simulation(results, "nesterov", Plan(reaches(THRESHOLD)), rtol=1e-8)


@pytest.mark.parametrize(("backend", "num_workers"), [("gloo", 3), ("nccl", 1)])
def test_residuals_and_objects_of_a_gpu_reach_the_first_worker(backend, num_workers):
    assert_gathered(*run_workers(_on_backend, num_workers, backend, gather_to_first, "cuda"))


def _on_backend(backend, function, *args):
    if backend == "nccl":
        dist.destroy_process_group()
        dist.init_process_group("nccl")
    with patch.object(Exchange, "has_shortcut", False):  # a single worker also selects and executes the route
        return function(*args)
