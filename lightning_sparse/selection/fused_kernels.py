"""The GPU's kernels of the hard threshold, in Triton; how they are launched is in ``fused_threshold``."""

# The annotations of the kernels stay strings, so that the module can be imported without triton.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # PyTorch for CPUs comes without it
    triton = tl = None

__all__ = ["count_before", "pack_block", "tl", "triton", "walk_block"]


def _jit(kernel: Callable[..., Any]) -> Any:
    # Each value of these would be compiled for. A load of bits that is not known to be aligned has them lie as the
    # accesses to coordinates do, one a thread; else they go from thread to thread in every round.
    keep = {"do_not_specialize": ["num_elements", "capacity"]}
    return triton and triton.jit(kernel, **keep, do_not_specialize_on_alignment=["bits", "values", "offsets"])


@_jit
def walk_block(
    former: tl.tensor, residual: tl.tensor, gradient: tl.tensor, loss_scale: tl.tensor, thresholds: tl.tensor,
    starts: tl.tensor, first_run: tl.tensor, bits: tl.tensor, counts: tl.tensor, out: tl.tensor, numbers: tl.tensor,
    num_elements: tl.tensor, WIRE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Forms p of a block; marks what is selected or, where there is an ``out``, writes it there and keeps the rest."""
    block = tl.program_id(0)
    begin = block.to(tl.int64) * BLOCK
    length = tl.minimum(num_elements - begin, BLOCK).to(tl.int32)
    selected_of_word = tl.zeros([WORDS], tl.int32)
    non_finite_of_word = tl.zeros([WORDS], tl.int32)
    squares_of_place = tl.zeros([WORDS, 32], residual.dtype.element_ty)  # added up a few at a time, then in float64
    # Whole words of 32 elements come first: their elements are loaded four at a time, as the mask is the same for all.
    whole = length // 32 * 32
    for tile in range(0, whole, WORDS * 32):
        ones, wrong, kept = _walk_words(
            former, residual, gradient, loss_scale, thresholds, starts, first_run, bits, out,
            begin, tile // 32 + tl.arange(0, WORDS), whole, WIRE, LIMIT,
        )  # fmt: skip
        selected_of_word += ones
        non_finite_of_word += wrong
        squares_of_place += kept * kept
    selected = tl.sum(selected_of_word, 0)
    non_finite = tl.sum(non_finite_of_word, 0)
    squares = tl.sum(tl.sum(squares_of_place.to(tl.float64), 1), 0)
    if whole < length:
        ones, wrong, kept = _walk_words(
            former, residual, gradient, loss_scale, thresholds, starts, first_run, bits, out,
            begin, whole // 32 + tl.arange(0, 1), length, WIRE, LIMIT,
        )  # fmt: skip
        selected += tl.sum(ones, 0)
        non_finite += tl.sum(wrong, 0)
        squares += tl.sum(tl.sum((kept * kept).to(tl.float64), 1), 0)
    if counts is not None:
        tl.store(counts + block, selected)
    blocks = tl.num_programs(0)
    tl.store(numbers + block, selected.to(tl.float64))
    tl.store(numbers + blocks + block, non_finite.to(tl.float64))
    tl.store(numbers + 2 * blocks + block, squares)


@_jit
def _walk_words(
    former: tl.tensor, residual: tl.tensor, gradient: tl.tensor, loss_scale: tl.tensor, thresholds: tl.tensor,
    starts: tl.tensor, first_run: tl.tensor, bits: tl.tensor, out: tl.tensor,
    begin: tl.tensor, word: tl.tensor, length: tl.tensor, WIRE: tl.constexpr, LIMIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Walks words of 32 elements; returns how many in each are selected and non-finite, and what of them is kept."""
    column = tl.arange(0, 32)[None, :]
    at = word[:, None] * 32 + column
    inside = at < length
    p = tl.load(former + begin + at, mask=inside, other=0.0)
    g = tl.load(gradient + begin + at, mask=inside, other=0.0).to(p.dtype)
    if loss_scale is not None:
        scale = tl.load(loss_scale).to(p.dtype)
        # In float64 a plain / rounds to nearest, in float32 it does not.
        g = g / scale if p.dtype == tl.float64 else tl.div_rn(g, tl.zeros_like(g) + scale)
    p += g
    if starts is None:
        threshold = tl.load(thresholds)
    else:
        first = tl.load(first_run + tl.program_id(0))
        last = tl.load(first_run + tl.program_id(0) + 1)  # may begin with the next block and hold nowhere in this one
        threshold = tl.zeros_like(p) + tl.load(thresholds + first)
        for run in range(first + 1, last + 1):
            start = (tl.load(starts + run) - begin).to(tl.int32)
            threshold = tl.where(at >= start, tl.load(thresholds + run), threshold)
    # A comparison with NaN is false, so "not below" selects NaN as well.
    selected = ~(tl.abs(p) < threshold) & inside
    ones = selected.to(tl.int32)
    if out is None:
        kept = tl.where(selected, 0.0, p)
        tl.store(residual + begin + at, p, mask=inside)
        tl.store(bits + begin // 32 + word, tl.sum(ones << column, 1), mask=word * 32 < length)
    else:
        sent = _to_wire(p, WIRE, LIMIT)
        kept = tl.where(selected, _rest(p, sent), p)
        tl.store(residual + begin + at, kept, mask=inside)
        tl.store(out + begin + at, tl.where(selected, sent, 0.0).to(out.dtype.element_ty), mask=inside)
    return tl.sum(ones, 1), tl.sum((~_is_finite(p)).to(tl.int32), 1), kept


@_jit
def pack_block(
    residual: tl.tensor, bits: tl.tensor, counts: tl.tensor, ends: tl.tensor, values: tl.tensor, offsets: tl.tensor,
    numbers: tl.tensor, num_elements: tl.tensor, capacity: tl.tensor, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the marked coordinates of a block to their places in the payload, and keeps the rest."""
    block = tl.program_id(0)
    begin = block.to(tl.int64) * BLOCK
    length = tl.minimum(num_elements - begin, BLOCK).to(tl.int32)
    earlier = tl.load(ends + block) - tl.load(counts + block)
    room = tl.minimum(tl.maximum(capacity - earlier, 0), BLOCK).to(tl.int32)
    word = tl.arange(0, BLOCK // 32)
    marks = tl.load(bits + begin // 32 + word, mask=word * 32 < length, other=0).to(tl.uint32, bitcast=True)
    ones = _bit_count(marks)
    place = tl.cumsum(ones, 0) - ones
    squares = tl.zeros([BLOCK // 32], residual.dtype.element_ty)
    for _ in range(tl.max(ones, 0)):  # in each round one coordinate of every word that has any left
        marked = marks != 0
        without_lowest = marks & (marks - 1)
        at = word * 32 + _bit_count((marks ^ without_lowest) - 1)
        p = tl.load(residual + begin + at, mask=marked, other=0.0)
        sent = _to_wire(p, values.dtype.element_ty, LIMIT)
        rest = _rest(p, sent)
        fits = marked & (place < room)
        tl.store(values + earlier + place, sent, mask=fits)
        tl.store(offsets + earlier + place, at.to(tl.int16), mask=fits)
        tl.store(residual + begin + at, rest, mask=fits)
        squares += rest * rest
        marks = without_lowest
        place += 1
    kept = numbers + 2 * tl.num_programs(0) + block
    tl.store(kept, tl.load(kept) + tl.sum(squares.to(tl.float64), 0))


@_jit
def count_before(
    boundaries: tl.tensor, bits: tl.tensor, ends: tl.tensor, before: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Counts the selected coordinates before one boundary."""
    boundary = tl.load(boundaries + tl.program_id(0))
    block = boundary // BLOCK
    word = tl.arange(0, BLOCK // 32)
    length = (boundary - block * BLOCK).to(tl.int32) - word * 32  # of the part of a word that is before the boundary
    marks = tl.load(bits + block * (BLOCK // 32) + word, mask=length > 0, other=0).to(tl.uint32, bitcast=True)
    part = (tl.full([BLOCK // 32], 1, tl.uint32) << tl.minimum(tl.maximum(length, 0), 31).to(tl.uint32)) - 1
    ones = _bit_count(tl.where(length >= 32, marks, marks & part))
    earlier = tl.load(ends + block - 1, mask=block > 0, other=0)
    tl.store(before + tl.program_id(0), earlier + tl.sum(ones, 0))


@_jit
def _bit_count(words: tl.tensor) -> tl.tensor:
    # Compilers know this for what it is: one instruction.
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@_jit
def _is_finite(values: tl.tensor) -> tl.tensor:
    return tl.abs(values) < float("inf")


@_jit
def _to_wire(p: tl.tensor, WIRE: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    # As round_to_wire: finite values stay finite. PyTorch, too, rounds float64 by way of float32.
    sent = p
    if p.dtype != WIRE:
        clamped = tl.minimum(tl.maximum(p, -LIMIT), LIMIT)
        sent = tl.where(_is_finite(p), clamped, p).to(tl.float32).to(WIRE)
    return sent


@_jit
def _rest(p: tl.tensor, sent: tl.tensor) -> tl.tensor:
    # As keep_rest: 0 where the difference is not finite.
    rest = p - sent.to(p.dtype)
    return tl.where(_is_finite(rest), rest, 0.0)
