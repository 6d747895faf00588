"""The hard-threshold step of one bucket in two GPU kernels, without a wait for the device.

The same bits as ``compensate``, ``HardThreshold.select``, ``round_to_wire``, ``keep_rest`` and ``PayloadFormat.fill``
one after the other, with nearly all memory traffic in one pass: 12 bytes an element where the gradient is float32, 10
where it is bfloat16, and some 100 bytes for each coordinate of a sparse selection.

1. ``_walk_block`` forms p where e' is to be, and marks what is selected with one bit an element.
2. ``torch.cumsum`` over the counts tells each block where in the payload its coordinates begin.
3. ``_pack_block`` writes values and offsets there and keeps the rest.

One program has one block of 65,536 elements, the payload's own. So no two programs write to one place: coordinates
ascend without a sort, and there is no atomic addition whose order could make two runs differ.
"""

# The annotations of the kernels stay strings, so that the module can be imported without triton.
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor

from lightning_sparse.payload import BLOCK_ELEMENTS
from lightning_sparse.residual import Residual

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # PyTorch for CPUs comes without it
    triton = tl = None

Run = tuple[float, int, int]
"""λ, exact in the residual's dtype, the first element for which it holds, and the one after the last."""

# 512 threads with 8 elements each need some 50 registers: two programs fit a multiprocessor of an H100 or H200. Without
# fusing, a multiplication and an addition round twice, as in PyTorch.
_WALK = {"BLOCK": BLOCK_ELEMENTS, "WORDS": 128, "num_warps": 16, "enable_fp_fusion": False}
_PACK = {"BLOCK": BLOCK_ELEMENTS, "num_warps": 16, "enable_fp_fusion": False}


def is_available(device: torch.device) -> bool:
    """Whether the kernels run for tensors of this device: it is a GPU, triton is installed and can build them.

    Said once where they cannot be built, as without a C compiler: the plain way gives the same bits and takes longer.
    """
    return triton is not None and device.type == "cuda" and _can_build(device)


@lru_cache(maxsize=64)
def _can_build(device: torch.device) -> bool:
    residual, counts = torch.zeros(32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.zeros(4, dtype=torch.int16, device=device)
    places = {"counts": counts, "values": residual[:4], "offsets": offsets}
    try:
        FusedThreshold().select(Residual(residual, residual), residual, [(1.0, 0, 32)], loss_scale=None, **places)
    except Exception as error:  # whatever stops a compiler
        rank_zero_warn(
            f"lightning_sparse: the fused kernels cannot be built for {device} and are not used: selecting takes "
            f"longer and waits for the device. Triton says: {type(error).__name__}: {error}"
        )
        return False
    return True


class FusedThreshold:
    """Launches the kernels and owns their work space: 1 bit an element of the largest bucket, 32 bytes a block.

    All buckets share the space, which is safe as long as they are worked on in one stream.
    """

    def __init__(self) -> None:
        self._space: dict[str, Tensor] = {}
        self._last_blocks = 0

    def select(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        *,
        loss_scale: Tensor | None,
        counts: Tensor,
        values: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Selects the coordinates with not (abs(p) < λ), p = e + g / S, writes them into a payload and keeps the rest.

        Coordinates are written in ascending order until the payload is full. One that finds no room stays in the
        residual as p, to be sent another way, but all numbers are those after it has been sent. Room that is left
        over is not written to.

        Args:
            residual: e, and where e' is formed: float32 or float64, shapes (m,), contiguous.
            gradient: g in any floating dtype, shape (m,), contiguous. Not modified.
            runs: neighbouring runs that together cover the bucket.
            loss_scale: S, one element on the same device; None is 1.
            counts: int32, shape (B,). Becomes the number of coordinates selected in each block, written or not.
            values: the wire dtype, shape (capacity,). Becomes the rounded values.
            offsets: int16, shape (capacity,). Becomes the offsets inside the blocks, 16 unsigned bits each.

        Returns:
            float64, shape (3,), on the device: the numbers of selected coordinates and of non-finite ones among them,
            and ‖e'‖² in gradient units squared.

        Raises:
            ValueError: runs that do not cover the bucket, shapes that do not match, a tensor that is not contiguous.
        """
        before, after = residual
        size, blocks = after.numel(), -(-after.numel() // BLOCK_ELEMENTS)
        _check_flat(size, residual=before, new_residual=after, gradient=gradient)
        _check_flat(blocks, counts=counts)
        _check_flat(values.numel(), values=values, offsets=offsets)
        self._last_blocks = blocks
        if not size:
            return after.new_zeros(3, dtype=torch.float64)
        tables = _threshold_tables(tuple(runs), size, after.dtype, after.device)
        bits = self._reserve("bits", blocks * BLOCK_ELEMENTS // 32, torch.int32, after.device)
        ends = self._reserve("ends", blocks, torch.int64, after.device)
        numbers = self._reserve("numbers", 3 * blocks, torch.float64, after.device).view(3, blocks)
        inputs = (before, after, gradient, loss_scale, *tables)
        _launch(_walk_block, blocks, *inputs, bits, counts, None, numbers, size, WIRE=None, LIMIT=None, **_WALK)
        torch.cumsum(counts, 0, out=ends)
        outputs, limit = (values, offsets, numbers), torch.finfo(values.dtype).max
        _launch(_pack_block, blocks, after, bits, counts, ends, *outputs, size, values.numel(), LIMIT=limit, **_PACK)
        return numbers.sum(1)

    def layer_counts(self, boundaries: Tensor) -> Tensor:
        """Returns how many coordinates of each layer the last :meth:`select` selected: int64, shape (L,).

        Args:
            boundaries: int64, shape (L + 1,), ascending from 0 to m, on the device: where layers begin and end.
        """
        before = torch.zeros_like(boundaries)
        if self._last_blocks:
            work = (self._space["bits"], self._space["ends"], before)
            _launch(_count_before, boundaries.numel(), boundaries, *work, **_PACK)
        return before.diff()

    def mask(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        *,
        loss_scale: Tensor | None,
        out: Tensor,
        wire_dtype: torch.dtype,
    ) -> Tensor:
        """Selects as :meth:`select` does, but into a dense tensor with zeros between the rounded values. One kernel.

        Args:
            residual: as for :meth:`select`.
            gradient: as for :meth:`select`; it may be ``out`` as well.
            runs: as for :meth:`select`.
            loss_scale: as for :meth:`select`.
            out: shape (m,), contiguous, in a dtype that holds every value of ``wire_dtype``. Overwritten.
            wire_dtype: the dtype to which values are rounded.

        Returns:
            As :meth:`select`.
        """
        before, after = residual
        size, blocks = after.numel(), -(-after.numel() // BLOCK_ELEMENTS)
        _check_flat(size, residual=before, new_residual=after, gradient=gradient, out=out)
        if not size:
            return after.new_zeros(3, dtype=torch.float64)
        tables = _threshold_tables(tuple(runs), size, after.dtype, after.device)
        inputs = (before, after, gradient, loss_scale, *tables)
        numbers = self._reserve("numbers", 3 * blocks, torch.float64, after.device).view(3, blocks)
        wire = {"WIRE": getattr(tl, str(wire_dtype).removeprefix("torch.")), "LIMIT": torch.finfo(wire_dtype).max}
        _launch(_walk_block, blocks, *inputs, None, None, out, numbers, size, **wire, **_WALK)
        return numbers.sum(1)

    def _reserve(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        space = self._space.get(name)
        if space is None or space.numel() < size or space.device != device:
            space = self._space[name] = torch.empty(size, dtype=dtype, device=device)
        return space[:size]


def _check_flat(size: int, **tensors: Tensor) -> None:
    # A kernel that is told a wrong size writes into memory that belongs to others.
    for name, tensor in tensors.items():
        if tensor.shape != (size,) or not tensor.is_contiguous():
            given = f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            raise ValueError(f"Invalid {name}: {given}. Must be contiguous, of shape ({size},).")


@lru_cache(maxsize=4096)
def _threshold_tables(
    runs: tuple[Run, ...], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns λ of each run, where each begins, and the run in which each block, and the end, begins."""
    edges = [0, *(end for _, _, end in runs)]
    if edges != [*(start for _, start, _ in runs), size]:
        raise ValueError(f"Invalid {runs=}. Each must begin where the one before it ends, from 0 to {size}.")
    thresholds = [threshold for threshold, start, end in runs if start < end]
    if len(set(thresholds)) == 1:
        # Filled on the device. What is copied there from a list is waited for; the tables below are, this once.
        return torch.full((1,), thresholds[0], dtype=dtype, device=device), None, None
    starts = torch.tensor([start for _, start, end in runs if start < end])
    blocks = torch.arange(0, size + BLOCK_ELEMENTS, BLOCK_ELEMENTS)
    first_run = torch.searchsorted(starts, blocks, right=True, out_int32=True) - 1
    return torch.tensor(thresholds, dtype=dtype, device=device), starts.to(device), first_run.to(device)


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[(programs,)](*arguments, **constants)


def _jit(kernel: Callable[..., Any]) -> Any:
    # Each value of these would be compiled for. A load of bits that is not known to be aligned has them lie as the
    # accesses to coordinates do, one a thread; else they go from thread to thread in every round.
    keep = {"do_not_specialize": ["num_elements", "capacity"]}
    return triton and triton.jit(kernel, **keep, do_not_specialize_on_alignment=["bits", "values", "offsets"])


@_jit
def _walk_block(
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
def _pack_block(
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
def _count_before(
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
