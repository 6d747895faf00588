"""Taking what this worker sends out of a bucket: p = e + g / S, the selection, and the rest that stays.

Several implementations give the same bits. The hard threshold has a fast one for CPUs (``native_threshold``) and a fast
one for GPUs (``fused_threshold``). A sparsifier that marks what it selects is asked for a mask on GPUs and on dense
routes (``marking``). In all other cases `Sparsifier.select` returns indices.
"""

from collections.abc import Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from lightning_sparse.exchange import Shipment, largest_slice, slice_bounds
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import is_available
from lightning_sparse.kernels.native import is_native
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.selection.fused_threshold import Boundaries, FusedThreshold
from lightning_sparse.selection.marking import take_out_marked
from lightning_sparse.selection.native_threshold import take_out_natively
from lightning_sparse.selection.numbers import LocalNumbers, header_fields, layer_errors, layer_fields, squared_norm
from lightning_sparse.selection.residual import compensate, keep_rest
from lightning_sparse.sparsifiers import (
    HardThreshold,
    LayerLayout,
    MarkingSparsifier,
    Selection,
    Sparsifier,
    ThresholdRun,
    in_order,
)


class Extraction:
    """Takes what a sparsifier selects out of buckets and fills their shipments with it.

    Args:
        sparsifier: chooses what is sent.
        num_slices: how many equal slices' coordinates to count for the exchange; 0 for none.
        per_layer: whether to report numbers of every layer.
        keeps_rest: False forgets what is not sent.
    """

    def __init__(self, sparsifier: Sparsifier, *, num_slices: int, per_layer: bool, keeps_rest: bool) -> None:
        self._sparsifier = sparsifier
        self._num_slices = num_slices
        self._per_layer = per_layer
        self._keeps_rest = keeps_rest
        self._is_marking = type(sparsifier).select is MarkingSparsifier.select
        self._is_threshold = self._is_marking and _is_threshold(sparsifier)
        self._fused = FusedThreshold()
        self._known_boundaries: dict[tuple[LayerLayout, torch.device, bool], Boundaries] = {}

    def fill(self, bucket: FlatBucket, shipment: Shipment, *, measures_gradient: bool = False) -> Tensor:
        """Forms p, writes what is sent into the shipment, leaves e' in the residual; returns the header.

        Args:
            bucket: what there is.
            shipment: where what is sent goes.
            measures_gradient: whether the header tells ‖g‖².

        Returns:
            float64, shape (``header_fields``,), on the bucket's device.
        """
        wire = shipment.format.wire
        may_be_fast = self._is_threshold and not wire.is_whole
        if may_be_fast and self._keeps_rest and is_available(bucket.gradient.device):
            return self._fill_fused(bucket, shipment, measures_gradient)
        squared_gradient_norm: float | Tensor = 0.0
        if measures_gradient:
            squared_gradient_norm = squared_norm(bucket.gradient)
            if bucket.loss_scale is not None:
                squared_gradient_norm /= bucket.loss_scale.double().square().view(())
        if may_be_fast and is_native(*bucket.residual, wire_dtype=wire.dtype):
            numbers = self._fill_natively(bucket, shipment)
        elif self._is_marking and (shipment.payload is None or bucket.gradient.device.type != "cpu"):
            numbers = self._fill_marked(bucket, shipment)
        else:
            numbers = self._fill_selected(bucket, shipment)
        numbers.squared_gradient_norm = squared_gradient_norm
        return numbers.header(bucket.gradient.device)

    def _fill_natively(self, bucket: FlatBucket, shipment: Shipment) -> LocalNumbers:
        runs = self._runs(bucket, by_layer=self._per_layer)
        if shipment.payload is not None:
            shipment.rest = partial(_rest_in_residual, bucket, runs, shipment.format, shipment.payload)
        numbers = take_out_natively(bucket, shipment, runs, self._num_slices, per_layer=self._per_layer)
        if not self._keeps_rest:
            if shipment.payload is not None and numbers.selected > shipment.format.capacity(shipment.payload.numel()):
                rest = shipment.rest()  # it is in the residual
                shipment.rest = lambda: rest
            bucket.residual.after.zero_()
            numbers.squared_error = 0.0
            if numbers.of_layers is not None:
                numbers.of_layers["squared_error"].zero_()
        return numbers

    def _fill_selected(self, bucket: FlatBucket, shipment: Shipment) -> LocalNumbers:
        sent = self._select(bucket, shipment.format.wire)
        if not self._keeps_rest:
            bucket.residual.after.zero_()
        if shipment.payload is None:
            shipment.out.zero_()
            shipment.out[sent.indices] = sent.values / shipment.divisor
        else:
            shipment.format.fill(shipment.payload, sent)
            capacity = shipment.format.capacity(shipment.payload.numel())
            shipment.rest = lambda: Selection(sent.indices[capacity:], sent.values[capacity:])
        return self._numbers(bucket, sent)

    def _select(self, bucket: FlatBucket, wire: Wire) -> Selection:
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        selected = self._sparsifier.select(compensated, bucket.layout)
        if not self._is_marking:
            selected = in_order(selected, bucket.layout.num_elements)
        selected = without(selected, bucket.left_out, bucket.layout.num_elements)
        return keep_rest(compensated, selected, wire)

    def _fill_fused(self, bucket: FlatBucket, shipment: Shipment, measures_gradient: bool) -> Tensor:
        after, runs = bucket.residual.after, self._runs(bucket)
        header = torch.empty(header_fields(bucket.layout, self._per_layer), dtype=torch.float64, device=after.device)
        boundaries = self._boundaries(bucket, has_slices=shipment.payload is not None)
        if shipment.payload is None:
            self._fused.mask(
                bucket.residual,
                bucket.gradient,
                runs,
                loss_scale=bucket.loss_scale,
                out=shipment.out,
                wire=shipment.format.wire,
                divisor=shipment.divisor,
                header=header,
                boundaries=boundaries,
                measures_gradient=measures_gradient,
            )
        else:
            shipment.is_cleared = shipment.out is bucket.gradient
            self._fused.select(
                bucket.residual,
                bucket.gradient,
                runs,
                loss_scale=bucket.loss_scale,
                payload=shipment.format.parts(shipment.payload),
                wire=shipment.format.wire,
                header=header,
                boundaries=boundaries,
                clears_gradient=shipment.is_cleared,
                measures_gradient=measures_gradient,
            )
            shipment.rest = partial(_rest_in_residual, bucket, runs, shipment.format, shipment.payload)
        if self._per_layer:
            header[layer_fields("squared_error", bucket.layout)] = layer_errors(after, bucket.layout)
        return header

    def _fill_marked(self, bucket: FlatBucket, shipment: Shipment) -> LocalNumbers:
        """Fills by a mask: on a GPU the host would wait for the number of indices, and dense routes need none."""
        assert isinstance(self._sparsifier, MarkingSparsifier)
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        marks = self._sparsifier.mark(compensated, bucket.layout)
        values = self._sparsifier.values(compensated, bucket.layout)
        for start, end in bucket.left_out:
            marks[start:end] = False
        non_finite = bucket.residual.after.isfinite().logical_not_().logical_and_(marks).count_nonzero()
        take_out_marked(bucket.residual, marks, values, shipment)
        if not self._keeps_rest:
            bucket.residual.after.zero_()
        after = bucket.residual.after
        numbers = LocalNumbers.after_selection(after, selected=marks.count_nonzero(), non_finite=non_finite)
        boundaries = self._boundaries(bucket, has_slices=shipment.payload is not None)
        if boundaries is not None:
            assert boundaries.places is not None
            before = torch.nn.functional.pad(marks.cumsum(0), (1, 0)).index_select(0, boundaries.places)
            of_layers, of_slices = before[: boundaries.num_layers + 1], before[-boundaries.num_slices - 1 :]
            if boundaries.num_slices:
                numbers.largest_slice = of_slices.diff().amax()
            if boundaries.num_layers:
                of_errors = layer_errors(after, bucket.layout)
                numbers.of_layers = {"selected": of_layers.diff(), "squared_error": of_errors}
        return numbers

    def _boundaries(self, bucket: FlatBucket, *, has_slices: bool) -> Boundaries | None:
        has_slices = has_slices and self._num_slices > 0
        if not (self._per_layer or has_slices):
            return None
        key = (bucket.layout, bucket.gradient.device, has_slices)
        if key not in self._known_boundaries:
            layers = bucket.layout.boundaries if self._per_layer else ()
            slices = slice_bounds(bucket.layout.num_elements, self._num_slices) if has_slices else ()
            self._known_boundaries[key] = Boundaries(layers, slices, bucket.gradient.device)
        return self._known_boundaries[key]

    def _numbers(self, bucket: FlatBucket, sent: Selection) -> LocalNumbers:
        non_finite = sent.values.isfinite().logical_not_().count_nonzero()
        after = bucket.residual.after
        numbers = LocalNumbers.after_selection(after, selected=sent.indices.numel(), non_finite=non_finite)
        if self._num_slices:
            numbers.largest_slice = largest_slice(sent.indices, bucket.layout.num_elements, self._num_slices)
        if self._per_layer:
            boundaries = torch.tensor(bucket.layout.boundaries).to(sent.indices.device, non_blocking=True)
            of_layers = torch.searchsorted(sent.indices, boundaries).diff()
            numbers.of_layers = {"selected": of_layers, "squared_error": layer_errors(after, bucket.layout)}
        return numbers

    def _runs(self, bucket: FlatBucket, *, by_layer: bool = False) -> Sequence[ThresholdRun]:
        assert isinstance(self._sparsifier, HardThreshold)
        dtype = bucket.residual.after.dtype
        if not bucket.left_out:
            return self._sparsifier.runs(bucket.layout, dtype, by_layer=by_layer)
        # Unused layers are runs of their own with a threshold that nothing reaches: their residuals are finite.
        unused = set(bucket.left_out)
        return [
            ThresholdRun(inf, start, end) if (start, end) in unused else ThresholdRun(threshold, start, end)
            for threshold, start, end in self._sparsifier.runs(bucket.layout, dtype, by_layer=True)
        ]


def _is_threshold(sparsifier: Sparsifier) -> bool:
    """Returns whether this is the hard threshold; a subclass that selects differently is asked, not bypassed."""
    if not isinstance(sparsifier, HardThreshold):
        return False
    kind = type(sparsifier)
    return kind.mark is HardThreshold.mark and kind.values is MarkingSparsifier.values


def _rest_in_residual(
    bucket: FlatBucket, runs: Sequence[ThresholdRun], payload_format: PayloadFormat, payload: Tensor
) -> Selection:
    """Takes what found no room in a payload out of the residual. Waits for a GPU."""
    residual = bucket.residual.after
    first = payload_format.unpack(payload, residual.dtype, payload_format.num_selected(payload))
    # Coordinates ascend: up to the last in the payload, what reaches λ is what rounding left, for the next step.
    begin = int(first.indices[-1]) + 1 if first.indices.numel() else 0
    rest = residual[begin:]
    is_left = torch.zeros(rest.shape, dtype=torch.bool, device=residual.device)
    for threshold, start, end in runs:
        if end > begin:
            part = slice(max(start - begin, 0), end - begin)
            is_left[part] = (rest[part].abs() < threshold).logical_not_()
    indices = is_left.nonzero().squeeze(1).add_(begin)
    return keep_rest(residual, Selection(indices, residual[indices]), payload_format.wire)


def without(selection: Selection, spans: Sequence[tuple[int, int]], num_elements: int) -> Selection:
    """Returns the selection without the coordinates in these spans of a bucket of so many elements."""
    if not spans:
        return selection
    indices, values = selection
    kept = torch.ones(num_elements, dtype=torch.bool, device=indices.device)
    for start, end in spans:
        kept[start:end] = False
    kept = kept[indices]
    return Selection(indices[kept], values[kept])
