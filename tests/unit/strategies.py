"""Hypothesis strategies: compensated buckets with the values that break things, and layouts that fit them."""

import torch
from hypothesis import strategies as st

from lightning_sparse.sparsifiers import LayerLayout

DTYPES = (torch.float32, torch.float64)


@st.composite
def layouts(draw, max_layers=6, max_size=40):
    sizes = draw(st.lists(st.integers(0, max_size), max_size=max_layers))
    return LayerLayout(tuple(f"layer{i}.weight" for i in range(len(sizes))), tuple(sizes))


@st.composite
def values(draw, size, dtype, *, finite=False, low=-10.0, high=10.0):
    ordinary = st.floats(low, high, width=32)
    special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40])
    if not finite:
        special = st.one_of(special, st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    kind = draw(st.sampled_from(["mixed", "zero", "negative", "large"]))
    if kind == "zero":
        return torch.zeros(size, dtype=dtype)
    if kind == "negative":
        ordinary = special = st.floats(low, -(2.0**-10), width=32)
    if kind == "large":
        ordinary = special = st.floats(2.0**10, 2.0**100, width=32)
    numbers = draw(st.lists(st.one_of(ordinary, special), min_size=size, max_size=size))
    return torch.tensor(numbers, dtype=dtype)


@st.composite
def buckets(draw, **kwargs):
    layout = draw(layouts())
    dtype = draw(st.sampled_from(DTYPES))
    return layout, draw(values(layout.num_elements, dtype, **kwargs))


thresholds = st.one_of(st.sampled_from([0.0, 0.1, 1.0, 1e300]), st.floats(0, 20))
