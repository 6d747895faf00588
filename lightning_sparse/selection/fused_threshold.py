"""The hard-threshold step of one bucket in three GPU kernels, without a wait for the device.

The kernels give the bits of ``compensate``, ``HardThreshold.select``, ``keep_residual`` and ``PayloadFormat.fill``.
Nearly all memory traffic is in one pass: 12 bytes per element of a float32 gradient, and 10 of a bfloat16 gradient. If
the gradient is cleared for the average, 4 or 2 more move. A sparse selection adds some 100 bytes per coordinate.

1. ``walk_block`` computes p in the memory of e' and marks selected coordinates with one bit per element.
2. ``summarise`` sums the numbers of all blocks into the header, and computes each block's start in the payload.
3. ``pack_block`` writes values and offsets into the payload and keeps the rest.

A program has one block of 8,192 elements, an eighth of the payload's. A bucket of 25 MB has 800 programs, and a bucket
of 1 MB has 32. An H100 with 132 multiprocessors runs two programs on each. The payload's own blocks of 65,536 elements
would leave most of them idle. Each position has a single writer, so coordinates ascend without a sort, and no atomic
additions make runs differ.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import copy_to_device
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS
from lightning_sparse.exchange.routes.transfer import Transfer
from lightning_sparse.kernels.launching import launch, tl
from lightning_sparse.kernels.threshold import pack_block, summarise, walk_block
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.selection.statistics import FIXED_FIELDS, SLOTS
from lightning_sparse.sparsifiers.hard_threshold import ThresholdRun

PROGRAM_ELEMENTS = 8192
PER_END = BLOCK_ELEMENTS // PROGRAM_ELEMENTS
ALIGNED_BYTES = 16
"""Bytes that a thread reads and writes at once from an aligned pointer. torch's allocations are aligned."""
# 512 threads with 8 elements each need some 50 registers: two programs fit a multiprocessor of an H100 or H200. Without
# fusing, a multiplication and an addition round twice, as in PyTorch.
_WALK = {"BLOCK": PROGRAM_ELEMENTS, "WORDS": 128, "num_warps": 16, "enable_fp_fusion": False}
_SUMMARISE = {"BLOCK": PROGRAM_ELEMENTS, "PER_END": PER_END, "WIDTH": 2048, "ROWS": 16, "num_warps": 8}
# ``walk_block`` writes only these two statistics, because ``summarise`` counts coordinates from the marks.
_SLOTS = {name.upper(): slot for name, slot in SLOTS.items()}
_WALK |= {name: slot for name, slot in _SLOTS.items() if name in ("NON_FINITE", "SQUARED_ERROR")}
_SUMMARISE |= _SLOTS | {"FIXED_FIELDS": FIXED_FIELDS}
_PACK = {"BLOCK": PROGRAM_ELEMENTS, "PER_END": PER_END, "num_warps": 4, "enable_fp_fusion": False}


def take_out_fused(
    bucket: FlatBucket,
    transfer: Transfer,
    runs: Sequence[ThresholdRun],
    header: Tensor,
    boundaries: Tensor | None = None,
    num_layers: int = 0,
    num_slices: int = 0,
) -> None:
    """Select coordinates with not (abs(p) < λ), p = e + g / S, write them out and keep the rest.

    Coordinates go into the payload in ascending order until it is full. Values beyond the capacity stay in the residual
    as p, but all numbers are those after sending them. Unused capacity is not written. Without a payload, two kernels
    write the divided values and zeros into ``transfer.out``.

    Args:
        bucket: all its tensors contiguous.
        transfer: receives the sent values. With a payload, ``is_cleared`` says whether to leave zeros in the gradient.
            All buckets share 1 bit per element and 52 bytes per block of ``transfer.buffers``, so one stream must work
            on them.
        runs: neighbouring runs that together cover the bucket.
        header: float64, shape (FIXED_FIELDS + layers,) or more: receives the numbers of the step, and the selected
            coordinates of each layer. Further fields are not modified.
        boundaries: of the layers, and then of the slices, whose coordinates are counted: int64, each from 0 to m.
        num_layers: number of these layers.
        num_slices: number of these slices.
    """
    (before, after, _), gradient, wire = bucket.residual, bucket.gradient, transfer.format.wire
    size, device, take = after.numel(), after.device, transfer.buffers.take
    blocks = -(-size // PROGRAM_ELEMENTS)
    # With a wrong size, a kernel would write out of bounds.
    assert all(tensor.shape == (size,) and tensor.is_contiguous() for tensor in (before, after, gradient))
    ends = bits = dense = parts = None
    if transfer.payload is None:
        dense = transfer.out
    else:
        parts = transfer.format.parts(transfer.payload)
        ends = parts.ends
    if not size:
        header.zero_()
        return
    tables = _threshold_tables(tuple(runs), size, after.dtype, device)
    if parts is not None or boundaries is not None:
        bits = take("bits", blocks * PROGRAM_ELEMENTS // 32, torch.int32, device)
    counts = take("counts", blocks, torch.int32, device)
    numbers = take("numbers", FIXED_FIELDS * blocks, torch.float64, device)
    starts = take("starts", blocks + 1, torch.int64, device)
    # Zeros do not depend on loaded values. If the gradient is not aligned, threads write other elements than they
    # read, so a thread could clear an element before another thread reads it.
    must_clear = parts is not None and transfer.is_cleared
    clears = must_clear and gradient.storage_offset() * gradient.element_size() % ALIGNED_BYTES == 0
    inputs = (before, after, gradient, bucket.loss_scale, *tables)
    work = (*inputs, bits, counts, dense, numbers, size, transfer.divisor, wire.scale)
    storage = getattr(tl, str(wire.storage).removeprefix("torch."))
    constants = {"WIRE": storage, "LIMIT": wire.limit, "CLEARS": clears}
    launch(walk_block, blocks, *work, **constants, **_WALK)
    if must_clear and not clears:
        gradient.zero_()
    counts_before = None if boundaries is None else take("before", boundaries.numel(), torch.int64, device)
    assert header.numel() >= FIXED_FIELDS + num_layers
    arguments = (counts, numbers, bits, boundaries, counts_before, starts, ends, header)
    launch(summarise, 1, *arguments, blocks, num_layers, num_slices, **_SUMMARISE)
    torch.autograd.graph.increment_version(after)  # kernels do not
    if parts is not None:
        into = (parts.values, parts.offsets, size, parts.values.numel(), wire.scale)
        launch(pack_block, blocks, after, *tables[1:], bits, starts, *into, LIMIT=wire.limit, **_PACK)


@lru_cache(maxsize=128)  # few, because λ may change in every step
def _threshold_tables(
    runs: tuple[ThresholdRun, ...], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return λ, excess and start of each run, and the run at each block's start and at the end."""
    assert [0, *(run.end for run in runs)] == [*(run.start for run in runs), size], "runs with gaps"
    numbers = [(run.threshold, run.excess) for run in runs if run.start < run.end]
    if len(set(numbers)) == 1:
        threshold, excess = (torch.full((1,), number, dtype=dtype, device=device) for number in numbers[0])
        return threshold, excess, None, None  # filled on the device, without a copy
    thresholds, excesses = (
        copy_to_device(torch.tensor(part, dtype=dtype), device) for part in zip(*numbers, strict=True)
    )
    return thresholds, excesses, *_edge_tables(tuple(run.start for run in runs if run.start < run.end), size, device)


@lru_cache(maxsize=4096)
def _edge_tables(starts: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    edges = torch.tensor(starts)
    blocks = torch.arange(0, size + PROGRAM_ELEMENTS, PROGRAM_ELEMENTS)
    first_run = torch.searchsorted(edges, blocks, right=True, out_int32=True) - 1
    return copy_to_device(edges, device), copy_to_device(first_run, device)
