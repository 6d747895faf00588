"""The rule of a selected value, (p, λ, wire) → (sent, kept): tensors against C; Triton in ``test_fused_threshold``."""

from math import inf, nan
from types import SimpleNamespace

import pytest
import torch

from lightning_sparse import HardThreshold
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import native
from lightning_sparse.selection.bucket import FlatBucket, Residual, keep_rest
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.selection.numbers import SLOTS
from lightning_sparse.sparsifiers import LayerLayout

THRESHOLDS = (0.0, 0.5, 3.0)
WIRES = {
    "float32": Wire(torch.float32),
    "bfloat16": Wire(torch.bfloat16),
    "float16": Wire(torch.float16),
    "float8": Wire(torch.float8_e4m3fn, 2.0**-6),
    "int8": Wire(torch.int8, 2.0**-6),
}
NATIVE = ("float32", "bfloat16", "float8")
MAGNITUDES = (
    *(0.0, 1e-45, 1e-40, 2.0**-7, 0.01),  # subnormal numbers, half a step of the coarsest wires
    *(0.49999997, 0.5, 0.50000006, 2.9999998, 3.0),  # around λ
    *(0.501953125, 0.505859375, 1.0009765625, 1.5707964),  # halfway between bfloat16 numbers, to even; and not
    *(3584.0, 3585.0, 65_504.0, 65_520.0, 7e4, 3.3895314e38, 3.4e38),  # the ends of float8, float16 and bfloat16
    *(nan, inf),
)


def rows():
    """Values of p, more than a group of 64 and no whole number of vectors."""
    values = torch.tensor(MAGNITUDES)
    return torch.cat([values, -values, values, -values, values])


def by_tensors(compensated, threshold, wire, overshoot=0.0):
    """What is sent, with zeros between, and what is kept."""
    kept = compensated.clone()
    selected = HardThreshold(threshold=threshold, overshoot=overshoot).select(
        kept, LayerLayout(("p",), (kept.numel(),))
    )
    indices, values = keep_rest(kept, selected, wire)
    sent = torch.zeros_like(kept)
    sent[indices] = values
    return sent, kept


def assert_same_bits(found, expected):
    """Tells -0.0 from 0.0; all NaN are alike."""
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
        different = actual.nan_to_num(0, inf, -inf).view(torch.int32) != wanted.nan_to_num(0, inf, -inf).view(
            torch.int32
        )
        assert not different.any(), (rows()[different], actual[different], wanted[different])


@pytest.mark.parametrize("overshoot", [0.0, 0.6])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", NATIVE)
def test_c_sends_and_keeps_what_tensors_do(name, threshold, overshoot):
    wire, p = WIRES[name], rows()
    if not native.is_native(p, wire_dtype=wire.dtype):
        pytest.skip("no compiled functions here: no C compiler, or too many threads")
    nothing = torch.full_like(p, -0.0)  # p + -0.0 is p, also where p is -0.0
    expected = by_tensors(p, threshold, wire, overshoot)

    kept, sent = torch.full_like(p, nan), torch.full_like(p, nan)
    sparsifier = HardThreshold(threshold=threshold, overshoot=overshoot)
    extraction = Extraction(sparsifier, num_slices=0, per_layer=False, keeps_rest=True)
    payload_format = PayloadFormat(p.numel(), wire)
    shipment = SimpleNamespace(format=payload_format, payload=None, out=sent, divisor=1, is_cleared=False)
    bucket = FlatBucket(0, LayerLayout(("p",), (p.numel(),)), nothing, Residual(p, kept), is_last=True)
    masked = extraction.fill(bucket, shipment)
    assert_same_bits((sent, kept), expected)

    kept.fill_(nan)
    sent = torch.zeros_like(p)
    shipment.payload = payload = torch.zeros(payload_format.payload_bytes(p.numel()), dtype=torch.uint8)
    into_payload = extraction.fill(bucket, shipment)
    indices, values = payload_format.unpack(payload, p.dtype, int(into_payload[SLOTS["selected"]]))
    sent[indices] = values
    assert_same_bits((sent, kept), expected)
    numbers = [int((p.abs() < threshold).logical_not().sum()), int(p.isfinite().logical_not().sum())]
    for header in (masked, into_payload):
        assert [int(header[SLOTS[name]]) for name in ("selected", "non_finite")] == numbers
