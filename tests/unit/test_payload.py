import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat, round_to_wire, wire_dtype
from lightning_sparse.sparsifiers import Selection

WIRE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


@st.composite
def selections(draw):
    num_elements = draw(st.sampled_from([0, 1, 7, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 200_000]))
    edges = [i for i in (0, 32_767, 32_768, 65_535, 65_536, 131_071, num_elements - 1) if 0 <= i < num_elements]
    places = st.one_of(st.integers(0, num_elements - 1), st.sampled_from(edges)) if num_elements else st.nothing()
    indices = sorted(draw(st.sets(places, max_size=50))) if num_elements else []
    numbers = draw(st.lists(st.floats(width=32, allow_nan=True), min_size=len(indices), max_size=len(indices)))
    return num_elements, indices, numbers


@given(selections(), st.sampled_from(WIRE_DTYPES), st.integers(0, 5), st.integers(-20, 20))
@example((0, [], []), torch.float32, 0, 0)
@example((BLOCK_ELEMENTS, list(range(BLOCK_ELEMENTS)), [1.0] * BLOCK_ELEMENTS), torch.bfloat16, 3, 0)
def test_unpacking_returns_what_was_packed_as_far_as_there_was_room(selection, dtype, header_fields, spare):
    num_elements, indices, numbers = selection
    working = torch.float64 if dtype == torch.float64 else torch.float32
    values = round_to_wire(torch.tensor(numbers, dtype=working), dtype)
    chosen = Selection(torch.tensor(indices, dtype=torch.int64), values)
    payload_format = PayloadFormat(num_elements, dtype, header_fields)
    capacity = max(0, len(indices) + spare)
    payload = torch.full((payload_format.payload_bytes(capacity),), 0xFF, dtype=torch.uint8)
    header = torch.arange(header_fields, dtype=torch.float64) + 0.5
    payload_format.parts(payload).header.copy_(header)
    payload_format.fill(payload, chosen)

    assert payload_format.capacity(payload.numel()) == capacity
    assert torch.equal(payload_format.parts(payload).header, header)
    assert payload_format.num_selected(payload) == len(indices)
    held = min(capacity, len(indices))
    unpacked = payload_format.unpack(payload, working, len(indices))
    assert unpacked.indices.tolist() == indices[:held]
    torch.testing.assert_close(unpacked.values, values[:held], rtol=0, atol=0, equal_nan=True)

    padded = payload_format.unpack_padded(payload, working)
    assert padded.indices.tolist() == indices[:held] + [num_elements] * (capacity - held)
    expected = torch.cat([values[:held], torch.zeros(capacity - held, dtype=working)])
    torch.testing.assert_close(padded.values, expected, rtol=0, atol=0, equal_nan=True)

    if spare >= 0:
        again = payload_format.unpack_many([payload, payload], working, [len(indices)] * 2)
        assert again.indices.tolist() == indices * 2
        torch.testing.assert_close(again.values, values.repeat(2), rtol=0, atol=0, equal_nan=True)
    exact = payload_format.pack(chosen)
    assert exact.numel() == payload_format.payload_bytes(len(indices))
    assert payload_format.unpack(exact, working).indices.tolist() == indices


@pytest.mark.parametrize(("dtype", "bytes_a_coordinate"), [(torch.float32, 6), (torch.bfloat16, 4), (torch.float16, 4)])
def test_a_coordinate_costs_its_value_and_two_bytes(dtype, bytes_a_coordinate):
    payload_format = PayloadFormat(1_000_000, dtype, 4)
    empty, full = (payload_format.pack(Selection(torch.arange(k), torch.ones(k))).numel() for k in (0, 10_000))
    assert full - empty == 10_000 * bytes_a_coordinate
    assert empty <= 32 + 4 * 16 + 4  # header, a count per block, padding


@pytest.mark.parametrize(
    ("value_dtype", "residual_dtype", "expected"),
    [
        ("float32", torch.float32, torch.float32),
        ("float32", torch.float64, torch.float64),
        ("bfloat16", torch.float64, torch.bfloat16),
        ("float16", torch.float32, torch.float16),
    ],
)
def test_float32_sends_what_the_residual_holds(value_dtype, residual_dtype, expected):
    assert wire_dtype(value_dtype, residual_dtype) == expected


def test_rounding_keeps_nan_and_infinity_and_makes_no_new_ones():
    values = torch.tensor([NAN, INF, -INF, 1e38, -1e38, 70_000.0, 1.0 + 2**-20])
    rounded = round_to_wire(values, torch.float16)
    assert rounded.isnan().tolist() == [True] + [False] * 6
    assert rounded[1:].tolist() == [INF, -INF, 65_504.0, -65_504.0, 65_504.0, 1.0]
