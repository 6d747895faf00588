"""Training with the fused kernels in the loop, in Triton's interpreter: the GPU's way through the whole step."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager, register_comm_hook
from lightning_sparse.exchange import LARGEST_SLICE
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes import adding, gather
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import launching
from lightning_sparse.selection import extraction, fused_threshold
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.sparsifiers import LayerLayout
from tests.distributed.simulation import Plan
from tests.distributed.test_against_simulation import SCENARIOS, THRESHOLD, assert_matches_simulation, reaches
from tests.distributed.training import build_batches, build_model, train
from tests.interpreter import INTERPRETED, run_in_interpreter
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
NAN, INF = float("nan"), float("inf")
WIRES = (*map(Wire, (torch.float32, torch.bfloat16, torch.float16)), Wire(torch.float8_e4m3fn, 0.125))
STEPS = 15
"""A quarter of a second each for a worker: the interpreter goes through a kernel operation by operation."""


@pytest.mark.full
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
    return train(HardThreshold(threshold=THRESHOLD), "nesterov", dtype, steps=STEPS, **options)


def _spy():
    """Uses the kernels; returns a set that comes to hold what is launched, by all for which Triton builds anew."""
    launched = set()

    def launch(kernel, programs, *arguments, **constants):
        kinds = tuple(one.dtype if isinstance(one, torch.Tensor) else type(one) for one in arguments)
        launched.add((kernel.__name__, kinds, tuple(sorted((name, str(one)) for name, one in constants.items()))))
        launching.launch(kernel, programs, *arguments, **constants)

    fused_threshold.launch = adding.launch = launch
    for module in (launching, extraction, gather, adding):
        module.is_available = lambda device: True
    return launched


def _variants_of_drift(sparsifier, dtype, options):
    """What was launched when local training was set up, and what in steps."""
    launched = _spy()
    model = build_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averager = SparseModelAverager(model, sparsifier, DriftOptions(**options))
    warmed_up = launched.copy()
    launched.clear()
    for batches in build_batches(torch.distributed.get_world_size(), dtype, 5):
        inputs, targets = batches[torch.distributed.get_rank()]
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.step()
    return warmed_up, launched


def _variants(sparsifier, dtype, options):
    """What was launched when the hook was registered, and what in steps."""
    launched = _spy()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if options.pop("has_scaler", False) else None
    ddp = {name: options.pop(name) for name in ("find_unused_parameters",) if name in options}
    model = DistributedDataParallel(build_model(dtype), bucket_cap_mb=0.0005, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    register_comm_hook(model, sparsifier, grad_scaler=scaler, **options)
    warmed_up = launched.copy()
    launched.clear()
    for batches in build_batches(torch.distributed.get_world_size(), dtype, 5):
        inputs, targets = batches[torch.distributed.get_rank()]
        layers = list(model.module)
        skips = ddp and torch.distributed.get_rank() == 1
        model.module.forward = lambda x, layers=layers, skips=skips: (
            layers[4](layers[3](x)) if skips else torch.nn.Sequential(*layers)(x)
        )
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        optimizer.zero_grad()
    return warmed_up, launched


def _train_without_pack():
    def refuse(kernel, programs, *arguments, **constants):
        if kernel.__name__ == "pack_block":
            raise RuntimeError("no compiler")
        launching.launch(kernel, programs, *arguments, **constants)

    device = torch.device("cpu")
    fused_threshold.launch = refuse
    uses_kernels = launching.is_available = lambda device: device not in launching._given_up
    for module in (extraction, gather, adding):
        module.is_available = uses_kernels
    with pytest.warns(UserWarning, match=f"rank {torch.distributed.get_rank()}: the fused kernels .* no compiler"):
        weights = train_with({"exchange": "gather"}, torch.float32).weights
    assert not uses_kernels(device)
    return weights, train_with({"exchange": "gather"}, torch.float32).weights


if INTERPRETED:

    @pytest.mark.parametrize("scenario", ["gathered", "bfloat16"])
    def test_training_matches_the_simulation(scenario):
        options, plan = SCENARIOS[scenario]
        results = run_workers(_train, 2, options, torch.float64)
        assert_matches_simulation(results, "nesterov", Plan(reaches(THRESHOLD), **plan), steps=STEPS)

    @pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
    def test_training_gives_the_bits_of_the_cpu(exchange):
        results = run_workers(_train, 3, {"exchange": exchange}, torch.float32)
        on_cpu = run_workers(train_with, 3, {"exchange": exchange}, torch.float32)
        for one, other in zip(results, on_cpu, strict=True):
            for name, weight in one.weights.items():
                assert torch.equal(weight, other.weights[name])
                assert torch.equal(one.residuals[name], other.residuals[name])

    @pytest.mark.parametrize(
        ("sparsifier", "dtype", "options"),
        [
            (HardThreshold(threshold=THRESHOLD), torch.float32, {}),
            (
                HardThreshold(threshold=THRESHOLD),
                torch.float64,
                {"exchange": "reduce_scatter", "value_dtype": "bfloat16"},
            ),
            (HardThreshold(threshold=THRESHOLD), torch.bfloat16, {"exchange": "gather", "has_scaler": True}),
            (HardThreshold(density=0.1, calibration_steps=2), torch.float32, {"find_unused_parameters": True}),
            (HardThreshold(density=0.1, calibration_steps=2), torch.bfloat16, {"exchange": "dense"}),
            (HardThreshold(threshold=THRESHOLD, layer_thresholds={"0.*": 0.2}), torch.float32, {"exchange": "gather"}),
            (
                HardThreshold(density=0.1, calibration_steps=2, granularity="layer"),
                torch.float32,
                {"exchange": "gather", "density_control": "hold"},
            ),
            (
                HardThreshold(density=0.1, calibration_steps=2, granularity="layer"),
                torch.float32,
                {"exchange": "dense", "density_control": "hold"},
            ),
        ],
    )
    def test_no_kernel_is_first_built_in_a_backward(sparsifier, dtype, options):
        for warmed_up, launched in run_workers(_variants, 2 + ("exchange" in options), sparsifier, dtype, options):
            assert launched
            assert launched <= warmed_up, launched - warmed_up

    @pytest.mark.parametrize(
        ("sparsifier", "dtype", "options"),
        [
            (HardThreshold(threshold=0.02), torch.float32, {}),
            (HardThreshold(threshold=0.02), torch.bfloat16, {"exchange": "gather", "value_dtype": "bfloat16"}),
            (HardThreshold(density=0.1, calibration_steps=2), torch.float32, {"value_dtype": "float8"}),
            (HardThreshold(density=0.1, calibration_steps=2, granularity="layer"), torch.float32, {}),
        ],
    )
    def test_no_kernel_is_first_built_in_an_exchange_of_drifts(sparsifier, dtype, options):
        for warmed_up, launched in run_workers(_variants_of_drift, 2, sparsifier, dtype, options):
            assert launched
            assert launched <= warmed_up, launched - warmed_up

    def test_where_a_kernel_cannot_be_built_training_goes_on_without():
        for weights in run_workers(_train_without_pack, 2):
            for name, weight in weights[0].items():
                assert torch.equal(weight, weights[1][name])

    class _Shipment:
        def __init__(self, size, wire, capacity):
            self.out = torch.zeros(size)
            self.format = PayloadFormat(size, wire)
            self.payload = torch.zeros(self.format.payload_bytes(capacity), dtype=torch.uint8)
            self.rest = None

    @pytest.mark.parametrize("capacity", [0, 4, 400])
    @pytest.mark.parametrize(
        "wire", [*map(Wire, (torch.float32, torch.bfloat16, torch.float16)), Wire(torch.int8, 0.25)]
    )
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
            memory, left_out = Residual(torch.zeros(size), residual), [(0, 2)] if capacity == 4 else []
            bucket = FlatBucket(0, layout, gradient.clone(), memory, is_last=True, left_out=left_out)
            header = Extraction(HardThreshold(threshold=1.0), num_slices=3, per_layer=True, keeps_rest=True).fill(
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
