"""Training with the fused kernels in the loop, in Triton's interpreter: the GPU's way through the whole step."""

import pytest
import torch

from lightning_sparse import HardThreshold
from lightning_sparse.exchange import LARGEST_SLICE, adding, gather
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.selection import extraction
from lightning_sparse.selection.bucket_gradient import BucketGradient
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.selection.residual import Residual
from lightning_sparse.sparsifiers import LayerLayout
from tests.distributed.simulation import Plan
from tests.distributed.test_against_simulation import SCENARIOS, THRESHOLD, assert_matches_simulation, reaches
from tests.distributed.training import train
from tests.interpreter import INTERPRETED, run_in_interpreter
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
NAN, INF = float("nan"), float("inf")


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_step_in_the_interpreter():
    run_in_interpreter(__file__)


def fused(function, *args):
    """Calls the function with the kernels in place of the CPU's own way."""
    asked = []
    for module in (extraction, gather, adding):
        module.is_available = lambda device, name=module.__name__: asked.append(name) or True
    result = function(*args)
    assert {extraction.__name__, adding.__name__} <= set(asked)
    return result


def _train(options, dtype):
    return fused(train_with, options, dtype)


def train_with(options, dtype):
    return train(HardThreshold(THRESHOLD), "nesterov", dtype, **options)


if INTERPRETED:

    @pytest.mark.parametrize("scenario", ["gathered", "bfloat16"])
    def test_training_matches_the_simulation(scenario):
        options, plan = SCENARIOS[scenario]
        results = run_workers(_train, 2, options, torch.float64)
        assert_matches_simulation(results, "nesterov", Plan(reaches(THRESHOLD), **plan))

    @pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
    def test_training_gives_the_bits_of_the_cpu(exchange):
        results = run_workers(_train, 3, {"exchange": exchange}, torch.float32)
        on_cpu = run_workers(train_with, 3, {"exchange": exchange}, torch.float32)
        for one, other in zip(results, on_cpu, strict=True):
            for name, weight in one.weights.items():
                assert torch.equal(weight, other.weights[name])
                assert torch.equal(one.residuals[name], other.residuals[name])

    class _Shipment:
        is_masked, out = False, None

        def __init__(self, size, wire, capacity):
            self.format = PayloadFormat(size, wire)
            self.payload = torch.zeros(self.format.payload_bytes(capacity), dtype=torch.uint8)
            self.rest = None

    @pytest.mark.parametrize("capacity", [0, 4, 400])
    @pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_payload_that_is_too_small_leaves_a_rest(wire, capacity, monkeypatch):
        size = 70_000
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(size, generator=generator) * 0.3
        gradient[[3, 5, 69_000]] = torch.tensor([NAN, -INF, 1e6])
        layout = LayerLayout(("a", "b", "c"), (1000, 68_000, 1000))
        outcomes = []
        for uses_kernels in (True, False):
            monkeypatch.setattr(extraction, "is_available", lambda device, answer=uses_kernels: answer)
            residual, shipment = torch.zeros(size), _Shipment(size, wire, capacity)
            bucket = BucketGradient(
                layout, gradient.clone(), Residual(torch.zeros(size), residual), [(0, 2)] if capacity == 4 else [], None
            )
            header = Extraction(HardThreshold(1.0), num_slices=3, per_layer=True, keeps_rest=True).fill(
                bucket, shipment
            )
            rest = shipment.rest()
            outcomes.append((shipment.payload, rest, residual, header))
        (payload, rest, residual, header), cpu = outcomes
        # Not as bytes: which NaN it is differs between ways and processors.
        for part, other in zip(shipment.format.parts(payload), shipment.format.parts(cpu[0]), strict=True):
            torch.testing.assert_close(part, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(rest.indices, cpu[1].indices)
        torch.testing.assert_close(rest.values, cpu[1].values, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(residual, cpu[2], rtol=0, atol=0)
        layers = len(layout.names)
        if capacity < 400:
            # What found no room is neither counted in slices (the exchange begins anew then) nor gone from layers yet.
            header[LARGEST_SLICE], cpu[3][LARGEST_SLICE] = 0, 0
            torch.testing.assert_close(header[:-layers], cpu[3][:-layers], rtol=1e-5, atol=1e-9)
        else:
            torch.testing.assert_close(header, cpu[3], rtol=1e-5, atol=1e-9)
