import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import HardThreshold, ScaledIntegerRounding, StochasticRounding, TopK
from lightning_sparse.engine.grouping import as_parameter, flatten_as
from lightning_sparse.engine.residuals import ResidualMemory
from lightning_sparse.exchange.wire import wire_of
from lightning_sparse.selection.bucket import Residual, compensate, keep_residual
from lightning_sparse.sparsifiers.protocol import LayerLayout
from tests.unit.buckets import DTYPES, layouts, thresholds, values

SPARSIFIERS = st.one_of(thresholds.map(lambda limit: HardThreshold(threshold=limit)), st.floats(0.01, 1).map(TopK))


@st.composite
def steps(draw, *, finite):
    layout = draw(layouts())
    dtype = draw(st.sampled_from(DTYPES))
    residual = draw(values(layout.num_elements, dtype, finite=True, low=-1, high=1))
    gradient = draw(values(layout.num_elements, dtype, finite=finite))
    return layout, residual, gradient


def run_step(layout, residual, gradient, sparsifier, value_dtype="float32", scale=None):
    """One worker's step on copies: returns p as it should be, out as a dense tensor, e', and what was sent."""
    before = residual.clone()
    compensated = compensate(Residual(residual, torch.full_like(residual, torch.nan)), gradient, scale)
    assert torch.equal(residual, before)
    expected = compensated.clone()
    selected = sparsifier.select(compensated, layout)
    indices, sent = keep_residual(compensated, selected, wire_of(value_dtype, compensated.dtype, sparsifier))
    out = torch.zeros_like(expected)
    out[indices] = sent
    return expected, out, compensated, sent


@given(steps(finite=True), SPARSIFIERS, st.sampled_from(["float32", "bfloat16"]))
def test_sent_plus_kept_values_equal_the_compensated_gradient(step, sparsifier, value_dtype):
    layout, residual, gradient = step
    expected, out, kept, _ = run_step(layout, residual, gradient, sparsifier, value_dtype)
    assert torch.equal(expected, residual + gradient)
    if expected.dtype == torch.float32:
        assert torch.equal(out + kept, expected)  # float32 represents the rounding error of half precision exactly
    else:
        torch.testing.assert_close(out + kept, expected, rtol=1e-15, atol=0)


@given(steps(finite=False), thresholds)
def test_a_step_leaves_residuals_below_the_threshold(step, threshold):
    *_, kept, _ = run_step(*step, HardThreshold(threshold=threshold))
    assert all(abs(value) < threshold or value == 0 for value in kept.tolist())


@given(steps(finite=True), st.floats(2.0**-20, 20))
def test_sent_multiples_leave_at_most_the_threshold(step, threshold):
    sparsifier = HardThreshold(threshold=threshold)
    size = sparsifier.grid_step(229_376)
    assert threshold / 16 < size <= threshold / 8
    expected, out, kept, sent = run_step(*step, sparsifier, "float8")
    assert all(value / size == round(value / size) for value in sent.tolist())
    torch.testing.assert_close(out.double() + kept.double(), expected.double(), rtol=2.0**-23, atol=0)
    assert (kept.double().abs()[expected.double().abs() <= 16 * threshold] <= threshold).all()


@given(steps(finite=True), st.sampled_from([2.0**-10, 0.5, 3.0]), st.sampled_from(["float32", "int8"]))
def test_rounding_leaves_less_than_a_step_within_the_range(step, size, value_dtype):
    most = {"float32": float("inf"), "int8": 127}[value_dtype]
    for sparsifier, share in ((ScaledIntegerRounding(size), 0.5), (StochasticRounding(size), 1.0)):
        grid = sparsifier.grid_step()
        assert size / 2 < grid <= size
        expected, out, kept, sent = run_step(*step, sparsifier, value_dtype)
        assert all(value / grid == round(value / grid) != 0 for value in sent.tolist())
        eps = torch.finfo(expected.dtype).eps * expected.double().abs()
        beyond = expected.double().abs() - most * grid
        assert (kept.double().abs() <= beyond.clamp(min=share * grid) + eps).all()
        torch.testing.assert_close(out.double() + kept.double(), expected.double(), rtol=2.0**-23, atol=2.0**-24 * grid)


@given(steps(finite=False), SPARSIFIERS, st.sampled_from(["float32", "bfloat16"]))
def test_residuals_stay_finite(step, sparsifier, value_dtype):
    *_, kept, _ = run_step(*step, sparsifier, value_dtype)
    assert bool(kept.isfinite().all())


@given(steps(finite=True), st.sampled_from([1.0, 256.0, 65536.0]))
def test_a_loss_scale_changes_only_the_incoming_gradient(step, scale):
    layout, residual, gradient = step
    gradient = gradient.clamp(-1e20, 1e20)
    plain = run_step(layout, residual, gradient, HardThreshold(threshold=0.5))
    scaled = run_step(layout, residual, gradient * scale, HardThreshold(threshold=0.5), scale=torch.tensor(scale))
    for unscaled, other in zip(plain, scaled, strict=True):
        assert torch.equal(unscaled, other)


ONE = LayerLayout(("a", "b", "c"), (2, 3, 1))


names = st.sets(st.sampled_from(["a", "b", "c"]))
EVENTS = st.one_of(
    st.tuples(st.just("backward"), names),
    st.tuples(st.sampled_from(["commit", "roll_back"]), names),
    st.tuples(st.sampled_from(["breaks off", "moves", "sends all"]), st.just(set())),
)
LAYOUTS = [{0: ONE}, {0: LayerLayout(("c", "a"), (1, 2)), 1: LayerLayout(("b",), (3,))}]


@given(st.lists(EVENTS, max_size=12))
def test_commits_keep_steps_and_rollbacks_leave_no_trace(events):
    memory = ResidualMemory()
    sizes = dict(zip(ONE.names, ONE.sizes, strict=True))
    committed = {name: torch.zeros(size) for name, size in sizes.items()}
    pending_ = {}
    buckets, gradient, saved = LAYOUTS[0], 1.0, []
    has_run = False
    for event, chosen in events:
        if event == "moves":
            buckets = LAYOUTS[1] if buckets is LAYOUTS[0] else LAYOUTS[0]
        elif event in ("backward", "breaks off", "sends all"):
            has_run = True
            for index, layout in buckets.items():
                residual = memory.begin_bucket(index, layout, torch.zeros(layout.num_elements))
                added = torch.zeros(layout.num_elements)
                for name, start, end in layout.spans():
                    added[start:end] = 0.0 if name in chosen else gradient
                if residual.is_zero:
                    assert not any(part.any() for part in residual[:2])
                if event != "sends all":
                    torch.add(residual.before, added, out=residual.after)
                elif not residual.is_zero:
                    residual.after.zero_()
            if event == "breaks off":
                memory.roll_back(set(sizes))
                pending_ = {}
                continue
            for index, layout in buckets.items():
                memory.keep(index, chosen & set(layout.names))
            for name in sizes.keys() - chosen:
                pending_[name] = (pending_.get(name, committed[name]) + gradient) * (event != "sends all")
            gradient *= 2
        elif event == "commit":
            memory.commit(chosen)
            committed |= {name: pending_.pop(name) for name in chosen & pending_.keys()}
        else:
            memory.roll_back(chosen)
            pending_ = {name: tensor for name, tensor in pending_.items() if name not in chosen}
        if has_run:
            saved.append((memory.state_dict(), dict(committed)))
            for state, expected in saved:  # including earlier steps, because states are copies
                for name, tensor in state.items():
                    assert torch.equal(tensor, expected[name]), (event, name)
            settled = copy.deepcopy(memory)
            settled.commit(set(sizes))
            for name, tensor in settled.layers().items():
                assert torch.equal(tensor, pending_.get(name, committed[name])), (event, name)


def test_a_memory_is_zero_until_something_is_written():
    memory = ResidualMemory()
    for buckets in (*LAYOUTS, *LAYOUTS):  # DDP rebuilds its buckets
        for index, layout in buckets.items():
            residual = memory.begin_bucket(index, layout, torch.zeros(layout.num_elements))
            assert residual.is_zero
            memory.keep(index)
        memory.commit({"a", "b", "c"})
    memory.load_state_dict(dict.fromkeys("abc", torch.ones(1)) | {"b": torch.ones(3), "a": torch.ones(2)})
    assert not memory.begin_bucket(0, ONE, torch.zeros(6)).is_zero


def test_a_memory_in_place_has_a_single_tensor():
    memory = ResidualMemory(in_place=True)
    before, after, _ = memory.begin_bucket(0, ONE, torch.zeros(6))
    assert before is after
    after.fill_(1.0)  # then an exception aborts the backward
    memory.load_state_dict({})
    assert not memory.begin_bucket(0, ONE, torch.zeros(6)).before.any()


@pytest.mark.parametrize(
    "parameter",
    [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 2).permute(2, 0, 1),
        torch.zeros(3, 4, dtype=torch.complex64).t(),
        torch.zeros(4, 1, 3).expand(4, 2, 3),
        torch.zeros(5),
        torch.zeros(()),
    ],
    ids=lambda parameter: f"{tuple(parameter.shape)}, {tuple(parameter.stride())}, {parameter.dtype}",
)
def test_residuals_are_saved_in_index_order_for_any_memory_format(parameter):
    numbers = torch.arange(float(parameter.numel() * (2 if parameter.is_complex() else 1)))
    wanted = torch.view_as_complex(numbers.view(-1, 2)) if parameter.is_complex() else numbers
    laid_out = flatten_as(parameter, numbers)
    assert torch.equal(as_parameter(laid_out, parameter).flatten(), numbers)
    assert torch.equal(flatten_as(parameter, as_parameter(laid_out, parameter)), laid_out)
    if parameter.is_contiguous() or 0 in parameter.stride():
        assert torch.equal(laid_out, numbers)
    else:  # DDP views a bucket by the parameter's own strides
        bucket = torch.view_as_complex(laid_out.view(-1, 2)) if parameter.is_complex() else laid_out
        view = bucket.as_strided(parameter.shape, parameter.stride())
        assert torch.equal(view, wanted.view(parameter.shape))
