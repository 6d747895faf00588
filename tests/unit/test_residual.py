import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import HardThreshold, TopK
from lightning_sparse.payload import round_to_wire, wire_dtype
from lightning_sparse.residual import ResidualMemory, compensate, keep_rest, rescale, take_back
from lightning_sparse.sparsifiers import LayerLayout
from tests.unit.strategies import DTYPES, layouts, thresholds, values

SPARSIFIERS = st.one_of(thresholds.map(HardThreshold), st.floats(0.01, 1).map(TopK))


@st.composite
def steps(draw, *, finite):
    layout = draw(layouts())
    dtype = draw(st.sampled_from(DTYPES))
    residual = draw(values(layout.num_elements, dtype, finite=True, low=-1, high=1))
    gradient = draw(values(layout.num_elements, dtype, finite=finite))
    return layout, residual, gradient


def run_step(layout, residual, gradient, sparsifier, value_dtype="float32", scale=None):
    """One worker's step on copies: returns p as it should be, out as a dense tensor, e', and what was sent."""
    compensated = compensate(residual.clone(), gradient, scale)
    expected = compensated.clone()
    indices, selected = sparsifier.select(compensated, layout)
    sent = round_to_wire(selected, wire_dtype(value_dtype, compensated.dtype))
    kept = keep_rest(compensated, indices, sent)
    out = torch.zeros_like(expected)
    out[indices] = sent
    return expected, out, kept, indices, sent


@given(steps(finite=True), SPARSIFIERS, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_what_is_sent_and_what_is_kept_make_up_the_compensated_gradient(step, sparsifier, value_dtype):
    layout, residual, gradient = step
    expected, out, kept, _, _ = run_step(layout, residual, gradient, sparsifier, value_dtype)
    assert torch.equal(expected, residual + gradient)
    if expected.dtype == torch.float32:
        assert torch.equal(out + kept, expected)  # rounding to a half precision leaves what float32 can hold
    else:
        torch.testing.assert_close(out + kept, expected, rtol=1e-15, atol=0)


@given(steps(finite=False), thresholds)
def test_every_residual_is_below_the_threshold_after_a_step(step, threshold):
    *_, kept, _, _ = run_step(*step, HardThreshold(threshold))
    assert all(abs(value) < threshold or value == 0 for value in kept.tolist())


@given(steps(finite=False), SPARSIFIERS, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_no_residual_is_ever_nan_or_infinite(step, sparsifier, value_dtype):
    *_, kept, _, _ = run_step(*step, sparsifier, value_dtype)
    assert bool(kept.isfinite().all())


@given(steps(finite=True), st.floats(0.01, 20))
def test_a_zero_gradient_after_a_step_sends_nothing(step, threshold):
    layout, residual, gradient = step
    *_, kept, _, _ = run_step(layout, residual, gradient, HardThreshold(threshold))
    indices, _ = HardThreshold(threshold).select(compensate(kept, torch.zeros_like(gradient)), layout)
    assert indices.numel() == 0


@given(steps(finite=False), SPARSIFIERS, st.sampled_from(["float32", "bfloat16"]))
def test_taking_back_leaves_the_compensated_gradient_with_zero_where_it_was_not_finite(step, sparsifier, value_dtype):
    expected, _, kept, indices, sent = run_step(*step, sparsifier, value_dtype)
    restored = take_back(kept, indices, sent)
    wanted = torch.where(expected.isfinite(), expected, 0.0)
    if value_dtype == "float32" or expected.dtype == torch.float32:
        assert torch.equal(restored, wanted)
    else:
        torch.testing.assert_close(restored, wanted, rtol=1e-15, atol=0)


@given(steps(finite=True), st.sampled_from([1.0, 256.0, 65536.0]))
def test_a_loss_scale_changes_nothing_but_the_gradient_that_comes_in(step, scale):
    layout, residual, gradient = step
    gradient = gradient.clamp(-1e20, 1e20)
    plain = run_step(layout, residual, gradient, HardThreshold(0.5))
    scaled = run_step(layout, residual, gradient * scale, HardThreshold(0.5), scale=torch.tensor(scale))
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(one, other)


def test_a_value_beyond_float16_is_sent_in_parts_and_never_as_infinity():
    layout = LayerLayout(("w",), (1,))
    residual, received = torch.zeros(1), 0.0
    gradient = torch.tensor([150_000.0])
    for _ in range(4):
        _, out, residual, _, _ = run_step(layout, residual, gradient, HardThreshold(1.0), "float16")
        received += out.item()
        gradient = torch.zeros(1)
    assert received + residual.item() == 150_000.0
    assert residual.item() < 1.0


def test_a_bfloat16_gradient_is_compensated_in_float32():
    residual = torch.full((1,), 1e-3)
    compensate(residual, torch.tensor([1.0], dtype=torch.bfloat16))
    assert residual.dtype == torch.float32
    assert residual.item() == pytest.approx(1.001, rel=1e-6)


ONE = LayerLayout(("a", "b", "c"), (2, 3, 1))


def test_residuals_move_with_their_layer_when_buckets_change():
    memory = ResidualMemory()
    memory.bucket(0, ONE, torch.zeros(6)).copy_(torch.arange(6.0))
    first, second = LayerLayout(("c", "a"), (1, 2)), LayerLayout(("b",), (3,))
    assert memory.bucket(0, first, torch.zeros(3)).tolist() == [5.0, 0.0, 1.0]
    assert memory.bucket(1, second, torch.zeros(3)).tolist() == [2.0, 3.0, 4.0]


def test_a_bucket_is_the_memory_itself_until_its_layout_changes():
    memory = ResidualMemory()
    flat = memory.bucket(0, ONE, torch.zeros(6))
    assert memory.bucket(0, ONE, torch.zeros(6)).data_ptr() == flat.data_ptr()
    flat[0] = 3.0
    assert memory.state_dict()["a"].tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("gradient_dtype", "residual_dtype"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_residuals_are_float32_or_float64_where_the_gradient_is(gradient_dtype, residual_dtype):
    assert ResidualMemory().bucket(0, ONE, torch.zeros(6, dtype=gradient_dtype)).dtype == residual_dtype


def test_state_survives_a_round_trip_and_is_a_copy():
    memory = ResidualMemory()
    memory.bucket(0, ONE, torch.zeros(6)).copy_(torch.arange(6.0))
    state = memory.state_dict()
    frozen = copy.deepcopy(state)
    memory.bucket(0, ONE, torch.zeros(6)).zero_()
    assert all(torch.equal(state[name], frozen[name]) for name in frozen)
    restored = ResidualMemory()
    restored.load_state_dict(state)
    assert restored.bucket(0, ONE, torch.zeros(6)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({}, [1.0] * 6),
        ({"a": 2.0, "b": 2.0, "c": 2.0}, [2.0] * 6),
        ({"a": 2.0, "c": 0.5}, [2.0, 2.0, 1.0, 1.0, 1.0, 0.5]),
    ],
)
def test_each_layer_is_rescaled_by_its_own_factor(factors, expected):
    assert rescale(torch.ones(6), ONE, factors).tolist() == expected
