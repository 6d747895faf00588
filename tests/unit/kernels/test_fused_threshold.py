"""The fused kernels against plain tensors.

Tests of kernels run on a GPU and skip without a GPU. ``test_interpreter.py`` runs them in Triton's interpreter.
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf, nan, nextafter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse import HardThreshold
from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat, PayloadParts
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import decode, launching, threshold
from lightning_sparse.kernels.launching import is_available
from lightning_sparse.selection import fused_threshold
from lightning_sparse.selection.bucket import FlatBucket, Residual, keep_residual
from lightning_sparse.selection.fused_threshold import take_out_fused
from lightning_sparse.selection.statistics import FIXED_FIELDS, SLOTS
from lightning_sparse.sparsifiers.hard_threshold import ThresholdRun
from lightning_sparse.sparsifiers.protocol import LayerLayout
from tests.distributed.simulation import through_float8
from tests.interpreter import INTERPRETED
from tests.unit.buckets import EDGE_THRESHOLDS, edge_values

DEVICE = "cpu" if INTERPRETED else "cuda"
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
AS_IT_IS = Wire(FLOAT32)
WIRES = (AS_IT_IS, Wire(BFLOAT16), Wire(torch.float8_e4m3fn, 0.25))
SENTINEL = 77

# The tests provoke overflow and NaN, and NumPy, which the interpreter uses, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def on_device(test):
    """Mark a test that launches kernels."""
    return test if INTERPRETED else pytest.mark.cuda(test)


def same_bits(actual, expected):
    """Assert equality of bits, so that -0.0 differs from 0.0, but any NaN equals any NaN."""
    actual = actual.cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*(torch.where(part.isnan(), 0, part).signbit() for part in (actual, expected)))


def guarded(tensor, dtype=None, offset=0):
    """Return a copy on the device, or so many sentinels of a dtype; sentinels around it reveal an overrun."""
    size = tensor if isinstance(tensor, int) else tensor.numel()
    whole = torch.full((offset + size + 64,), SENTINEL, dtype=dtype or tensor.dtype, device=DEVICE)
    part = whole[offset : offset + size]
    return part if isinstance(tensor, int) else part.copy_(tensor)


def check_guards(*tensors):
    for tensor in tensors:
        start = tensor.storage_offset()
        assert (tensor._base[:start] == SENTINEL).all()
        assert (tensor._base[start + tensor.numel() :] == SENTINEL).all()


def take_out(residual, gradient, runs, *, wire, header, loss_scale=None, boundaries=(), **into):
    """Take out of a bucket the values for a transfer with the attributes ``into``."""
    layout = LayerLayout(("all",), (gradient.numel(),))
    flat = FlatBucket(0, layout, gradient, residual, is_last=True, loss_scale=loss_scale)
    form = SimpleNamespace(wire=wire, parts=lambda payload: payload)
    attributes = {"format": form, "payload": None, "out": None, "divisor": 1, "is_cleared": False, "buffers": Buffers()}
    transfer = SimpleNamespace(**attributes | into)
    version = residual.after._version
    take_out_fused(flat, transfer, runs, header, *boundaries)
    assert residual.after._version > version or not gradient.numel()  # ResidualMemory must see the change


@dataclass
class Expected:
    """The result of a step in plain tensors, for whole buckets on the CPU."""

    compensated: torch.Tensor
    selected: torch.Tensor
    sent: torch.Tensor
    rest: torch.Tensor


def expect(residual, gradient, runs, wire, scale=None):
    compensated = residual + (gradient.to(residual.dtype) if scale is None else gradient.to(residual.dtype) / scale)
    limits, excesses = torch.full_like(residual, nan), torch.zeros_like(residual)
    for limit, start, end, excess in runs:
        limits[start:end], excesses[start:end] = limit, excess
    selected = (compensated.abs() >= limits) | compensated.isnan()
    values = torch.where(compensated > 0, compensated + excesses, compensated - excesses)
    if wire.dtype == torch.float8_e4m3fn:
        rounded = through_float8(values, 512 * wire.step).to(residual.dtype)
        sent = torch.where(compensated.isfinite(), rounded, nan)
    else:
        sent = values.to(wire.dtype).to(residual.dtype)
        overflown = sent.isinf() & compensated.isfinite()
        sent = torch.where(overflown, compensated.sign() * torch.finfo(wire.dtype).max, sent)
    sent = torch.where(selected, sent, 0.0)
    rest = torch.where(selected, compensated - sent, compensated)
    return Expected(compensated, selected, sent, torch.where(rest.isfinite(), rest, 0.0))


def header_of(layers=0):
    return guarded(torch.full((FIXED_FIELDS + layers,), nan, dtype=FLOAT64))


def check_step(expected, memory, gradient, runs, wire, scale=None, *, places=((), ()), **into):
    """Take values out of a bucket and check the header; ``places`` are the boundaries of layers and slices."""
    numbers = [max(len(some) - 1, 0) for some in places]
    header = header_of(numbers[0])
    take_out(
        *(memory, gradient, runs),
        loss_scale=None if scale is None else torch.tensor([scale], device=DEVICE),
        wire=wire,
        header=header,
        boundaries=(torch.tensor([*places[0], *places[1]], device=DEVICE) if any(places) else None, *numbers),
        **into,
    )
    check_guards(header, gradient, memory.after)
    found = {name: header[slot].item() for name, slot in SLOTS.items()}
    assert found["selected"] == expected.selected.sum()
    assert found["non_finite"] == (~expected.compensated[expected.selected].isfinite()).sum()
    squared_error = expected.rest.double().square().sum().item()
    if expected.compensated.dtype == FLOAT64 or squared_error < 1e30:  # float32 squares overflow beyond
        assert found["squared_error"] == pytest.approx(squared_error, rel=1e-6, abs=1e-30)
    assert found["squared_gradient_norm"] == 0
    counts, of_slices = (
        [float(expected.selected[start:end].sum()) for start, end in pairwise(some)] for some in places
    )
    assert header[FIXED_FIELDS:].tolist() == counts
    assert found["largest_slice"] == max(of_slices, default=0.0)


def check_select(residual, gradient, runs, wire=AS_IT_IS, scale=None, capacity=None, clears=False, offset=0, **options):
    """Fill a payload from copies, compare everything it writes and return the expectation."""
    expected = expect(residual, gradient, runs, wire, scale)
    indices = expected.selected.nonzero().flatten()
    capacity = indices.numel() + 3 if capacity is None else capacity
    written = min(capacity, indices.numel())
    blocks = -(-residual.numel() // BLOCK_ELEMENTS)
    before, kept = residual.to(DEVICE, copy=True), guarded(torch.full_like(residual, nan))
    given_gradient = guarded(gradient, offset=offset)
    ends, offsets = guarded(blocks, torch.int32), guarded(capacity, torch.int16)
    values = guarded(capacity, wire.storage)
    payload = PayloadParts(torch.empty(0), ends, values, offsets)
    inputs = Residual(before, kept), given_gradient, runs, wire, scale
    check_step(expected, *inputs, payload=payload, is_cleared=clears, **options)
    check_guards(ends, values, offsets)
    same_bits(ends, torch.bincount(indices // BLOCK_ELEMENTS, minlength=blocks).cumsum(0).to(torch.int32))
    same_bits(values[:written], wire.encoded(expected.sent[indices[:written]]))
    assert torch.equal(offsets[:written].cpu().long() % BLOCK_ELEMENTS, indices[:written] % BLOCK_ELEMENTS)
    assert (values[written:] == SENTINEL).all()
    assert (offsets[written:] == SENTINEL).all()
    expected_kept = expected.rest.clone()
    expected_kept[indices[written:]] = expected.compensated[indices[written:]]
    same_bits(kept, expected_kept)
    same_bits(given_gradient, torch.zeros_like(gradient) if clears else gradient)
    same_bits(before, residual)
    return expected


def check_mask(residual, gradient, runs, wire=AS_IT_IS, scale=None, out=None, divisor=1, **options):
    expected = expect(residual, gradient, runs, wire, scale)
    kept, given_gradient = guarded(residual), guarded(gradient)
    out = given_gradient if out is None else guarded(residual.numel(), out)
    inputs = Residual(kept, kept), given_gradient, runs, wire, scale
    check_step(expected, *inputs, out=out, divisor=divisor, **options)
    check_guards(out)
    same_bits(out, (expected.sent / divisor).to(out.dtype))
    same_bits(kept, expected.rest)
    if out is not given_gradient:
        same_bits(given_gradient, gradient)


def bucket(size, gradient_dtype=FLOAT32, residual_dtype=FLOAT32, seed=0):
    """Return residual and gradient, whose sum has a standard deviation of about 1, with some special values."""
    generator = torch.Generator().manual_seed(seed)
    residual = (torch.randn(size, generator=generator) * 0.8).to(residual_dtype)
    gradient = (torch.randn(size, generator=generator) * 0.6).to(gradient_dtype)
    special = torch.tensor([nan, inf, -inf, -0.0, 1e5, -7e4, 1e-40, 65_519.0, 65_520.0, 3.0009765625], dtype=FLOAT64)
    places = torch.randperm(size, generator=generator)[: special.numel()]
    residual[places] = special[: places.numel()].to(residual_dtype)
    gradient[places] = -0.0
    return residual, gradient


def one_run(threshold, size, excess=0.0):
    return [ThresholdRun(threshold, 0, size, excess)]


@on_device
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("gradient_dtype", "scale"), [(FLOAT32, None), (BFLOAT16, None), (FLOAT16, 3.0), (FLOAT32, 1024.0)]
)
def test_kernels_equal_tensor_operations_for_float32_residuals(gradient_dtype, scale, wire):
    residual, gradient = bucket(10_000, gradient_dtype)
    check_select(residual, gradient, one_run(2.0, 10_000), wire, scale, clears=True)
    check_mask(residual, gradient, one_run(2.0, 10_000), wire, scale, out=FLOAT32, divisor=3)
    check_mask(residual, gradient, one_run(2.0, 10_000), wire, scale)
    check_select(residual, gradient, one_run(2.0, 10_000, excess=1.5), wire, scale)
    check_mask(residual, gradient, one_run(2.0, 10_000, excess=1.5), wire, scale, out=FLOAT32)


@on_device
@pytest.mark.parametrize("wire", [Wire(FLOAT64), *WIRES])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_kernels_equal_tensor_operations_for_float64_residuals(wire, scale):
    residual, gradient = bucket(10_000, FLOAT64, FLOAT64)
    # Just above the middle of two 16-bit numbers: direct rounding goes up, rounding by way of float32 goes down.
    residual[[7, 8, 9]] = torch.tensor([2 + 2**-7 + 2**-40, 2 + 2**-10 + 2**-40, 1e300], dtype=FLOAT64)
    gradient[[7, 8, 9]] = 0
    check_select(residual, gradient, one_run(2 - 2**-50, 10_000), wire, scale)
    check_mask(residual, gradient, one_run(2 - 2**-50, 10_000), wire, scale)


@on_device
@pytest.mark.parametrize("size", [1, 31, 32, 33, 8191, 8192, 8193, 65_535, 65_536, 65_537, 200_000])
def test_kernels_equal_tensor_operations_at_block_boundaries(size):
    residual, gradient = bucket(size)
    check_select(residual, gradient, one_run(2.5, size), WIRES[1])
    check_mask(residual, gradient, one_run(2.5, size), WIRES[1], out=BFLOAT16)


@on_device
def test_kernels_equal_tensor_operations_in_empty_buckets():
    empty = torch.zeros(0)
    check_select(empty, empty, [], capacity=4)
    check_mask(empty, empty, [])
    buffers = Buffers()
    check_select(*bucket(40), one_run(0.0, 40), buffers=buffers)
    check_select(empty, empty, [], buffers=buffers)


@on_device
@pytest.mark.parametrize(
    ("size", "starts"),
    [
        (75_000, [0, 7, 7, 40, 65_535, 65_536, 65_537, 73_728, 74_999]),
        (20_000, [0, 0, 9_000, 20_000]),
        (8192, [0, 1, 33, 8191]),
        (65_537, [0, 65_536]),
    ],
)
def test_each_run_has_its_own_threshold(size, starts):
    residual, gradient = bucket(size)
    limits = [1.0, 2.0, 0.5, 3.0, 0.0, 2.5, 1.5, 2.25, 0.25]
    runs = [
        ThresholdRun(limit, *span, excess=limit / 4)
        for limit, span in zip(limits, pairwise([*starts, size]), strict=False)
    ]
    check_select(residual, gradient, runs)
    check_mask(residual, gradient, runs)


@on_device
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_kernels_clear_gradients_at_any_offset(dtype):
    check_select(*bucket(20_001, dtype), one_run(1e9, 20_001), capacity=0, clears=True, offset=1)


@on_device
def test_runs_of_float64_keep_their_bits():
    threshold = 0.1
    residual = torch.full((64,), nextafter(threshold, 0), dtype=FLOAT64)
    runs = [ThresholdRun(threshold, 0, 32), ThresholdRun(nextafter(threshold, 0), 32, 64)]
    expected = check_select(residual, torch.zeros(64), runs, Wire(FLOAT64))
    assert expected.selected.tolist() == [False] * 32 + [True] * 32


@on_device
@pytest.mark.parametrize("wire", [AS_IT_IS, Wire(BFLOAT16)])
@pytest.mark.parametrize("spare", [-1, 0, 1, -10_000])
@pytest.mark.parametrize("size", [3000, 70_000])
def test_values_beyond_the_capacity_stay_and_are_counted(size, spare, wire):
    residual, gradient = bucket(size)
    count = int(expect(residual, gradient, one_run(2.0, size), wire).selected.sum())
    check_select(residual, gradient, one_run(2.0, size), wire, capacity=max(count + spare, 0))


@on_device
@pytest.mark.parametrize("limit", EDGE_THRESHOLDS)
@pytest.mark.parametrize("wire", [*WIRES[:3], Wire(torch.float8_e4m3fn, 2.0**-6)])
def test_kernels_treat_edge_values_as_tensors_do(wire, limit):
    p = edge_values()
    nothing, runs = torch.full_like(p, -0.0), one_run(limit, p.numel())
    check_select(p, nothing, runs, wire)
    check_mask(p, nothing, runs, wire, out=FLOAT32)
    kept = p.clone()
    keep_residual(kept, HardThreshold(threshold=limit).select(kept, LayerLayout(("p",), (p.numel(),))), wire)
    same_bits(expect(p, nothing, runs, wire).rest, kept)


@on_device
@pytest.mark.parametrize("size", [75_000, 65_536, 5])
@pytest.mark.parametrize("check", [partial(check_mask, out=FLOAT32), partial(check_select, capacity=4)])
def test_coordinates_of_every_layer_and_slice_are_counted(size, check):
    residual, gradient = bucket(size)
    inner = [1, 2, 31, 32, 33, 64, 64, 1000, 8191, 8192, 65_504, 65_535, 65_536, 65_537, 65_600, 73_727, 73_728]
    layers = [0, 0, *(place for place in inner if place < size), size, size]
    slices = [0, size // 3, size // 2 + 1, size]
    buffers = Buffers()
    for limit, places in [(1.0, (layers, slices)), (0.0, (layers, [])), (1.5, ([], slices)), (2.0, ([], []))]:
        check(residual, gradient, one_run(limit, size), buffers=buffers, places=places)


@on_device
def test_buckets_of_all_sizes_and_dtypes_share_a_work_space():
    buffers = Buffers()
    for seed, (size, dtype) in enumerate(
        [(40, FLOAT32), (70_000, FLOAT32), (100, FLOAT64), (9_000, FLOAT32), (1, FLOAT64)]
    ):
        residual, gradient = bucket(size, dtype, dtype, seed)
        check_select(residual, gradient, one_run(1.0, size), Wire(dtype), buffers=buffers)
        check_mask(residual, gradient, one_run(0.5, size), Wire(dtype), buffers=buffers)


@on_device
@settings(max_examples=30)
@given(data=st.data())
def test_sent_plus_kept_values_equal_the_compensated_gradient(data):
    floats = st.floats(width=32) | st.sampled_from([0.5, -0.5, 1.0, -0.0, 65_504.0, 1e30])
    residual = torch.tensor(data.draw(st.lists(floats, min_size=1, max_size=70)))
    gradient = torch.tensor(data.draw(st.lists(floats, min_size=len(residual), max_size=len(residual))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(residual)), max_size=4)))
    limits = st.sampled_from([0.0, 0.5, 1.0, 1e30]) | st.floats(0, 4, width=32)
    runs = []
    for span in pairwise([0, *cuts, len(residual)]):
        limit = data.draw(limits)
        runs.append(ThresholdRun(limit, *span, excess=limit * data.draw(st.sampled_from([0.0, 0.0, 0.25, 0.5]))))
    wire = data.draw(st.sampled_from(WIRES))
    expected = check_select(residual, gradient, runs, wire, capacity=data.draw(st.integers(0, len(residual) + 1)))
    check_mask(residual, gradient, runs, wire, out=FLOAT32)
    if wire == AS_IT_IS:
        finite = expected.compensated.isfinite()
        assert torch.equal((expected.sent + expected.rest)[finite], expected.compensated[finite])
        for limit, start, end, _ in runs:
            assert (expected.rest[start:end].abs() < limit).all() or limit == 0 == expected.rest[start:end].abs().sum()


@on_device
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has nothing to wait for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_only_the_first_call_waits_for_the_device():
    start, gradient = (tensor.cuda() for tensor in bucket(200_000))
    residual = Residual(start, torch.empty_like(start))
    payload_format = PayloadFormat(200_000, WIRES[1])
    payload = torch.zeros(payload_format.payload_bytes(20_000), dtype=torch.uint8, device="cuda")
    boundaries = torch.tensor([0, 70_000, 200_000, 0, 100_000, 200_000], device="cuda"), 2, 2
    scaled = {"loss_scale": torch.ones(1, device="cuda"), "header": header_of(2), "boundaries": boundaries}
    scaled |= {"buffers": Buffers(), "wire": WIRES[1]}
    try:
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            for runs in (one_run(2.0, 200_000), [ThresholdRun(2.0, 0, 70_000), ThresholdRun(2.5, 70_000, 200_000)]):
                take_out(residual, gradient, runs, payload=payload_format.parts(payload), **scaled)
                take_out(residual, gradient, runs, out=gradient, **scaled)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _import_again():
    spec = importlib.util.spec_from_file_location("launching_again", launching.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_import_without_triton_and_are_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    again = _import_again()
    assert not again.is_available(torch.device("cuda"))
    monkeypatch.setattr(launching, "jit", again.jit)
    for module in (threshold, decode):
        spec = importlib.util.spec_from_file_location("kernels_again", module.__file__)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_broken_triton_raises(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('libcuda.so.1 is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(OSError, match="is broken"):
        _import_again()


def test_a_cpu_has_no_kernels():
    assert not is_available(torch.device("cpu"))


TYPES = {
    "*fp32": ("residual_before", "residual", "loss_scale", "thresholds", "excesses", "out"),
    "*fp64": ("numbers", "header"),
    "*bf16": ("gradient", "values"),
    "*i64": ("run_starts", "starts", "boundaries", "before"),
    "*i32": ("first_run", "bits", "counts", "ends", "senders"),
    "*i16": ("offsets",),
    "fp32": ("scale",),
    "i32": ("programs", "divisor", "num_layers", "num_slices", "num_workers"),
    "i64": ("num_elements", "capacity", "ends_row", "values_row", "offsets_row"),
}
WALK, SUMMARISE, PACK = (
    {name: value for name, value in constants.items() if name.isupper()}
    for constants in (fused_threshold._WALK, fused_threshold._SUMMARISE, fused_threshold._PACK)
)
WALK |= {"LIMIT": 3e38, "WIRE": "bfloat16"}
ADD = {"BLOCK": BLOCK_ELEMENTS, "TILE": 1024}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("kernel", "warps", "constants"),
    [
        (threshold.walk_block, 16, WALK | {"out": None, "CLEARS": True}),
        (threshold.walk_block, 16, WALK | {"bits": None, "CLEARS": False}),
        (threshold.walk_block, 16, WALK | {"WIRE": "uint8", "LIMIT": 448.0, "CLEARS": True}),
        (threshold.summarise, 8, SUMMARISE),
        (threshold.summarise, 8, SUMMARISE | {"boundaries": None, "before": None, "bits": None}),
        (threshold.pack_block, 4, PACK | {"LIMIT": 3e38}),
        (threshold.pack_block, 4, PACK | {"LIMIT": 448.0, "values": "*u8"}),
        (decode.add_payloads, 8, ADD | {"DIVIDES": True}),
        (decode.add_payloads, 8, ADD | {"DIVIDES": True, "values": "*u8", "senders": None}),
        (decode.add_payloads, 8, ADD | {"DIVIDES": True, "values": "*i16"}),
        (decode.add_payloads, 8, ADD | {"DIVIDES": False, "senders": None}),
    ],
    ids=lambda argument: getattr(argument, "__name__", None),
)
def test_kernels_compile_for_an_absent_gpu(kernel, warps, constants, monkeypatch, tmp_path):
    # The interpreter accepts what the compiler does not.
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if "WIRE" in constants:
        constants = constants | {"WIRE": getattr(triton.language, constants["WIRE"])}
    types = {name: kind for name, kind in constants.items() if str(kind).startswith("*")}
    constants = {name: value for name, value in constants.items() if name not in types}
    signature = {name: kind for kind, names in TYPES.items() for name in names} | types
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "enable_fp_fusion": False})
    assert ".target sm_90" in compiled.asm["ptx"]
