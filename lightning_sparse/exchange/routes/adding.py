"""Add received payloads in rank order, and concatenate slices.

``rows`` are payloads of the same format: uint8, shapes (payload_bytes(c),), each contiguous. If k > c, only the c
coordinates in the payload count. The capacities c may differ in a list. A GPU needs equal capacities, in a tensor of
shape (n, payload_bytes(c)).

On a GPU one kernel decodes all payloads of a bucket, without their sizes on the host and with the same bits as adding
payload by payload. A program has one block of 65,536 elements and goes through the workers in rank order; a bucket of
25 MB has 100 programs. Each program is a chain of reads from the L2 cache, three per worker and tile, and eight for the
quotients. So latency bounds the kernel, not bandwidth.
"""

from ctypes import addressof, c_int64

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.exchange.routes.transfer import Rows
from lightning_sparse.kernels import native
from lightning_sparse.kernels.decode import add_payloads
from lightning_sparse.kernels.launching import is_available, launch
from lightning_sparse.kernels.native import WIRES, Payloads, is_native, pointer
from lightning_sparse.sparsifiers.protocol import Selection

TILE = 1024
"""Coordinates per iteration, 4 for each of 256 threads. At a density of 1 %, a block has 655 per worker."""
_DECODE = {"BLOCK": BLOCK_ELEMENTS, "TILE": TILE, "num_warps": 8, "enable_fp_fusion": False}


def average(
    payload_format: PayloadFormat, rows: Rows, out: Tensor, buffers: Buffers, *, by_senders: bool = False
) -> None:
    """Add payloads to zeros in rank order and divide, with the same bits on every path.

    Waits for a GPU only if it has no Triton kernels.

    Args:
        payload_format: of each payload.
        rows: the payloads.
        out: shape (num_elements,), all zeros: receives the average.
        buffers: gives work space, which all buckets share, because they are decoded one after the other.
        by_senders: whether to divide each element by the number of workers that sent it, instead of n.
    """
    has_kernels = is_available(out.device)
    if not has_kernels and is_native(out, wire_dtype=payload_format.wire.dtype):
        native.average(native_payloads(payload_format, rows, by_senders), out)
        return
    senders = None
    if by_senders:
        senders = buffers.take("senders", out.numel(), torch.int32, out.device).zero_()
    if has_kernels:
        assert isinstance(rows, Tensor)
        decode(payload_format, rows, out, 1, senders)
        return
    # A GPU adds in arbitrary order, so indices of an addition must be unique: add each payload separately.
    for row in rows:
        add_selection(payload_format.unpack(row, out.dtype), out, senders)
    divide(out, len(rows), senders)


def divide(sums: Tensor, num_workers: int, senders: Tensor | None = None) -> None:
    """Divide sums in place by n, or by the number of senders, with the same bits on every device.

    ``senders``: int32, of the sums' shape; becomes at least 1.
    """
    # A tensor, because CUDA multiplies by the reciprocal of a Python number.
    sums.div_(sums.new_full((), num_workers) if senders is None else senders.clamp_(min=1))


def native_payloads(payload_format: PayloadFormat, rows: Rows, by_senders: bool) -> Payloads:
    """Describe payloads, which must outlive the result, to compiled functions."""
    capacities = [payload_format.capacity(row.numel()) for row in rows]
    counts, wire = (len(rows), payload_format.num_blocks), payload_format.wire
    places = 8 * payload_format.header_fields, payload_format.fixed_bytes, wire.dtype.itemsize
    numbers = c_int64 * len(rows)  # faster than tensors of a few numbers
    arrays = numbers(*map(pointer, rows)), numbers(*capacities)
    payloads = Payloads(*map(addressof, arrays), *counts, *places, wire.scale, WIRES[wire.dtype], by_senders)
    payloads.arrays = arrays  # live as long as the pointers to them
    return payloads


def add_selection(selection: Selection, out: Tensor, senders: Tensor | None) -> None:
    """Add values at unique indices to ``out``; count nonzero ones.

    ``senders``: int32, of out's shape, or None.
    """
    out.scatter_add_(0, *selection)
    if senders is not None:
        senders.scatter_add_(0, selection.indices, (selection.values != 0).to(senders.dtype))


def concatenate(payload_format: PayloadFormat, rows: Tensor, out: Tensor, buffers: Buffers) -> None:
    """Put the coordinates of payload j into slice j of ``out``.

    ``out``, shape (d,), is all zeros. Its slices have ``payload_format.num_elements`` each; the last ones may be
    shorter or empty. Waits for a GPU only if it has no Triton kernels.
    """
    if is_available(out.device):
        decode(payload_format, rows, out, len(rows))
        return
    for row, part in zip(rows.unbind(), torch.split(out, payload_format.num_elements), strict=False):
        average(payload_format, [row], part, buffers)  # of a single payload: its values


def decode(
    payload_format: PayloadFormat,
    rows: Tensor,
    out: Tensor,
    num_slices: int,
    senders: Tensor | None = None,
) -> None:
    """Launch the kernel that adds each slice's payloads to zeros, and divides the sums of a single slice.

    Args:
        payload_format: of each payload.
        rows: the payloads, on a GPU.
        out: float32 or float64, shape (num_elements,) or that of all slices together, contiguous, all zeros.
        num_slices: neighbouring slices of ``out``, with n / num_slices payloads each.
        senders: int32, of out's shape, all zeros: receives the number of nonzero values.
    """
    _, ends, values, offsets = payload_format.parts(rows[0])
    if not payload_format.num_blocks or not values.numel():
        return
    # The distance from each part of a payload to that part of the next payload.
    strides = (rows.stride(0) // part.itemsize for part in (ends, values, offsets))
    launch(
        add_payloads,
        (payload_format.num_blocks, num_slices),
        *(out, senders, ends, values, offsets, len(rows) // num_slices, values.numel(), *strides),
        *(payload_format.num_elements, payload_format.wire.scale, num_slices == 1),
        **_DECODE,
    )
