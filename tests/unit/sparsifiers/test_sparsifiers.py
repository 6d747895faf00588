import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import (
    Accordion,
    Dense,
    GaussianK,
    HardThreshold,
    RandomK,
    ScaledIntegerRounding,
    StochasticRounding,
    TopK,
)
from lightning_sparse.sparsifiers.protocol import LayerLayout
from tests.unit.buckets import buckets, thresholds

NAN, INF = float("nan"), float("inf")
SPARSIFIERS = (
    HardThreshold(threshold=1e300),
    *(TopK(0.001), TopK(0.001, granularity="model"), RandomK(0.001), GaussianK(0.001), Dense()),
)
LAYOUT = LayerLayout(("a.weight", "a.bias", "b.weight"), (3, 1, 2))


def reaches(value, threshold):
    return not (abs(value) < threshold)


def assert_is_selection_of(selection, compensated):
    indices, selected = selection
    assert indices.dtype == torch.int64
    assert bool((indices.diff() > 0).all())  # unique and ascending
    assert selected.dtype == compensated.dtype
    torch.testing.assert_close(selected, compensated[indices], rtol=0, atol=0, equal_nan=True)


@given(buckets(), thresholds)
def test_hard_threshold_selects_exactly_the_values_at_or_above_it(bucket, threshold):
    layout, compensated = bucket
    before = compensated.clone()
    selection = HardThreshold(threshold=threshold).select(compensated, layout)
    assert_is_selection_of(selection, before)
    # Python floats represent float32 values exactly.
    expected = [i for i, value in enumerate(before.tolist()) if reaches(value, threshold)]
    assert selection.indices.tolist() == expected
    assert torch.equal(compensated.nan_to_num(), before.nan_to_num())


@given(buckets(), thresholds, thresholds)
def test_the_first_matching_pattern_sets_the_threshold_of_a_layer(bucket, first, second):
    layout, compensated = bucket
    sparsifier = HardThreshold(threshold=1.0, layer_thresholds={"layer1*": first, "layer[12]*": second})
    of_layer = {"layer1.weight": first, "layer2.weight": second}
    expected = [
        i
        for name, start, end in layout.spans()
        for i in range(start, end)
        if reaches(compensated[i].item(), of_layer.get(name, 1.0))
    ]
    assert sparsifier.select(compensated, layout).indices.tolist() == expected


DENSITIES = st.fractions(Fraction(1, 1000), 1, max_denominator=1000)


def expected_k(density, size):
    return max(1, math.floor(density * size))


@given(buckets(), DENSITIES)
def test_top_k_selects_the_largest_of_every_layer_and_all_non_finite_values(bucket, density):
    layout, compensated = bucket
    selection = TopK(float(density)).select(compensated, layout)
    assert_is_selection_of(selection, compensated)
    selected = set(selection.indices.tolist())
    for _, start, end in layout.spans():
        layer = compensated[start:end].abs().tolist()
        not_finite = {i for i, value in enumerate(layer) if value != value or value == INF}
        inside = {i - start for i in selected if start <= i < end}
        k = expected_k(density, len(layer)) if layer else 0
        assert not_finite <= inside
        assert len(inside) == max(k, len(not_finite))
        left_out = [value for i, value in enumerate(layer) if i not in inside]
        if left_out and inside - not_finite:
            assert min(layer[i] for i in inside - not_finite) >= max(left_out)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("sparsifier", SPARSIFIERS)
def test_sparsifiers_select_non_finite_values_at_any_setting(sparsifier, value):
    compensated = torch.tensor([value, value, 0.0, 1.0, value, 0.0])
    assert {0, 1, 4} <= set(sparsifier.select(compensated, LAYOUT).indices.tolist())


@pytest.mark.parametrize("sparsifier", SPARSIFIERS)
@pytest.mark.parametrize("layout", [LayerLayout((), ()), LayerLayout(("empty",), (0,))])
def test_an_empty_bucket_selects_nothing(sparsifier, layout):
    sparsifier.begin_step(0, 0)
    sparsifier.survey([lambda: torch.zeros(0)])
    indices, values = sparsifier.select(torch.zeros(0), layout)
    assert indices.shape == values.shape == (0,)
    assert indices.dtype == torch.int64


def test_different_sparsifiers_have_different_settings():
    alike = [HardThreshold(threshold=0.1), HardThreshold(threshold=0.1)]
    alike[0].select(torch.zeros(6), LAYOUT)  # a cache is not a setting
    assert alike[0].settings() == alike[1].settings()
    different = [
        *(alike[0], HardThreshold(threshold=0.2), HardThreshold(threshold=0.1, layer_thresholds={"*": 0.0})),
        *(HardThreshold(density=0.1), HardThreshold(density=0.1, granularity="layer"), Dense()),
        *(TopK(np.float32(0.1)), TopK(np.float32(0.2)), TopK(granularity="model"), RandomK(same_on_all=False)),
        *(TopK(), RandomK(), RandomK(seed=1)),
    ]
    assert len({repr(sparsifier.settings()) for sparsifier in different}) == len(different)
    surveyed, begun = TopK(granularity="model"), RandomK()  # the state of a step is not a setting
    surveyed.survey([lambda: torch.ones(3)])
    begun.begin_step(7, 1)
    assert surveyed.settings() == TopK(granularity="model").settings()
    assert begun.settings() == RandomK().settings()
    assert Dense().settings()["sparsifier"] == "Dense"


def test_layers_keep_their_thresholds_until_all_get_a_common_threshold():
    sparsifier = HardThreshold(density=0.5, granularity="layer", layer_thresholds={"given": 7.0})
    assert sparsifier.threshold_of("weight") == 0.0
    sparsifier.fix_threshold(3.0, {"weight": 3.0, "bias": 1.0})
    names = ("weight", "bias", "given", "later")
    assert [sparsifier.threshold_of(name) for name in names] == [3.0, 1.0, 7.0, 3.0]
    layout = LayerLayout(names, (2, 2, 2, 2))
    chosen = sparsifier.select(torch.tensor([2.9, 3.0, 0.9, 1.0, 6.9, 7.0, 2.9, 3.0]), layout).indices.tolist()
    assert chosen == [1, 3, 5, 7]
    assert sparsifier.current_threshold == 3.0
    assert sparsifier.grid_step(2**15) == 0.125  # an eighth of the smallest
    sparsifier.fix_threshold(2.0)
    assert [sparsifier.threshold_of(name) for name in names] == [2.0, 2.0, 7.0, 2.0]
    sparsifier.fix_threshold(None)
    assert [sparsifier.threshold_of(name) for name in names] == [0.0, 0.0, 7.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (HardThreshold, {"threshold": -1.0}, "Invalid threshold=-1.0. Must be a finite number of at least 0"),
        (HardThreshold, {"threshold": NAN}, "Invalid threshold=nan. Must be a finite number of at least 0"),
        (HardThreshold, {"threshold": 10**400}, "Invalid threshold=1000.* Must be a finite number of at least 0"),
        (HardThreshold, {"density": 0.0}, r"Invalid density=0.0. Must be within \(0, 1\]"),
        (HardThreshold, {"density": 1.5}, r"Invalid density=1.5. Must be within \(0, 1\]"),
        (HardThreshold, {"density": "0.01"}, r"Invalid density='0.01'. Must be within \(0, 1\]"),
        (HardThreshold, {"threshold": True}, "Invalid threshold=True"),
        (HardThreshold, {"granularity": "bucket"}, "Invalid granularity='bucket'. Must be one of 'layer', 'model'"),
        (HardThreshold, {"granularity": "layer", "threshold": 1.0}, "A λ per layer needs a density. Give dens"),
        (HardThreshold, {"threshold": 1.0, "density": 0.1}, "Got both threshold=1.0 and densi"),
        (HardThreshold, {"layer_thresholds": {"*": 0.0, "a*": -0.5}}, r"layer_thresholds\['a\*'\]=-0.5. Must be a"),
        (HardThreshold, {"layer_thresholds": {1: 0.1}}, "Must be λ by pattern of names, not by 1"),
        (TopK, {"granularity": "bucket"}, "Invalid granularity='bucket'. Must be one of 'layer', 'model'."),
        (TopK, {"density": "0.1"}, r"Invalid density='0.1'. Must be within \(0, 1\]"),
        (RandomK, {"density": 0.0}, r"Invalid density=0.0. Must be within \(0, 1\]"),
        (RandomK, {"seed": -1}, "Invalid seed=-1. Must be a whole number of at least 0"),
        (RandomK, {"same_on_all": "no"}, "Invalid same_on_all='no'. Must be True or False."),
        (GaussianK, {"density": 1.1}, "Invalid density=1.1"),
        (Accordion, {"low_density": 0.0}, r"Invalid low_density=0.0. Must be within \(0, 1\]"),
        (Accordion, {"high_density": "1"}, r"Invalid high_density='1'. Must be within"),
        (Accordion, {"low_density": 0.02}, "Invalid low_density=0.02. Must be at most high_density=0.01"),
        (Accordion, {"interval": 0}, "Invalid interval=0. Must be a whole number of at least 1"),
        (Accordion, {"interval": True}, "Invalid interval=True"),
        (Accordion, {"relative_change": 0.0}, "Invalid relative_change=0.0. Must be above 0"),
        (Accordion, {"relative_change": True}, "Invalid relative_change=True"),
        *(
            (HardThreshold, {"threshold": 1.0, "overshoot": overshoot}, r"Invalid overshoot=.* Must be within \[0, 1\)")
            for overshoot in (-0.1, 1.0, 2, NAN, "half", True, None)
        ),
        (LayerLayout, {"names": ("a", "b"), "sizes": (1,)}, "Got 2 names for 1 sizes"),
        *(
            (rounding, {"step": step}, "Invalid step=")
            for rounding in (ScaledIntegerRounding, StochasticRounding)
            for step in (0, -1, INF, NAN, True, "0.1", 1e-60, 10**400)
        ),
    ],
)
def test_invalid_settings_raise_with_value_and_allowed_range(kind, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**arguments)
