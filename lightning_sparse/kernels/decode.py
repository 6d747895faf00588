"""The kernel that adds payloads; ``exchange/routes/adding.py`` describes its use."""

# Annotations of the kernels stay strings, so that the module imports without triton.
from __future__ import annotations

from lightning_sparse.kernels.launching import jit, tl
from lightning_sparse.kernels.values import divide, from_wire


@jit
def add_payloads(
    out: tl.tensor, senders: tl.tensor, quotients: tl.tensor, ends: tl.tensor, values: tl.tensor, offsets: tl.tensor,
    num_workers: tl.tensor, capacity: tl.tensor, ends_row: tl.tensor, values_row: tl.tensor, offsets_row: tl.tensor,
    num_elements: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Add all workers' coordinates of a block to zeros, in rank order.

    With ``quotients``, divides the sums by the number of workers. ``senders`` counts nonzero values and is then the
    divisor.

    The indices of a payload are unique, and no other program has this block, so additions do not collide.
    The grid's second dimension is the slice: each has ``num_workers`` payloads and ``num_elements`` of ``out``.
    """
    block = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    out += group * num_elements + block.to(tl.int64) * BLOCK
    if senders is not None:
        senders += group * num_elements + block.to(tl.int64) * BLOCK
    ends += group * num_workers * ends_row
    values += group * num_workers * values_row
    offsets += group * num_workers * offsets_row
    row_ends, row_offsets = ends, offsets
    for _ in range(num_workers):
        begin, end = _span(row_ends, block, capacity)
        for first in range(begin, end, TILE):
            position = first + tl.arange(0, TILE)
            at = _offsets(row_offsets, position, end)
            held = tl.load(out + at, mask=position < end, other=0.0)
            value = from_wire(tl.load(values + position, mask=position < end, other=0), scale, held.dtype)
            tl.store(out + at, held + value, mask=position < end)
            if senders is not None:
                count = tl.load(senders + at, mask=position < end, other=0)
                tl.store(senders + at, count + (value != 0).to(tl.int32), mask=position < end)
        tl.debug_barrier()  # this worker's sums must be in memory before the next worker's
        row_ends += ends_row
        row_offsets += offsets_row
        values += values_row
    if quotients is not None:
        # All quotients exist before the first write, so a coordinate of several workers is divided once.
        row_ends, row_offsets, row_quotients = ends, offsets, quotients
        for _ in range(num_workers):
            begin, end = _span(row_ends, block, capacity)
            for first in range(begin, end, TILE):
                position = first + tl.arange(0, TILE)
                at = _offsets(row_offsets, position, end)
                total = tl.load(out + at, mask=position < end, other=0.0)
                divisor = num_workers.to(total.dtype)
                if senders is not None:
                    count = tl.load(senders + at, mask=position < end, other=1)
                    divisor = tl.maximum(count, 1).to(total.dtype)
                tl.store(row_quotients + position, divide(total, divisor), mask=position < end)
            row_ends += ends_row
            row_offsets += offsets_row
            row_quotients += capacity
        tl.debug_barrier()
        row_ends, row_offsets, row_quotients = ends, offsets, quotients
        for _ in range(num_workers):
            begin, end = _span(row_ends, block, capacity)
            for first in range(begin, end, TILE):
                position = first + tl.arange(0, TILE)
                quotient = tl.load(row_quotients + position, mask=position < end, other=0.0)
                tl.store(out + _offsets(row_offsets, position, end), quotient, mask=position < end)
            row_ends += ends_row
            row_offsets += offsets_row
            row_quotients += capacity


@jit
def _span(ends: tl.tensor, block: tl.tensor, capacity: tl.tensor) -> tl.tensor:
    """Return start and end of a block's coordinates in a payload, limited by its capacity."""
    begin = tl.load(ends + block - 1, mask=block > 0, other=0)
    end = tl.load(ends + block)
    return begin, tl.minimum(end, capacity.to(tl.int32))


@jit
def _offsets(offsets: tl.tensor, position: tl.tensor, end: tl.tensor) -> tl.tensor:
    return tl.load(offsets + position, mask=position < end, other=0).to(tl.int32) & 0xFFFF
