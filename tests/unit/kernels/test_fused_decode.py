"""The kernel that adds payloads against plain tensors, on a GPU or in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.exchange.payload import CAPACITY_STEP, PayloadFormat
from lightning_sparse.exchange.routes.adding import TILE, decode, divide
from lightning_sparse.exchange.wire import Wire
from tests.unit.buckets import payloads_of, selections
from tests.unit.kernels.test_fused_threshold import (
    AS_IT_IS,
    DEVICE,
    FLOAT32,
    FLOAT64,
    WIRES,
    check_guards,
    guarded,
    on_device,
    same_bits,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


KINDS = [
    *((FLOAT32, wire) for wire in (*WIRES, Wire(torch.int8, 0.25))),
    (FLOAT64, Wire(FLOAT64)),
    (FLOAT64, WIRES[-1]),
]


def check(size, chosen, dtype=FLOAT32, wire=AS_IT_IS, capacity=None, header_fields=0, divides_by="n"):
    """Decode on the device and compare the result with a loop over payloads."""
    payload_format = PayloadFormat(size, wire, header_fields)
    capacity = max(selection.indices.numel() for selection in chosen) + 1 if capacity is None else capacity
    capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
    n = len(chosen)
    expected, counts = torch.zeros(2, size, dtype=dtype)
    for indices, values in chosen:
        expected[indices[:capacity]] += values[:capacity].to(dtype)
        counts[indices[:capacity]] += values[:capacity] != 0
    expected /= {"n": n, "senders": counts.clamp(min=1)}[divides_by]
    out = guarded(torch.zeros(size, dtype=dtype))
    senders = guarded(torch.zeros(size, dtype=torch.int32))
    payloads = payloads_of(payload_format, chosen, capacity).to(DEVICE)
    of_senders = senders if divides_by == "senders" else None
    decode(payload_format, payloads, out, 1, of_senders)
    same_bits(out, expected)
    check_guards(out, senders)


@on_device
@pytest.mark.parametrize(("dtype", "wire"), KINDS)
@pytest.mark.parametrize("counts", [[900], [900, 900], [400, 0, 700], [3, 5000, 17, 1, 6000]])
def test_payloads_are_added_in_rank_order_and_divided_once(dtype, wire, counts):
    check(70_000, selections(70_000, counts, dtype, wire), dtype, wire, header_fields=7)


@on_device
@pytest.mark.parametrize("divides_by", ["n", "senders"])
@pytest.mark.parametrize(
    ("size", "counts"),
    [
        *((size, [min(size, 40), min(size, 3), size // 2]) for size in (1, 5, 65_535, 65_536, 65_537, 140_000)),
        *((3 * TILE, [count, 2, count]) for count in (TILE - 1, TILE, TILE + 1, 3 * TILE)),
        *((size, [0, 0]) for size in (70_000, 0)),
    ],
)
def test_decoding_equals_a_loop_at_tile_boundaries(size, counts, divides_by):
    check(size, selections(size, counts), divides_by=divides_by)


@on_device
@pytest.mark.parametrize(("size", "whole"), [(100, 250), (66_000, 130_001), (9, 10)])
def test_decode_concatenates_neighbouring_parts(size, whole):
    payload_format, dense = PayloadFormat(size, AS_IT_IS), torch.zeros(3, size)
    generator = torch.Generator().manual_seed(0)
    for rank in range(3):
        part = dense[rank, : max(min(size, whole - rank * size), 0)]
        part[::3] = torch.randn(part[::3].shape, generator=generator)
    payloads = torch.zeros(3, payload_format.payload_bytes(-(-size // 4) * 4), dtype=torch.uint8)
    for row, payload in zip(dense, payloads, strict=True):
        payload_format.fill_marked(payload, row, row)
    out = guarded(torch.zeros(whole))
    decode(payload_format, payloads.to(DEVICE), out, len(payloads))
    same_bits(out, dense.flatten()[:whole])
    check_guards(out)


@on_device
@settings(max_examples=40)
@given(data=st.data())
def test_decoding_equals_a_loop_for_random_payloads(data):
    size, n = data.draw(st.sampled_from([3, 100, 66_000])), data.draw(st.integers(1, 5))
    counts = [data.draw(st.integers(0, min(size, 200))) for _ in range(n)]
    wire = data.draw(st.sampled_from(WIRES))
    chosen = selections(size, counts, wire=wire, seed=data.draw(st.integers(0, 99)))
    check(size, chosen, wire=wire, capacity=data.draw(st.integers(0, 220)))


@on_device
@pytest.mark.parametrize("num_workers", [3, 7])
def test_sums_are_divided_as_on_a_cpu(num_workers):
    sums = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    divided = guarded(sums)
    divide(divided, num_workers)
    same_bits(divided, sums / num_workers)
