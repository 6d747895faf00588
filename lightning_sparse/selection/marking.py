"""Taking out of a bucket what a mask of all its elements marks: no number need come to the host first."""

from functools import partial

import torch
from torch import Tensor

from lightning_sparse.exchange import Shipment
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS
from lightning_sparse.selection.residual import Residual, sent_and_kept
from lightning_sparse.sparsifiers import Selection


def take_out_marked(residual: Residual, marks: Tensor, values: Tensor, shipment: Shipment) -> None:
    """Sends what is marked of p, which is where e' is to be, and leaves e' there. Nothing waits for the device.

    Args:
        residual: its second tensor holds p; shape (m,).
        marks: bool, shape (m,).
        values: what is to be sent where it is marked, shape (m,): p itself, or p rounded in some way.
        shipment: receives the sent values.
    """
    after = residual.after
    sent, kept = sent_and_kept(after, values, shipment.format.wire)
    sent = torch.where(marks, sent, 0)  # a copy: the values may be p itself, which becomes e'
    torch.where(marks, kept, after, out=after)
    if shipment.payload is None:
        torch.div(sent, shipment.divisor, out=shipment.out)
        return
    capacity = shipment.format.capacity(shipment.payload.numel())
    indices = torch.empty(0, dtype=torch.int64, device=after.device)
    if marks.numel():  # of no elements it fails on a GPU: pytorch#162473
        # What is not used gets an index beyond all blocks: it is before no block's end.
        beyond = shipment.format.num_blocks * BLOCK_ELEMENTS
        indices = torch.nonzero_static(marks, size=capacity, fill_value=beyond).squeeze(1)
    selection = Selection(indices, sent.index_select(0, indices.clamp(max=max(marks.numel() - 1, 0))))
    shipment.format.fill(shipment.payload, selection)
    shipment.rest = partial(_rest, marks, sent, capacity)


def _rest(marks: Tensor, sent: Tensor, capacity: int) -> Selection:
    indices = marks.nonzero().squeeze(1)[capacity:]
    return Selection(indices, sent[indices])
