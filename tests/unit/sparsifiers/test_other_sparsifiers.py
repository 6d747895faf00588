"""Top-k of the model, Random-k, GaussianK and Dense, each as a function of what it is shown."""

from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import (
    GaussianK,
    HardThreshold,
    LayerLayout,
    RandomK,
    ScaledIntegerRounding,
    StochasticRounding,
    TopK,
)
from lightning_sparse.sparsifiers.protocol import in_order, require_marks
from lightning_sparse.sparsifiers.top_k import kth_largest_magnitude
from tests.unit.buckets import DTYPES, buckets, values
from tests.unit.sparsifiers.test_sparsifiers import DENSITIES, expected_k

NAN, INF = float("nan"), float("inf")


def whole(parts):
    return [lambda part=part: part for part in parts]


def layout_of(size, name="weight"):
    return LayerLayout((name,), (size,))


@st.composite
def steps(draw):
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
    return [draw(values(size, dtype)) for size in sizes]


@given(steps(), st.data())
def test_the_kth_largest_magnitude_equals_that_of_a_sort(parts, data):
    together = torch.cat(parts).abs().nan_to_num(INF, INF).sort(descending=True).values
    k = data.draw(st.integers(1, len(together)))
    found = kth_largest_magnitude(whole(parts), min(1.0, (k + 0.5) / len(together)))
    torch.testing.assert_close(found, together[k - 1], rtol=0, atol=0, equal_nan=True)


@given(steps(), DENSITIES)
def test_top_k_of_the_model_selects_the_largest_of_all_buckets_together(parts, density):
    """And all values that equal the last of them, but no zeros."""
    before = torch.cat(parts)
    magnitudes = before.abs().nan_to_num(INF, INF)
    last = magnitudes.sort(descending=True).values[expected_k(density, len(magnitudes)) - 1]
    sparsifier = TopK(float(density), granularity="model")
    assert sparsifier.needs_survey
    sparsifier.begin_step(0, 0)
    sparsifier.survey(whole(parts))
    selected = torch.zeros(len(before), dtype=torch.bool)
    for part, of_part in zip(parts, selected.split([len(part) for part in parts]), strict=True):
        of_part[sparsifier.select(part, layout_of(len(part))).indices] = True
    assert torch.equal(selected, (magnitudes >= last) & (magnitudes > 0))
    torch.testing.assert_close(torch.cat(parts), before, rtol=0, atol=0, equal_nan=True)


def test_a_new_step_forgets_the_magnitude_of_the_last():
    sparsifier = TopK(0.5, granularity="model")
    sparsifier.survey(whole([torch.tensor([1.0, 2.0, 3.0, 4.0])]))
    bucket = torch.tensor([0.5, 3.0])
    assert sparsifier.select(bucket, layout_of(2)).indices.tolist() == [1]
    assert sparsifier.select(bucket / 2, layout_of(2)).indices.tolist() == []
    sparsifier.begin_step(1, 0)
    assert sparsifier.select(bucket / 2, layout_of(2)).indices.tolist() == [1]


@given(buckets(), DENSITIES, st.booleans())
def test_random_k_selects_k_of_each_layer_and_all_non_finite_values(bucket, density, same_on_all):
    layout, compensated = bucket
    indices, selected = RandomK(float(density), same_on_all=same_on_all).select(compensated, layout)
    torch.testing.assert_close(selected, compensated[indices], rtol=0, atol=0, equal_nan=True)
    assert bool((indices.diff() > 0).all())
    not_finite = set(compensated.isfinite().logical_not().nonzero().flatten().tolist())
    assert not_finite <= set(indices.tolist())
    for _, start, end in layout.spans():
        k = expected_k(density, end - start) if end > start else 0
        assert k <= sum(start <= index < end for index in indices.tolist())
    assert len(indices) <= sum(expected_k(density, size) for size in layout.sizes if size) + len(not_finite)


def chosen(sparsifier, step, rank, layout):
    sparsifier.begin_step(step, rank)
    return tuple(sparsifier.select(torch.zeros(layout.num_elements), layout).indices.tolist())


def test_random_k_depends_on_seed_step_layer_and_optionally_rank():
    layout = layout_of(1000)
    base = chosen(RandomK(0.01), 3, 0, layout)
    assert chosen(RandomK(0.01), 3, 1, layout) == base
    assert chosen(RandomK(0.01, same_on_all=False), 3, 0, layout) == base
    others = [
        chosen(RandomK(0.01), 4, 0, layout),
        chosen(RandomK(0.01, seed=1), 3, 0, layout),
        chosen(RandomK(0.01, same_on_all=False), 3, 1, layout),
        chosen(RandomK(0.01), 3, 0, layout_of(1000, "bias")),
    ]
    assert len({base, *others}) == 5
    both = chosen(RandomK(0.01), 3, 0, LayerLayout(("bias", "weight"), (50, 1000)))
    assert tuple(index - 50 for index in both if index >= 50) == base  # in whatever bucket
    before = torch.random.get_rng_state()
    chosen(RandomK(0.01), 3, 0, layout)
    assert torch.equal(torch.random.get_rng_state(), before)  # the global generator is untouched


def test_random_k_selects_all_coordinates_equally_often():
    size, k, steps = 40, 4, 2000
    sparsifier = RandomK(k / size)
    counts = Counter(index for step in range(steps) for index in chosen(sparsifier, step, 0, layout_of(size)))
    expected = steps * k / size
    # Each count is binomial: 13.4 is one standard deviation. Their squares together are chi-squared of 39 degrees.
    deviation = sum((counts[index] - expected) ** 2 for index in range(size)) / (expected * (1 - k / size))
    assert deviation < 80  # 1 in 8,000 by chance, and the same in every run


def test_gaussian_k_selects_about_k_of_a_gaussian_layer():
    generator = torch.Generator().manual_seed(5)
    layout = LayerLayout(("first", "second"), (40_000, 10_000))
    compensated = torch.randn(50_000, generator=generator) * torch.cat([torch.ones(40_000), torch.full((10_000,), 9.0)])
    selected = GaussianK(0.01).mark(compensated, layout)
    assert 2 / 3 * 400 < int(selected[:40_000].sum()) < 4 / 3 * 400
    assert 2 / 3 * 100 < int(selected[40_000:].sum()) < 4 / 3 * 100


def test_gaussian_k_corrects_a_threshold_far_too_high_or_low():
    layer = torch.full((1000,), 1.0)
    layer[:10] = 100.0  # σ is 9.9, t first 30
    heavy = GaussianK(0.01).mark(layer, layout_of(1000))
    assert heavy.nonzero().flatten().tolist() == list(range(10))
    layer = torch.linspace(0.5, 1.0, 1000)  # t is 1.12, which nothing reaches, then 0.56, 0.84 and 1.26
    assert GaussianK(0.01).mark(layer, layout_of(1000)).nonzero().tolist() == [[999]]  # the largest always goes
    assert int(GaussianK(0.5).mark(layer, layout_of(1000)).sum()) == 94  # t is 0.85, 0.42, 0.64 and 0.95


@pytest.mark.parametrize("density", [1e-17, 5e-324, 0.001, 1.0])
def test_gaussian_k_sends_something_of_every_layer(density):
    layout = LayerLayout(("two classes", "alike", "one"), (2, 100, 1))
    compensated = torch.tensor([0.1, -0.1, *[0.3] * 100, 1e-45])
    assert GaussianK(density).mark(compensated, layout).all()


def test_gaussian_k_sends_no_zeros_and_ignores_non_finite_values_in_its_statistics():
    layout = LayerLayout(("zeros", "broken"), (5, 6))
    compensated = torch.tensor([0.0] * 5 + [NAN, 0.1, -0.1, INF, 5.0, 0.1])
    assert GaussianK(0.2).select(compensated, layout).indices.tolist() == [5, 8, 9]


DOUBLES = torch.arange(2), torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize("selection", [None, torch.ones(2), (torch.ones(2),), ([], []), DOUBLES])
def test_in_order_rejects_other_types_than_selections(selection):
    with pytest.raises(TypeError, match="Return a Selection of indices and values"):
        in_order(selection, 4, torch.float32)
    assert in_order((torch.arange(0), torch.ones(0)), 4, torch.float32).indices.tolist() == []


@pytest.mark.parametrize(
    ("indices", "message"),
    [([2, 0, 2], "index 2 twice"), ([-1], "index -1 of a bucket"), ([4], "index 4 of a bucket")],
)
def test_in_order_rejects_repeated_and_outer_indices(indices, message):
    with pytest.raises(ValueError, match=message):
        in_order((torch.tensor(indices), torch.ones(len(indices))), 4, torch.float32)


@pytest.mark.parametrize("marks", [None, torch.ones(4), torch.ones(3, dtype=torch.bool)])
def test_marks_must_be_a_mask_of_the_bucket(marks):
    with pytest.raises(TypeError, match=r"A sparsifier marked .*\. Return a mask of torch.bool of shape \(4,\)"):
        require_marks(marks, torch.zeros(4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_is_unbiased_and_repeatable(dtype):
    values = torch.tensor([0.1, 0.25, -0.4, 0.5, 1.3, -2.05], dtype=dtype).repeat_interleave(20_000)
    layout, rounding = layout_of(values.numel()), StochasticRounding(0.5, seed=3)

    def rounded(step, rank, like=rounding, layout=layout):
        like.begin_step(step, rank)
        return like.values(values, layout)

    first = rounded(4, 1)
    for value, mean in zip(values[::20_000].tolist(), first.view(-1, 20_000).mean(1).tolist(), strict=True):
        assert mean == pytest.approx(value, abs=5 * 0.25 / 20_000**0.5)  # five standard errors at most
    assert set((first * 2).tolist()) <= {float(whole) for whole in range(-5, 4)}
    assert torch.equal(first.view(-1, 20_000)[3], values.view(-1, 20_000)[3])  # a multiple stays unchanged
    assert torch.equal(first, rounded(4, 1, StochasticRounding(0.5, seed=3)))
    others = [
        rounded(5, 1),
        rounded(4, 0),
        rounded(4, 1, StochasticRounding(0.5)),
        rounded(4, 1, layout=layout_of(values.numel(), "bias")),
    ]
    for sent, also_sent in combinations([first, *others], 2):
        is_between = (values * 2).frac() != 0
        share = (sent == also_sent)[is_between].double().mean().item()
        assert 0.5 < share < 0.9  # independent draws agree with probability x² + (1 − x)² on average


def test_rounding_keeps_a_number_too_large_for_its_grid():
    values = torch.tensor([3e38, -1e33, 0.3])
    for rounding in (ScaledIntegerRounding(1e-3), StochasticRounding(1e-3)):
        sent = rounding.values(values, layout_of(3))
        assert sent[:2].tolist() == values[:2].tolist()
        assert sent[2] == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize(
    ("sparsifier", "density"),
    [(HardThreshold(threshold=16.0), 0.006), (ScaledIntegerRounding(32.0), 0.032), (StochasticRounding(32.0), 0.33)],
)
def test_noise_has_the_documented_density_in_the_long_run(sparsifier, density):
    # Multiples overshoot, and the overshoot is sent back (docs/evidence/results.md, "Rounding to a grid").
    size, start, end = 1000, 200, 500
    generator, residual, selected = torch.Generator().manual_seed(0), torch.zeros(size), 0
    layout = LayerLayout(("noise",), (size,))
    for step in range(end):
        sparsifier.begin_step(step, 0)
        compensated = residual + 1.28 * torch.randn(size, generator=generator)
        selection = sparsifier.select(compensated, layout)
        residual = compensated.index_add(0, selection.indices, selection.values, alpha=-1.0)
        selected += selection.indices.numel() if step >= start else 0
    assert selected / (size * (end - start)) == pytest.approx(density, rel=0.1)
