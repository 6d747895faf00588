"""The kernel that adds payloads; ``exchange/routes/adding.py`` describes its use."""

# Annotations of the kernels stay strings, so that the module imports without triton.
from __future__ import annotations

from lightning_sparse.kernels.launching import jit, tl
from lightning_sparse.kernels.values import divide, from_wire


@jit
def add_payloads(
    out: tl.tensor, senders: tl.tensor, ends: tl.tensor, values: tl.tensor, offsets: tl.tensor,
    num_workers: tl.tensor, capacity: tl.tensor, ends_row: tl.tensor, values_row: tl.tensor, offsets_row: tl.tensor,
    num_elements: tl.tensor, scale: tl.tensor, DIVIDES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Add all workers' coordinates of a block to zeros, in rank order.

    With ``DIVIDES``, divides the sums by the number of workers. ``senders`` counts nonzero values and is then the
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
    for _ in range(num_workers):
        begin = tl.load(ends + block - 1, mask=block > 0, other=0)
        end = tl.minimum(tl.load(ends + block), capacity.to(tl.int32))
        for first in range(begin, end, TILE):
            position = first + tl.arange(0, TILE)
            at = tl.load(offsets + position, mask=position < end, other=0).to(tl.int32) & 0xFFFF
            held = tl.load(out + at, mask=position < end, other=0.0)
            value = from_wire(tl.load(values + position, mask=position < end, other=0), scale, held.dtype)
            tl.store(out + at, held + value, mask=position < end)
            if senders is not None:
                count = tl.load(senders + at, mask=position < end, other=0)
                tl.store(senders + at, count + (value != 0).to(tl.int32), mask=position < end)
        tl.debug_barrier()  # this worker's sums must be in memory before the next worker's
        ends += ends_row
        values += values_row
        offsets += offsets_row
    if DIVIDES:
        for first in range(0, BLOCK, 8 * TILE):  # long rows, because each waits for the L2 cache
            position = first + tl.arange(0, 8 * TILE)
            is_inside = block.to(tl.int64) * BLOCK + position < num_elements
            total = tl.load(out + position, mask=is_inside, other=0.0)
            divisor = num_workers.to(total.dtype)
            if senders is not None:
                divisor = tl.maximum(tl.load(senders + position, mask=is_inside, other=1), 1).to(total.dtype)
            tl.store(out + position, divide(total, divisor), mask=is_inside)
