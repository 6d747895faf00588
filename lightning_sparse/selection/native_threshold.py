"""The hard-threshold step of one bucket on a CPU in one pass over memory, by compiled functions.

p is formed, compared, squared and stored, what reaches λ goes straight into the payload or the masked gradient, and the
gradient is cleared, while all of it is in the cache: 12 bytes an element, 16 with the clearing or a masked gradient.
"""

from collections.abc import Sequence

import torch

from lightning_sparse.exchange import Shipment, slice_elements
from lightning_sparse.kernels.native import NativeThreshold
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.selection.numbers import LocalNumbers
from lightning_sparse.sparsifiers import ThresholdRun


def take_out_natively(
    bucket: FlatBucket, shipment: Shipment, runs: Sequence[ThresholdRun], num_slices: int, *, per_layer: bool
) -> LocalNumbers:
    """Forms p, writes what is sent into the shipment and leaves e' in the residual.

    What finds no room in a payload stays in the residual as p; the numbers are those after it has been sent.

    Args:
        bucket: what there is.
        shipment: where what is sent goes.
        runs: which λ holds where, in order; together they cover the bucket. One for each layer with per_layer.
        num_slices: how many equal slices' coordinates to count; 0 for none.
        per_layer: whether the numbers are told of every layer.
    """
    wire = shipment.format.wire
    gradient = bucket.gradient
    if gradient.dtype != shipment.out.dtype:  # then the average has memory of its own
        gradient = shipment.out.copy_(gradient)
    taken = NativeThreshold(*bucket.residual, gradient, bucket.loss_scale, wire.dtype, wire.scale)
    slices = None
    if shipment.payload is not None:
        shipment.is_cleared = shipment.out is gradient
        _, ends, values, offsets = shipment.format.parts(shipment.payload)
        taken.write_to(ends, values, offsets)
        if num_slices:
            slices = taken.count_slices(slice_elements(bucket.layout.num_elements, num_slices), num_slices)
    counts, errors = [0], []
    for threshold, start, end in runs:
        if shipment.payload is None:
            taken.take_out_masked(threshold, start, end, shipment.out, shipment.divisor)
        else:
            taken.take_out(threshold, start, end, clears_gradient=shipment.is_cleared)
        counts.append(taken.selected)
        errors.append(taken.pop_squared_error())
    numbers = LocalNumbers(taken.selected, taken.non_finite, sum(errors))
    if slices is not None:
        numbers.largest_slice = slices.amax()
    if per_layer:
        of_errors = torch.tensor(errors, dtype=torch.float64)
        numbers.of_layers = {"selected": torch.tensor(counts).diff(), "squared_error": of_errors}
    return numbers
