"""The CPU's way against the plain definition, bit by bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_sparse.exchange.wire import Wire
from lightning_sparse.selection.block_filter import BLOCK_ELEMENTS, CHUNK_ELEMENTS, BlockFilter, repair
from lightning_sparse.selection.residual import Residual
from lightning_sparse.sparsifiers import ThresholdRun

NAN, INF = float("nan"), float("inf")
FLOAT = Wire(torch.float32)
WIRES = (FLOAT, *map(Wire, (torch.float64, torch.bfloat16, torch.float16)), Wire(torch.int16, 2.0**-12))
SIZES = [0, 1, 7, 127, 128, 129, 1000, 5 * BLOCK_ELEMENTS, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 130, 2 * CHUNK_ELEMENTS]


@st.composite
def cases(draw):
    size = draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    gradient_dtype = draw(st.sampled_from([dtype, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scale = draw(st.sampled_from([0.1, 1.0, 1e5]))
    residual = torch.randn(size, generator=generator, dtype=dtype) * 0.3
    gradient = (torch.randn(size, generator=generator, dtype=dtype) * scale).to(gradient_dtype)
    for _ in range(draw(st.integers(0, 6)) if size else 0):
        gradient[draw(st.integers(0, size - 1))] = draw(st.sampled_from([NAN, INF, -INF, 1.0, -1.0, -0.0, 30000.0]))
    if size and draw(st.booleans()):
        place = draw(st.integers(0, size - 1))
        residual[place], gradient[place] = 0.0, 0.0  # a selected zero where λ is 0
    cuts = sorted({0, size, *(draw(st.integers(0, size)) for _ in range(draw(st.integers(0, 3))))})
    thresholds = st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e38, INF])
    runs = [ThresholdRun(draw(thresholds), start, end) for start, end in pairwise(cuts)] or [ThresholdRun(1.0, 0, 0)]
    wire = draw(st.sampled_from(WIRES if dtype == torch.float64 else [one for one in WIRES if one.itemsize < 8]))
    loss_scale = draw(st.sampled_from([None, torch.tensor(4.0), torch.tensor(3.0)]))
    return residual, gradient, runs, loss_scale, wire


def plainly(residual, gradient, runs, loss_scale, wire):
    """p, what is sent (dense), the mask of what is sent, e'."""
    g = gradient.to(residual.dtype)
    p = residual + (g if loss_scale is None else g / loss_scale)
    mask = torch.zeros(p.shape, dtype=torch.bool)
    for threshold, start, end in runs:
        mask[start:end] = ~(p[start:end].abs() < threshold)
    if wire.is_whole:
        whole = p.double().div(wire.step).clamp(-32_767, 32_767).round()
        rounded = torch.where(p.isfinite(), (whole * wire.step).to(p.dtype), NAN)
    else:
        limit = torch.finfo(wire.dtype).max
        rounded = torch.where(p.isfinite(), p.clamp(-limit, limit), p).to(wire.dtype).to(p.dtype)
    out = torch.where(mask, rounded, 0.0)
    rest = p - out
    return p, out, mask, torch.where(rest.isfinite(), rest, 0.0)


def assert_same_bits(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@given(cases())
@example((torch.zeros(300), torch.ones(300), [ThresholdRun(1.0, 0, 300)], None, FLOAT))
@example((torch.zeros(300), -torch.ones(300), [ThresholdRun(0.0, 0, 300)], None, WIRES[2]))
def test_what_is_taken_out_is_what_the_definition_says(case):
    residual, gradient, runs, loss_scale, wire = case
    _, out, mask, rest = plainly(*case)
    gradient_before = gradient.clone()
    block_filter = BlockFilter()

    residual_before = residual.clone()

    def into_new():
        return Residual(residual, torch.full_like(residual, NAN))

    sent = block_filter.take_out(new := into_new(), gradient, runs, loss_scale, wire)
    kept = new.after
    assert sent.indices.tolist() == mask.nonzero().squeeze(1).tolist()
    assert_same_bits(sent.values, out[mask])
    assert_same_bits(kept, rest)
    assert_same_bits(gradient, gradient_before)

    cleared = gradient.clone()
    again = block_filter.take_out(in_place(residual.clone()), cleared, runs, loss_scale, wire, clears_gradient=True)
    assert torch.equal(again.indices, sent.indices)
    assert not cleared.any()

    masked = torch.full_like(residual, 7.0)
    counts = block_filter.take_out_masked(new := into_new(), gradient, runs, loss_scale, wire, masked)
    kept = new.after
    assert counts == [int(mask[start:end].sum()) for _, start, end in runs]
    assert_same_bits(masked, out)
    assert repair(kept) == int(out.isfinite().logical_not().sum())
    assert_same_bits(kept, rest)
    assert not block_filter.is_zero(kept)

    divided = torch.empty_like(residual)
    block_filter.take_out_masked(
        new := in_place(residual.clone()), gradient, runs, loss_scale, wire, divided, divisor=3
    )
    kept = new.after
    assert_same_bits(divided, out / 3)
    repair(kept)
    assert_same_bits(kept, rest)
    assert_same_bits(residual, residual_before)


def in_place(residual):
    return Residual(residual, residual)


@pytest.mark.parametrize("density", [0.0, 0.0005, 0.02, 0.3, 1.0])
def test_any_density_comes_out_in_one_piece(density):
    size = 3 * CHUNK_ELEMENTS + 5 * BLOCK_ELEMENTS + 3
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(size, generator=generator) * 0.9
    chosen = torch.rand(size, generator=generator) < density
    p[chosen] = -1.5
    residual = torch.zeros(size)
    sent = BlockFilter().take_out(in_place(residual), p, [ThresholdRun(1.0, 0, size)], None, FLOAT)
    assert torch.equal(sent.indices, chosen.nonzero().squeeze(1))
    assert torch.equal(residual, torch.where(chosen, 0.0, p))


def test_the_masked_gradient_may_take_the_gradients_place():
    gradient = torch.tensor([0.5, 2.0, NAN, -0.25])
    residual = torch.tensor([0.5, 0.0, 0.0, 0.25])
    runs = [ThresholdRun(1.0, 0, 4)]
    counts = BlockFilter().take_out_masked(in_place(residual), gradient, runs, None, FLOAT, gradient)
    assert counts == [3]
    assert_same_bits(gradient, torch.tensor([1.0, 2.0, NAN, 0.0]))
    assert_same_bits(residual, torch.tensor([0.0, 0.0, NAN, 0.0]))


def test_a_residual_is_known_to_be_zero_only_while_nobody_writes_into_it():
    block_filter, runs = BlockFilter(), [ThresholdRun(0.0, 0, 200)]
    residual, out = torch.full((200,), 0.5), torch.empty(200)
    for _ in range(2):
        block_filter.take_out_masked(in_place(residual), torch.ones(200), runs, None, FLOAT, out)
        assert block_filter.is_zero(residual)
    assert torch.equal(out, torch.ones(200))
    residual[3:5] += 1.0  # for example loaded
    assert not block_filter.is_zero(residual)
    block_filter.take_out_masked(in_place(residual), torch.ones(200), runs, None, FLOAT, out)
    assert out[2:6].tolist() == [1.0, 2.0, 2.0, 1.0]
    assert not residual.any()


def test_with_two_residuals_in_turn_each_is_known_to_be_zero_or_not():
    block_filter, runs, out = BlockFilter(), [ThresholdRun(0.0, 0, 200)], torch.empty(200)
    one, other = torch.full((200,), 0.5), torch.full((200,), NAN)
    for before, after, expected in ((one, other, 1.5), (other, one, 1.0), (one, other, 1.0)):
        block_filter.take_out_masked(Residual(before, after), torch.ones(200), runs, None, FLOAT, out)
        assert torch.equal(out, torch.full((200,), expected))
        assert not after.any()
    other[7] = 2.0
    block_filter.take_out_masked(Residual(other, one), torch.ones(200), runs, None, FLOAT, out)
    assert out[7] == 3.0


def test_non_finite_values_are_found_when_everything_is_sent():
    block_filter, runs = BlockFilter(), [ThresholdRun(0.0, 0, 4)]
    residual = torch.zeros(4)
    for _ in range(2):
        gradient = torch.tensor([1.0, NAN, -INF, INF])
        block_filter.take_out_masked(in_place(residual), gradient, runs, None, FLOAT, gradient)
        assert_same_bits(gradient, torch.tensor([1.0, NAN, -INF, INF]))
        assert repair(residual) == 3
        assert not residual.any()
