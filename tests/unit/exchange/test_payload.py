import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_sparse import Dense, HardThreshold, ScaledIntegerRounding, TopK
from lightning_sparse.engine.options import ExchangeOptions
from lightning_sparse.exchange import wire
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat, aligned
from lightning_sparse.exchange.wire import Wire, wire_of
from lightning_sparse.sparsifiers.protocol import Selection
from tests.unit.buckets import packed

FLOAT32, FLOAT64, BFLOAT16 = map(Wire, (torch.float32, torch.float64, torch.bfloat16))
INT8, FLOAT8 = Wire(torch.int8, 0.25), Wire(torch.float8_e4m3fn, 2.0**-11)
WIRES = (FLOAT32, FLOAT64, BFLOAT16, INT8, FLOAT8)
NAN, INF = float("nan"), float("inf")


@st.composite
def selections(draw):
    num_elements = draw(st.sampled_from([0, 1, 7, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 200_000]))
    edges = [i for i in (0, 32_767, 32_768, 65_535, 65_536, 131_071, num_elements - 1) if 0 <= i < num_elements]
    places = st.one_of(st.integers(0, num_elements - 1), st.sampled_from(edges)) if num_elements else st.nothing()
    indices = sorted(draw(st.sets(places, max_size=50))) if num_elements else []
    numbers = draw(st.lists(st.floats(width=32, allow_nan=True), min_size=len(indices), max_size=len(indices)))
    return num_elements, indices, numbers


@given(selections(), st.sampled_from(WIRES), st.integers(0, 5), st.integers(-20, 60))
@example((0, [], []), FLOAT32, 0, 0)
@example((BLOCK_ELEMENTS, list(range(BLOCK_ELEMENTS)), [1.0] * BLOCK_ELEMENTS), BFLOAT16, 3, 0)
def test_unpacking_inverts_packing_up_to_the_capacity(selection, wire, header_fields, spare):
    num_elements, indices, numbers = selection
    working = torch.float64 if wire == FLOAT64 else torch.float32
    values = wire.rounded(torch.tensor(numbers, dtype=working))
    chosen = Selection(torch.tensor(indices, dtype=torch.int64), values)
    payload_format = PayloadFormat(num_elements, wire, header_fields)
    capacity = max(0, len(indices) + spare)
    payload = torch.full((payload_format.payload_bytes(capacity),), 0xFF, dtype=torch.uint8)
    header = torch.arange(header_fields, dtype=torch.float64) + 0.5
    payload_format.parts(payload).header.copy_(header)
    payload_format.fill(payload, chosen)

    assert payload_format.capacity(payload.numel()) == capacity
    assert torch.equal(payload_format.parts(payload).header, header)
    held = min(capacity, len(indices))
    unpacked = payload_format.unpack(payload, working, len(indices))
    assert unpacked.indices.tolist() == payload_format.unpack(payload, working).indices.tolist() == indices[:held]
    torch.testing.assert_close(unpacked.values, values[:held], rtol=0, atol=0, equal_nan=True)

    padded = payload_format.unpack_padded(payload, working)
    assert padded.indices.tolist() == indices[:held] + [num_elements] * (capacity - held)
    expected = torch.cat([values[:held], torch.zeros(capacity - held, dtype=working)])
    torch.testing.assert_close(padded.values, expected, rtol=0, atol=0, equal_nan=True)

    if num_elements:
        short = payload_format.shortened(payload)
        assert short.numel() == payload_format.payload_bytes(min(aligned(len(indices)), capacity))
        assert torch.equal(payload_format.parts(short).header, header)
        unpacked = payload_format.unpack(short, working)
        assert unpacked.indices.tolist() == indices[:held]
        torch.testing.assert_close(unpacked.values, values[:held], rtol=0, atol=0, equal_nan=True)

    exact = packed(payload_format, chosen)
    assert exact.numel() == payload_format.payload_bytes(len(indices))
    assert payload_format.unpack(exact, working).indices.tolist() == indices


@pytest.mark.parametrize(("wire", "bytes_per_coordinate"), [(FLOAT32, 6), (BFLOAT16, 4), (INT8, 3), (FLOAT8, 3)])
def test_a_coordinate_costs_its_value_and_two_bytes(wire, bytes_per_coordinate):
    payload_format = PayloadFormat(1_000_000, wire, 4)
    empty, full = (packed(payload_format, Selection(torch.arange(k), torch.ones(k))).numel() for k in (0, 10_000))
    assert full - empty == 10_000 * bytes_per_coordinate
    assert empty <= 32 + 4 * 16 + 4  # header, a count per block, padding


def test_a_wire_of_multiples_takes_the_step_of_the_sparsifier():
    assert wire_of("int8", torch.float32, ScaledIntegerRounding(0.7)) == Wire(torch.int8, 0.5)
    assert wire_of("float8", torch.float64, HardThreshold(threshold=1.0, layer_thresholds={"a": 0.5})).step == 2.0**-4
    assert wire_of("bfloat16", torch.float32, HardThreshold(threshold=1.0)) == BFLOAT16
    # λ are too far apart or too small; with a density, λ is unknown before training.
    far_apart, too_small = HardThreshold(threshold=1.0, layer_thresholds={"a": 1e-9}), HardThreshold(threshold=1e-50)
    wire._warn_of_missing_step.cache_clear()
    with pytest.warns(UserWarning, match="the range of value_dtype='float8' is too small"):
        assert wire_of("float8", torch.float32, far_apart) == FLOAT32
    assert wire_of("float8", torch.float64, too_small) == FLOAT64


@pytest.mark.parametrize(
    ("sparsifier", "value_dtype", "message"),
    [
        (TopK(0.1), "float8", "with TopK, which has no step for small dtypes"),
        (HardThreshold(threshold=0.0), "float8", "a threshold of 0. This dtype sends multiples"),
        (HardThreshold(threshold=0.1, layer_thresholds={"*.bias": 0.0}), "float8", "a threshold of 0"),
        (HardThreshold(threshold=1e-50), "float8", "is not a float32 number"),
        (Dense(), "float8", "with Dense and a threshold of 0"),
        (HardThreshold(threshold=0.1), "int8", "has 127 positive values.* Use 'float8'"),
        (HardThreshold(density=0.1), "int8", "has 127 positive values, and λ takes 8 to 16"),
        (HardThreshold(threshold=0.0), "int8", "has 127 positive values, and λ takes 8 to 16"),
        (
            HardThreshold(threshold=0.1, layer_thresholds={"bias": 1e-4}),
            "float8",
            "thresholds from 0.0001 to 0.1. .*'bfloat16'",
        ),
    ],
)
def test_multiples_need_a_step_that_fits(sparsifier, value_dtype, message):
    with pytest.raises(ValueError, match=message):
        ExchangeOptions(value_dtype=value_dtype).validate(sparsifier)
    ExchangeOptions(value_dtype="bfloat16").validate(sparsifier)


def test_rounding_keeps_nan_and_infinity_and_adds_none():
    most = torch.finfo(torch.bfloat16).max
    values = torch.tensor([NAN, INF, -INF, 3.4e38, -3.4e38, 1.0 + 2**-20])
    rounded = BFLOAT16.rounded(values)
    assert rounded.isnan().tolist() == [True] + [False] * 5
    assert rounded[1:].tolist() == [INF, -INF, most, -most, 1.0]


def test_a_grid_rounds_half_to_even_and_maps_non_finite_values_to_nan():
    values = torch.tensor([0.125, 0.375, -0.375, -0.1, 31.75, 32.0, -1e38, 31.9, NAN, INF, -INF])
    rounded = INT8.rounded(values)
    assert rounded[:8].tolist() == [0.0, 0.5, -0.5, 0.0, 31.75, 31.75, -31.75, 31.75]
    assert torch.signbit(rounded[:8]).tolist() == [False, False, True, False, False, False, True, False]
    assert rounded[8:].isnan().all()
    assert INT8.encoded(rounded).tolist() == [0, 2, -2, 0, 127, 127, -127, 127, -128, -128, -128]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.sampled_from([torch.int8, torch.int16, torch.float8_e4m3fn]),
    st.integers(-126, 20),
    st.sampled_from([torch.float32, torch.float64]),
)
@example([-(2.0**127)], torch.int8, -126, torch.float32)
def test_multiples_round_to_half_of_their_last_bit_within_their_range(numbers, dtype, exponent, working):
    wire, values = Wire(dtype, 2.0**exponent), torch.tensor(numbers, dtype=working)
    rounded = wire.rounded(values)
    assert torch.equal(rounded, wire.decoded(wire.encoded(rounded), working))
    left, magnitude = (values.double() - rounded.double()).abs(), values.double().abs()
    share = magnitude / 16 if dtype == torch.float8_e4m3fn else torch.zeros_like(magnitude)
    beyond = magnitude - wire.limit * wire.scale
    assert (left <= torch.maximum(share, beyond).clamp(min=wire.step / 2)).all()


def test_float8_values_match_their_bits():
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        value = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7) * (-1) ** sign
        found = FLOAT8.decoded(torch.tensor([code], dtype=torch.uint8), torch.float64).item()
        assert found == value * FLOAT8.scale or (code & 127 == 127 and found != found)
        if found == found:
            assert FLOAT8.encoded(torch.tensor([found])).item() == code
