"""What receivers do with payloads: add them up in rank order, put slices side by side, pack what is not zero."""

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.exchange.routes.fused_decode import decode
from lightning_sparse.kernels import is_available, native
from lightning_sparse.kernels.native import is_native
from lightning_sparse.sparsifiers import Selection


def average(payload_format: PayloadFormat, rows: Tensor, out: Tensor, buffers: Buffers) -> None:
    """Adds payloads to zeros, all that one rank sent before anything of the next, and divides by their number.

    The same bits everywhere, and in every way. Waits for a GPU where there are no kernels for it.

    Args:
        payload_format: of each payload.
        rows: uint8, shape (n, payload_bytes(c)). Of one that was too small for its selection what it holds is added.
        out: shape (num_elements,), all zeros: receives the average.
        buffers: gives work space, which all buckets share, as they are decoded one after the other.
    """
    num_workers = len(rows)
    if is_available(out.device):
        places = num_workers * payload_format.capacity(rows.shape[1])
        quotients = buffers.take("quotients", places, out.dtype, out.device)
        decode(payload_format, rows, out, quotients=quotients)
        return
    if is_native(out, wire_dtype=payload_format.wire.dtype):
        _, ends, values, offsets = payload_format.parts(rows[0])
        native.average(rows, ends, values, offsets, out, payload_format.wire.dtype, payload_format.wire.scale)
        return
    # A GPU adds in no order: the places of one addition must be unique, so each payload is one.
    for row in rows.unbind():
        out.scatter_add_(0, *payload_format.unpack(row, out.dtype, payload_format.num_selected(row)))
    out.div_(num_workers)


def side_by_side(payload_format: PayloadFormat, rows: Tensor, out: Tensor) -> None:
    """Puts what the j-th payload holds into the j-th slice. Waits for a GPU where there are no kernels for it.

    Args:
        payload_format: of each payload, with as many elements as a slice has.
        rows: uint8, shape (n, payload_bytes(c)).
        out: shape (d,), all zeros: neighbouring slices, of which the last ones may be shorter or empty.
    """
    if is_available(out.device):
        decode(payload_format, rows, out, is_side_by_side=True)
        return
    for rank, row in enumerate(rows.unbind()):
        indices, values = payload_format.unpack(row, out.dtype, payload_format.num_selected(row))
        out[indices + rank * payload_format.num_elements] = values


def pack_nonzero(payload_format: PayloadFormat, values: Tensor, payload: Tensor) -> Tensor:
    """Packs what is not zero, NaN included, without a wait for the device; returns how much that is, written or not.

    Args:
        payload_format: of the payload, without a header.
        values: in the wire dtype, shape (num_elements,).
        payload: uint8, shape (payload_bytes(c),).
    """
    count = values.count_nonzero()
    capacity = payload_format.capacity(payload.numel())
    if values.numel():  # of no elements it fails on a GPU: pytorch#162473
        # What is not used gets an index beyond all blocks: it is before no block's end.
        beyond = payload_format.num_blocks * BLOCK_ELEMENTS
        indices = torch.nonzero_static(values, size=capacity, fill_value=beyond).squeeze(1)
        selection = Selection(indices, values.index_select(0, indices.clamp(max=values.numel() - 1)))
        payload_format.fill(payload, selection)
    return count
