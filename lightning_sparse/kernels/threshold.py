"""The hard threshold's kernels; ``selection/fused_threshold`` explains and launches them."""

# Annotations of the kernels stay strings, so that the module imports without triton.
from __future__ import annotations

from lightning_sparse.kernels.launching import jit, tl
from lightning_sparse.kernels.values import _is_finite, divide, sent_and_kept


@jit
def walk_block(
    residual_before: tl.tensor, residual: tl.tensor, gradient: tl.tensor, loss_scale: tl.tensor, thresholds: tl.tensor,
    excesses: tl.tensor, run_starts: tl.tensor, first_run: tl.tensor, bits: tl.tensor, counts: tl.tensor,
    out: tl.tensor, numbers: tl.tensor,
    num_elements: tl.tensor, divisor: tl.tensor, scale: tl.tensor, WIRE: tl.constexpr, LIMIT: tl.constexpr,
    CLEARS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    NON_FINITE: tl.constexpr, SQUARED_ERROR: tl.constexpr,
) -> None:  # fmt: skip
    """Compute p of a block and mark selected coordinates, or write them to ``out`` and keep the rest.

    ``numbers`` has a row per number of a header, in the header's order, and a column per block.
    """
    block = tl.program_id(0)
    begin = block.to(tl.int64) * BLOCK
    length = tl.minimum(num_elements - begin, BLOCK).to(tl.int32)
    selected_of_word = tl.zeros([WORDS], tl.int32)
    non_finite_of_word = tl.zeros([WORDS], tl.int32)
    squares_of_place = tl.zeros([WORDS, 32], residual.dtype.element_ty)  # sums of few values, added in float64 later
    # Complete words of 32 elements come first, because their uniform mask lets threads load four elements at a time.
    whole = length // 32 * 32
    for tile in range(0, whole, WORDS * 32):
        ones, non_finite_bits, kept = _walk_words(
            residual_before, residual, gradient, loss_scale, thresholds, excesses, run_starts, first_run, bits, out,
            begin, tile // 32 + tl.arange(0, WORDS), whole, divisor, scale, WIRE, LIMIT, CLEARS,
        )  # fmt: skip
        selected_of_word += ones
        non_finite_of_word += non_finite_bits
        squares_of_place += kept * kept
    selected = tl.sum(selected_of_word, 0)
    non_finite = tl.sum(non_finite_of_word, 0)
    squares = tl.sum(tl.sum(squares_of_place.to(tl.float64), 1), 0)
    if whole < length:
        ones, non_finite_bits, kept = _walk_words(
            residual_before, residual, gradient, loss_scale, thresholds, excesses, run_starts, first_run, bits, out,
            begin, whole // 32 + tl.arange(0, 1), length, divisor, scale, WIRE, LIMIT, CLEARS,
        )  # fmt: skip
        selected += tl.sum(ones, 0)
        non_finite += tl.sum(non_finite_bits, 0)
        squares += tl.sum(tl.sum((kept * kept).to(tl.float64), 1), 0)
    blocks = tl.num_programs(0)
    tl.store(counts + block, selected)
    tl.store(numbers + NON_FINITE * blocks + block, non_finite.to(tl.float64))
    tl.store(numbers + SQUARED_ERROR * blocks + block, squares)


@jit
def _walk_words(
    residual_before: tl.tensor, residual: tl.tensor, gradient: tl.tensor, loss_scale: tl.tensor, thresholds: tl.tensor,
    excesses: tl.tensor, run_starts: tl.tensor, first_run: tl.tensor, bits: tl.tensor, out: tl.tensor,
    begin: tl.tensor, word: tl.tensor, length: tl.tensor, divisor: tl.tensor, scale: tl.tensor,
    WIRE: tl.constexpr, LIMIT: tl.constexpr, CLEARS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Walk words of 32 elements; return counts of selected and non-finite elements, and e'."""
    column = tl.arange(0, 32)[None, :]
    at = word[:, None] * 32 + column
    inside = at < length
    p = tl.load(residual_before + begin + at, mask=inside, other=0.0)
    g = tl.load(gradient + begin + at, mask=inside, other=0.0).to(p.dtype)
    if loss_scale is not None:
        g = divide(g, tl.load(loss_scale).to(p.dtype))
    p += g
    threshold = _of_run(thresholds, run_starts, first_run, begin, at, p)
    excess = _of_run(excesses, run_starts, first_run, begin, at, p)
    # A comparison with NaN is false, so "not below" also selects NaN.
    selected = ~(tl.abs(p) < threshold) & inside
    ones = selected.to(tl.int32)
    _, sent, kept = sent_and_kept(p, excess, scale, WIRE, LIMIT)
    kept = tl.where(selected, kept, p)
    if out is None:
        tl.store(residual + begin + at, p, mask=inside)  # values beyond the payload's capacity stay as p
    else:
        tl.store(residual + begin + at, kept, mask=inside)
        part = divide(tl.where(selected, sent, 0.0), divisor.to(p.dtype))
        tl.store(out + begin + at, part.to(out.dtype.element_ty), mask=inside)
    if CLEARS:
        tl.store(gradient + begin + at, tl.zeros_like(p).to(gradient.dtype.element_ty), mask=inside)
    if bits is not None:
        tl.store(bits + begin // 32 + word, tl.sum(ones << column, 1), mask=word * 32 < length)
    return tl.sum(ones, 1), tl.sum((~_is_finite(p)).to(tl.int32), 1), kept


@jit
def _of_run(
    numbers: tl.tensor, run_starts: tl.tensor, first_run: tl.tensor, begin: tl.tensor, at: tl.tensor, p: tl.tensor
) -> tl.tensor:
    """Return each position's value in ``numbers``, which has one value per run."""
    if run_starts is None:
        number = tl.zeros_like(p) + tl.load(numbers)
    else:
        first = tl.load(first_run + tl.program_id(0))
        last = tl.load(first_run + tl.program_id(0) + 1)  # this run may start with the next block
        number = tl.zeros_like(p) + tl.load(numbers + first)
        for run in range(first + 1, last + 1):
            start = (tl.load(run_starts + run) - begin).to(tl.int32)
            number = tl.where(at >= start, tl.load(numbers + run), number)
    return number


@jit
def summarise(
    counts: tl.tensor, numbers: tl.tensor, bits: tl.tensor, boundaries: tl.tensor, before: tl.tensor,
    starts: tl.tensor, ends: tl.tensor, header: tl.tensor, programs: tl.tensor, num_layers: tl.tensor,
    num_slices: tl.tensor, BLOCK: tl.constexpr, PER_END: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, SELECTED: tl.constexpr, LARGEST_SLICE: tl.constexpr, NON_FINITE: tl.constexpr,
    SQUARED_GRADIENT_NORM: tl.constexpr, SQUARED_ERROR: tl.constexpr, FIXED_FIELDS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute each block's start in the payload, the ends and the header.

    Runs as a single program. ``starts`` has an element per block and the total. A payload has an end for every PER_END
    blocks. ``boundaries`` are those of layers, if any, followed by those of slices, if any.
    """
    total = tl.full((), 0, tl.int64)
    non_finite = tl.full((), 0.0, tl.float64)
    squares = tl.full((), 0.0, tl.float64)
    for first in range(0, programs, WIDTH):
        block = first + tl.arange(0, WIDTH)
        inside = block < programs
        count = tl.load(counts + block, mask=inside, other=0).to(tl.int64)
        end = total + tl.cumsum(count, 0)
        tl.store(starts + block, end - count, mask=inside)
        if ends is not None:
            is_last = ((block + 1) % PER_END == 0) | (block + 1 == programs)
            tl.store(ends + block // PER_END, end.to(tl.int32), mask=inside & is_last)
        total += tl.sum(count, 0)
        non_finite += tl.sum(tl.load(numbers + NON_FINITE * programs + block, mask=inside, other=0.0), 0)
        squares += tl.sum(tl.load(numbers + SQUARED_ERROR * programs + block, mask=inside, other=0.0), 0)
    tl.store(starts + programs, total)
    largest_slice = tl.full((), 0, tl.int64)
    if boundaries is not None:
        tl.debug_barrier()  # all starts must be in memory
        slices_at = num_layers + (num_layers > 0).to(tl.int32)
        num_boundaries = slices_at + num_slices + (num_slices > 0).to(tl.int32)
        for first in range(0, num_boundaries, ROWS):
            row = first + tl.arange(0, ROWS)
            tl.store(
                before + row,
                _count_before(tl.load(boundaries + row, mask=row < num_boundaries, other=0), bits, starts, BLOCK),
                mask=row < num_boundaries,
            )
        tl.debug_barrier()
        for first in range(0, num_layers, WIDTH):
            layer = first + tl.arange(0, WIDTH)
            count = _difference(before, layer, layer < num_layers)
            tl.store(header + FIXED_FIELDS + layer, count.to(tl.float64), mask=layer < num_layers)
        for first in range(0, num_slices, WIDTH):
            position = first + tl.arange(0, WIDTH)
            largest_slice = tl.maximum(
                largest_slice, tl.max(_difference(before + slices_at, position, position < num_slices), 0)
            )
    tl.store(header + SELECTED, total.to(tl.float64))
    tl.store(header + LARGEST_SLICE, largest_slice.to(tl.float64))
    tl.store(header + NON_FINITE, non_finite)
    tl.store(header + SQUARED_GRADIENT_NORM, 0.0)
    tl.store(header + SQUARED_ERROR, squares)


@jit
def _count_before(boundary: tl.tensor, bits: tl.tensor, starts: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Count the selected coordinates before each boundary."""
    block = boundary // BLOCK
    word = tl.arange(0, BLOCK // 32)[None, :]
    # The bits of a word before the boundary.
    length = (boundary - block * BLOCK).to(tl.int32)[:, None] - word * 32
    marks = tl.load(bits + (block * (BLOCK // 32))[:, None] + word, mask=length > 0, other=0).to(
        tl.uint32, bitcast=True
    )
    shift = tl.minimum(tl.maximum(length, 0), 31).to(tl.uint32)
    part = (tl.zeros_like(marks) + 1 << shift) - 1
    ones = _bit_count(tl.where(length >= 32, marks, marks & part))
    return tl.load(starts + block) + tl.sum(ones, 1)


@jit
def _difference(before: tl.tensor, position: tl.tensor, inside: tl.tensor) -> tl.tensor:
    start = tl.load(before + position, mask=inside, other=0)
    return tl.load(before + position + 1, mask=inside, other=0) - start


@jit
def pack_block(
    residual: tl.tensor, excesses: tl.tensor, run_starts: tl.tensor, first_run: tl.tensor, bits: tl.tensor,
    starts: tl.tensor, values: tl.tensor, offsets: tl.tensor, num_elements: tl.tensor, capacity: tl.tensor,
    scale: tl.tensor, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PER_END: tl.constexpr,
) -> None:  # fmt: skip
    """Write the marked coordinates of a block into the payload and keep the rest."""
    block = tl.program_id(0)
    begin = block.to(tl.int64) * BLOCK
    length = tl.minimum(num_elements - begin, BLOCK).to(tl.int32)
    earlier = tl.load(starts + block)
    capacity_left = tl.minimum(tl.maximum(capacity - earlier, 0), BLOCK).to(tl.int32)
    first_offset = block % PER_END * BLOCK
    word = tl.arange(0, BLOCK // 32)
    marks = tl.load(bits + begin // 32 + word, mask=word * 32 < length, other=0).to(tl.uint32, bitcast=True)
    ones = _bit_count(marks)
    position = tl.cumsum(ones, 0) - ones
    for _round in range(tl.max(ones, 0)):  # each takes a coordinate of every word
        marked = marks != 0
        without_lowest = marks & (marks - 1)
        at = word * 32 + _bit_count((marks ^ without_lowest) - 1)
        fits = marked & (position < capacity_left)
        p = tl.load(residual + begin + at, mask=fits, other=0.0)
        excess = _of_run(excesses, run_starts, first_run, begin, at, p)
        encoded, _sent, kept = sent_and_kept(p, excess, scale, values.dtype.element_ty, LIMIT)
        tl.store(values + earlier + position, encoded, mask=fits)
        tl.store(offsets + earlier + position, (first_offset + at).to(tl.int16), mask=fits)
        tl.store(residual + begin + at, kept, mask=fits)
        marks = without_lowest
        position += 1


@jit
def _bit_count(words: tl.tensor) -> tl.tensor:
    # Compilers translate this into a single instruction.
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)
