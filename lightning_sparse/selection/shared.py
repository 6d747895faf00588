"""Taking out of a bucket what all workers take out of theirs."""

from math import nan

import torch
from torch import Tensor

from lightning_sparse.exchange import SharedShipment
from lightning_sparse.selection.bucket_gradient import BucketGradient
from lightning_sparse.selection.residual import compensate, keep_rest
from lightning_sparse.sparsifiers import Selection


def take_out_shared(bucket: BucketGradient, shipment: SharedShipment) -> tuple[Selection, Tensor]:
    """Forms p, puts the values of the shipment's coordinates into it and leaves e' in the residual.

    A coordinate that is not finite need not be among them: then all values of its layer are sent as NaN, so that every
    worker sees it in this step. Nothing waits for the device.

    Args:
        bucket: what there is; of layers that are left out zeros are sent.
        shipment: where the values go.

    Returns:
        What was sent; and how many coordinates were not finite, one element.
    """
    layout, indices = bucket.layout, shipment.indices
    after = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
    is_wrong = after.isfinite().logical_not_()
    values = after.index_select(0, indices)
    if bucket.unused:
        is_left_out = torch.zeros_like(is_wrong)
        for start, end in bucket.unused:
            is_left_out[start:end] = True
        values = values.masked_fill(is_left_out[indices], 0)
    sent = keep_rest(after, Selection(indices, values), shipment.format.wire).values
    after.masked_fill_(is_wrong, 0)
    boundaries = torch.tensor(layout.boundaries).to(after.device, non_blocking=True)
    wrong_before = torch.nn.functional.pad(is_wrong.cumsum(0), (1, 0))[boundaries]
    of_layers = torch.searchsorted(indices, boundaries).diff()
    is_of_wrong = wrong_before.diff().bool().repeat_interleave(of_layers, output_size=indices.numel())
    shipment.values.copy_(sent.masked_fill(is_of_wrong, nan))
    return Selection(indices, sent), wrong_before[-1]
