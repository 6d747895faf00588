"""Sparsifiers that mark their selection in a mask, as on a GPU, against their own selection."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.exchange.wire import Wire
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.sparsifiers.gaussian_k import GaussianK
from lightning_sparse.sparsifiers.protocol import LayerLayout
from lightning_sparse.sparsifiers.random_k import RandomK
from lightning_sparse.sparsifiers.rounding import ScaledIntegerRounding, StochasticRounding
from lightning_sparse.sparsifiers.top_k import TopK
from tests.unit.buckets import Transfer

NAN, INF = float("nan"), float("inf")


SPARSIFIERS = (
    TopK(0.3),
    TopK(0.3, granularity="model"),
    RandomK(0.3),
    GaussianK(0.3),
    ScaledIntegerRounding(0.5),
    StochasticRounding(0.5),
)
WIRES = (
    *map(Wire, (torch.float32, torch.bfloat16)),
    Wire(torch.int8, 0.5),
    Wire(torch.float8_e4m3fn, 2.0**-4),
)


def outcome(fill, values, layout, wire, capacity, unused, sparsifier=SPARSIFIERS[0]):
    """Return the sent values as a dense tensor, the residual and the header."""
    residual = torch.zeros(layout.num_elements)
    transfer = Transfer(wire, capacity, torch.full_like(residual, 7.0))
    extraction = Extraction(sparsifier, num_slices=3, per_layer=True)
    memory = Residual(torch.zeros_like(residual), residual)
    bucket = FlatBucket(0, layout, values.clone(), memory, is_last=True, left_out=unused)
    header = fill(extraction, bucket, transfer)
    return transfer.sent(int(header[0])), residual, header


@given(data=st.data())
def test_marking_equals_selecting(data):
    sparsifier = data.draw(st.sampled_from(SPARSIFIERS))
    special = st.sampled_from([NAN, INF, -INF, 0.0, 1e5, -7e4])
    values = torch.tensor(
        data.draw(st.lists(special | st.floats(-4, 4, width=16), min_size=1, max_size=60, unique=True))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    layout = LayerLayout(tuple(f"{place}" for place in range(len(sizes))), tuple(sizes))
    unused = [(start, end) for _, start, end in layout.spans() if start < end and data.draw(st.booleans())]
    wire = data.draw(st.sampled_from(WIRES))
    capacity = data.draw(st.sampled_from([None, 0, 4, 16, 64]))
    by_mask, asked = (
        outcome(fill, values, layout, wire, capacity, unused, sparsifier)
        for fill in (Extraction._fill_marked, Extraction._fill_selected)
    )
    for marked, selected in zip(by_mask, asked, strict=True):
        torch.testing.assert_close(marked, selected, rtol=1e-6, atol=0, equal_nan=True)


def test_an_empty_bucket_takes_the_dense_route():
    layout = LayerLayout(("nothing",), (0,))
    for tensor in outcome(Extraction._fill_marked, torch.zeros(0), layout, WIRES[0], None, []):
        assert not tensor.any()
