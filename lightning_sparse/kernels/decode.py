"""The kernel that adds payloads up; ``exchange/routes/adding.py`` describes its use."""

# The annotations of the kernels stay strings, so that the module can be imported without triton.
from __future__ import annotations

from lightning_sparse.kernels.launching import jit, tl
from lightning_sparse.kernels.values import divide, of_wire

__all__ = ["add_payloads"]


@jit
def add_payloads(
    out: tl.tensor, quotients: tl.tensor, ends: tl.tensor, values: tl.tensor, offsets: tl.tensor,
    num_workers: tl.tensor, capacity: tl.tensor, ends_row: tl.tensor, values_row: tl.tensor, offsets_row: tl.tensor,
    num_elements: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Adds all workers' coordinates of one block to zeros, in rank order, and divides the sums by their number.

    The indices of one payload are unique, and no other program has this block: no two additions meet in one place.
    Programs of the second dimension have ``num_workers`` payloads each, and ``num_elements`` of ``out``.
    """
    block = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    out += group * num_elements + block.to(tl.int64) * BLOCK
    ends += group * num_workers * ends_row
    values += group * num_workers * values_row
    offsets += group * num_workers * offsets_row
    row_ends, row_offsets = ends, offsets
    for _ in range(num_workers):
        begin, end = _span(row_ends, block, capacity)
        for first in range(begin, end, TILE):
            place = first + tl.arange(0, TILE)
            at = _offsets(row_offsets, place, end)
            held = tl.load(out + at, mask=place < end, other=0.0)
            value = of_wire(tl.load(values + place, mask=place < end, other=0), scale, held.dtype)
            tl.store(out + at, held + value, mask=place < end)
        tl.debug_barrier()  # this worker's sums are in memory before the next worker's are added
        row_ends += ends_row
        row_offsets += offsets_row
        values += values_row
    if quotients is not None:
        # A coordinate that several workers sent is divided once: all quotients are there before one is written.
        row_ends, row_offsets, row_quotients = ends, offsets, quotients
        for _ in range(num_workers):
            begin, end = _span(row_ends, block, capacity)
            for first in range(begin, end, TILE):
                place = first + tl.arange(0, TILE)
                total = tl.load(out + _offsets(row_offsets, place, end), mask=place < end, other=0.0)
                tl.store(row_quotients + place, divide(total, num_workers.to(total.dtype)), mask=place < end)
            row_ends += ends_row
            row_offsets += offsets_row
            row_quotients += capacity
        tl.debug_barrier()
        row_ends, row_offsets, row_quotients = ends, offsets, quotients
        for _ in range(num_workers):
            begin, end = _span(row_ends, block, capacity)
            for first in range(begin, end, TILE):
                place = first + tl.arange(0, TILE)
                quotient = tl.load(row_quotients + place, mask=place < end, other=0.0)
                tl.store(out + _offsets(row_offsets, place, end), quotient, mask=place < end)
            row_ends += ends_row
            row_offsets += offsets_row
            row_quotients += capacity


@jit
def _span(ends: tl.tensor, block: tl.tensor, capacity: tl.tensor) -> tl.tensor:
    """Returns where a block's coordinates begin and end in a payload, up to its capacity."""
    begin = tl.load(ends + block - 1, mask=block > 0, other=0)
    end = tl.load(ends + block)
    return begin, tl.minimum(end, capacity.to(tl.int32))


@jit
def _offsets(offsets: tl.tensor, place: tl.tensor, end: tl.tensor) -> tl.tensor:
    return tl.load(offsets + place, mask=place < end, other=0).to(tl.int32) & 0xFFFF
