"""Compensated buckets with edge values, layouts that fit them, and their transfers."""

from math import inf, nan

import torch
from hypothesis import strategies as st

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection

DTYPES = (torch.float32, torch.float64)
MAGNITUDES = (
    *(0.0, 1e-45, 1e-40, 2.0**-7, 0.01),  # subnormal numbers, half a step of the coarsest wires
    *(0.49999997, 0.5, 0.50000006, 2.9999998, 3.0),  # around EDGE_THRESHOLDS
    *(0.501953125, 0.505859375, 1.0009765625, 1.5707964),  # halfway between bfloat16 numbers, and beside
    *(3584.0, 3585.0, 65_504.0, 65_520.0, 7e4, 3.3895314e38, 3.4e38),  # the ends of float8 and bfloat16
    *(nan, inf),
)
EDGE_THRESHOLDS = (0.0, -0.0, 0.5, 3.0)


def edge_values():
    """Return float32 values of p: more than a group of 64, and not a multiple of a vector."""
    values = torch.tensor(MAGNITUDES)
    return torch.cat([values, -values, values, -values, values])


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(0, 40), max_size=6))
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


def packed(payload_format, selection):
    """Return a payload just large enough, on the selection's device."""
    num_bytes = payload_format.payload_bytes(selection.indices.numel())
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=selection.indices.device)
    payload_format.fill(payload, selection)
    return payload


def selections(size, counts, dtype=torch.float32, wire=Wire(torch.float32), seed=0):  # noqa: B008  (immutable)
    """Return the selection of each worker: so many coordinates, many in common, with special values."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randperm(size, generator=generator)
    found = []
    for count in counts:
        own = torch.randperm(size, generator=generator)
        indices = torch.cat([common[: count // 2], own[~torch.isin(own, common[: count // 2])]])[:count].sort().values
        values = torch.randn(count, generator=generator, dtype=torch.float64).mul(2.0).to(dtype)
        special = torch.tensor([nan, inf, -inf, 1e-40, 3e38, -0.0], dtype=torch.float64).to(dtype)
        values[: min(count, 6)] = special[: min(count, 6)]
        found.append(Selection(indices, wire.rounded(values)))
    return found


def payloads_of(payload_format, chosen, capacity):
    rows = torch.full((len(chosen), payload_format.payload_bytes(capacity)), 77, dtype=torch.uint8)
    for row, selection in zip(rows, chosen, strict=True):
        payload_format.fill(row, selection)
    return rows


class Transfer:
    """A transfer of a route that gathers payloads, or of a masked route if there is no capacity."""

    divisor = 3

    def __init__(self, wire, capacity, out):
        self.format, self.out = PayloadFormat(out.numel(), wire), out
        self.payload = self.overflow = None
        self.buffers, self.is_cleared = Buffers(), False
        if capacity is not None:
            self.payload = torch.full((self.format.payload_bytes(capacity),), 77, dtype=torch.uint8)

    def sent(self, count):
        """Return the sent values, overflow included, with zeros between."""
        if self.payload is None:
            return self.out.clone()
        room = self.format.capacity(self.payload.numel())
        parts = [self.format.unpack(self.payload, torch.float32, min(count, room))]
        if count > room:
            parts.append(self.overflow())
            assert parts[1].indices.numel() == count - room
        sent = torch.zeros(self.out.numel())
        for indices, values in parts:
            sent[indices] = values.float()
        return sent
