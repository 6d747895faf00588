"""Training with the fused kernels in Triton's interpreter: the code path of a GPU through the whole step.

``tests/unit/kernels/test_interpreter.py`` runs these tests.
"""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import DriftOptions, GradientOptions, HardThreshold, SparseModelAverager, register_comm_hook
from lightning_sparse.engine import warmup
from lightning_sparse.exchange.routes import adding, gather
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import launching
from lightning_sparse.selection import extraction, fused_threshold
from lightning_sparse.selection.statistics import SLOTS
from lightning_sparse.sparsifiers.protocol import LayerLayout
from tests.distributed.test_against_simulation import THRESHOLD
from tests.distributed.training import build_batches, build_model, train
from tests.integration.models import assert_equal
from tests.interpreter import INTERPRETED
from tests.unit.kernels.test_native import outcome
from tests.workers import on_workers, run_workers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
NAN, INF = float("nan"), float("inf")
STEPS = 7  # a dense step, a payload beyond its capacity, sparse steps; each takes a quarter of a second per worker


def fused(function):
    """Call the function with kernels instead of the code for CPUs."""
    asked = []
    for module in (warmup, extraction, gather, adding):
        module.is_available = lambda device, name=module.__name__: asked.append(name) or True
    result = function()
    assert {extraction.__name__, adding.__name__} <= set(asked)
    return result


def training(dtype, options):
    return partial(train, HardThreshold(threshold=THRESHOLD), "nesterov", dtype, steps=STEPS, **options)


def _record_launches():
    """Use the kernels; return a set that collects each variant that Triton compiles."""
    launched = set()

    def launch(kernel, programs, *arguments, **constants):
        kinds = tuple(value.dtype if isinstance(value, torch.Tensor) else type(value) for value in arguments)
        launched.add((kernel.__name__, kinds, tuple(sorted((name, str(value)) for name, value in constants.items()))))
        launching.launch(kernel, programs, *arguments, **constants)

    fused_threshold.launch = adding.launch = launch
    for module in (launching, warmup, extraction, gather, adding):
        module.is_available = lambda device: True
    return launched


def _variants(is_local, sparsifier, dtype, options):
    """Return the kernel variants of set-up and those of steps."""
    launched, options = _record_launches(), dict(options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=options.pop("has_scaler", False))
    has_unused = options.pop("find_unused_parameters", False)
    module = model = build_model(dtype)
    if is_local:
        averager = SparseModelAverager(module, sparsifier, DriftOptions(**options))
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=0.0005, find_unused_parameters=has_unused)
        register_comm_hook(model, sparsifier, GradientOptions(**options), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    warmed_up = launched.copy()
    launched.clear()
    rank = torch.distributed.get_rank()
    if has_unused and rank == 1:
        module.forward = module[3:].forward
    for batches in build_batches(torch.distributed.get_world_size(), dtype, 5):
        inputs, targets = batches[rank]
        scaler.scale(torch.nn.functional.mse_loss(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if is_local:
            averager.step()
    return warmed_up, launched


def numbers_of(step):
    """Return the coordinates of each layer, and all numbers but its errors, in which values beyond a payload count.

    Leaves out the bytes too, because kernels need payloads of equal size and send unused capacity.
    """
    return [layer.selected for layer in step.layers.values()], asdict(replace(step, layers={}, payload_bytes=0))


if INTERPRETED:

    @pytest.mark.parametrize(
        ("dtype", "options"),
        [
            (torch.float32, {"exchange": "gather"}),
            (torch.float32, {"exchange": "reduce_scatter"}),
            (torch.float64, {"exchange": "gather"}),
            (torch.float64, {"value_dtype": "bfloat16"}),
        ],
    )
    def test_training_gives_the_bits_of_the_cpu(dtype, options):
        run, accuracy = training(dtype, options), 1e-9 if dtype == torch.float64 else 1e-5  # of the error norm
        results, on_cpu = run_workers(fused, 3, run), run_workers(run, 3)
        for on_kernels, expected in zip(results, on_cpu, strict=True):
            assert_equal((on_kernels.weights, on_kernels.residuals), (expected.weights, expected.residuals))
            for step, same in zip(on_kernels.steps, expected.steps, strict=True):
                selected, numbers = zip(*map(numbers_of, (step, same)), strict=True)
                assert selected[0] == selected[1]
                torch.testing.assert_close(*numbers, rtol=accuracy, atol=0)

    FIXED, BFLOAT16 = HardThreshold(threshold=THRESHOLD), torch.bfloat16
    CALIBRATED = HardThreshold(density=0.1)
    OF_LAYERS = HardThreshold(density=0.1, granularity="layer")
    WITH_OWN = HardThreshold(threshold=THRESHOLD, layer_thresholds={"0.*": 0.2})

    @pytest.mark.parametrize(
        ("is_local", "sparsifier", "dtype", "options"),
        [
            (False, FIXED, torch.float32, {}),
            (False, FIXED, torch.float64, {"exchange": "reduce_scatter", "value_dtype": "bfloat16"}),
            (False, FIXED, BFLOAT16, {"exchange": "gather", "has_scaler": True}),
            (False, CALIBRATED, torch.float32, {"find_unused_parameters": True}),
            (False, WITH_OWN, torch.float32, {"exchange": "gather"}),
            (False, OF_LAYERS, torch.float32, {"exchange": "gather"}),
            (True, FIXED, torch.float32, {}),
            (True, FIXED, BFLOAT16, {"exchange": "gather", "value_dtype": "bfloat16"}),
            (True, CALIBRATED, torch.float32, {"value_dtype": "float8"}),
            (True, OF_LAYERS, torch.float32, {}),
        ],
    )
    def test_setup_builds_all_kernels_before_the_first_step(is_local, sparsifier, dtype, options):
        num_workers = 2 + (options.get("exchange") == "reduce_scatter")
        for warmed_up, launched in run_workers(_variants, num_workers, is_local, sparsifier, dtype, options):
            assert launched
            assert launched <= warmed_up, launched - warmed_up

    @on_workers(2)
    def test_training_continues_without_a_kernel_that_fails_to_build():
        def refuse(kernel, programs, *arguments, **constants):
            if kernel.__name__ == "pack_block":
                raise RuntimeError("no compiler")
            launching.launch(kernel, programs, *arguments, **constants)

        device = torch.device("cpu")
        fused_threshold.launch = refuse
        uses_kernels = launching.is_available = lambda device: device not in launching._disabled
        for module in (warmup, extraction, gather, adding):
            module.is_available = uses_kernels
        run = training(torch.float32, {"exchange": "gather"})
        with pytest.warns(UserWarning, match=f"rank {torch.distributed.get_rank()}: the fused kernels .* no compiler"):
            weights = run().weights
        assert not uses_kernels(device)
        assert_equal(run().weights, weights)

    @pytest.mark.parametrize("capacity", [0, 4, 400])
    @pytest.mark.parametrize("wire", [*map(Wire, (torch.float32, torch.bfloat16)), Wire(torch.int8, 0.25)])
    def test_a_payload_that_is_too_small_leaves_a_rest(wire, capacity, monkeypatch):
        gradient = torch.randn(70_000, generator=torch.Generator().manual_seed(0)) * 0.15  # λ is 0.5
        gradient[[3, 5, 69_000]] = torch.tensor([NAN, -INF, 1e6])
        layout, left_out = LayerLayout(("a", "b", "c"), (1000, 68_000, 1000)), [(0, 2)] if capacity == 4 else []
        options = (wire, capacity, None, left_out, None, False, True, 0.0)
        outcomes = []
        for uses_kernels in (True, False):
            monkeypatch.setattr(extraction, "is_available", lambda device, answer=uses_kernels: answer)
            outcomes.append(outcome(True, monkeypatch, layout, torch.zeros(70_000), gradient, options))
        (sent, residual, header, _), cpu = outcomes
        assert_equal((sent, residual), cpu[:2])
        layers = len(layout.names)
        if capacity < 400:
            # Values beyond the capacity stay in their layers; slices do not count them, since the exchange restarts.
            header[SLOTS["largest_slice"]] = cpu[2][SLOTS["largest_slice"]] = 0
            torch.testing.assert_close(header[:-layers], cpu[2][:-layers], rtol=1e-5, atol=1e-9, equal_nan=True)
        else:
            torch.testing.assert_close(header, cpu[2], rtol=1e-5, atol=1e-9, equal_nan=True)
