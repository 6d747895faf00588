"""Taking what this worker sends out of a bucket: p = e + g / S, the selection, and the rest that stays.

Several ways come to the same bits: the hard threshold has two for CPUs (``native_threshold`` and, where that is not to
be had, ``block_filter``) and one for GPUs (``fused_threshold``), those that mark what they select one for GPUs
(``marking``), and every other sparsifier is asked through `Sparsifier.select`.
"""

from collections.abc import Sequence
from functools import partial
from math import inf, isfinite

import torch
from torch import Tensor

from lightning_sparse.exchange import SharedShipment, Shipment, largest_slice, slice_bounds
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import is_available
from lightning_sparse.selection.block_filter import BlockFilter, repair
from lightning_sparse.selection.bucket_gradient import BucketGradient
from lightning_sparse.selection.fused_threshold import Boundaries, FusedThreshold
from lightning_sparse.selection.marking import take_out_marked
from lightning_sparse.selection.native_threshold import goes_native, take_out_natively
from lightning_sparse.selection.numbers import LocalNumbers, header_fields, layer_errors, layer_fields, squared_norm
from lightning_sparse.selection.residual import compensate, keep_rest
from lightning_sparse.selection.shared import take_out_shared
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
        self._block_filter = BlockFilter()
        self._fused = FusedThreshold()
        self._known_boundaries: dict[tuple[LayerLayout, torch.device, bool], Boundaries] = {}

    def fill(self, bucket: BucketGradient, shipment: Shipment, *, measures_gradient: bool = False) -> Tensor:
        """Forms p, writes what is sent into the shipment, leaves e' in the residual; returns the header.

        Args:
            bucket: what there is.
            shipment: where what is sent goes.
            measures_gradient: whether the header tells ‖g‖².

        Returns:
            float64, shape (``header_fields``,), on the bucket's device.
        """
        # A subclass that selects differently is asked, not bypassed.
        is_threshold = type(self._sparsifier).select is HardThreshold.select
        if is_threshold and self._keeps_rest and is_available(bucket.gradient.device):
            return self._fill_fused(bucket, shipment, measures_gradient)
        squared_gradient_norm: float | Tensor = 0.0
        if measures_gradient:
            squared_gradient_norm = squared_norm(bucket.gradient)
            if bucket.loss_scale is not None:
                squared_gradient_norm /= bucket.loss_scale.double().square().view(())
        numbers = self._fill(bucket, shipment, is_threshold)
        numbers.squared_gradient_norm = squared_gradient_norm
        return numbers.header(bucket.gradient.device)

    def _fill(self, bucket: BucketGradient, shipment: Shipment, is_threshold: bool) -> LocalNumbers:
        if isinstance(shipment, SharedShipment):
            sent, num_non_finite = take_out_shared(bucket, shipment)
            if not self._keeps_rest:
                bucket.residual.after.zero_()
            numbers = self._numbers(bucket, without(sent, bucket.unused, bucket.layout.num_elements))
            numbers.non_finite = num_non_finite
            return numbers
        is_on_cpu = bucket.gradient.device.type == "cpu"
        if type(self._sparsifier).select is MarkingSparsifier.select and not is_on_cpu:
            return self._fill_marked(bucket, shipment)
        runs = self._runs(bucket, by_layer=self._per_layer) if is_threshold and self._keeps_rest else ()
        if runs and goes_native(bucket, shipment, runs):
            if shipment.payload is not None:
                packed = shipment.format, shipment.payload
                shipment.rest = partial(_rest_in_residual, bucket, runs, *packed)
            return take_out_natively(bucket, shipment, runs, self._num_slices, per_layer=self._per_layer)
        if is_threshold and is_on_cpu and shipment.is_masked:
            return self._mask_on_cpu(bucket, shipment)
        if is_threshold and is_on_cpu:
            shipment.is_cleared = shipment.out is bucket.gradient
            sent = self._block_filter.take_out(
                bucket.residual,
                bucket.gradient,
                self._runs(bucket),
                bucket.loss_scale,
                shipment.format.wire,
                clears_gradient=shipment.is_cleared,
            )
        else:
            sent = self._select(bucket, shipment.format.wire)
        if not self._keeps_rest:
            bucket.residual.after.zero_()
        if shipment.payload is None:
            shipment.out.zero_()
            shipment.out[sent.indices] = sent.values
        else:
            shipment.format.fill(shipment.payload, sent)
            capacity = shipment.format.capacity(shipment.payload.numel())
            shipment.rest = lambda: Selection(sent.indices[capacity:], sent.values[capacity:])
        return self._numbers(bucket, sent)

    def _select(self, bucket: BucketGradient, wire: Wire) -> Selection:
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        selected = self._sparsifier.select(compensated, bucket.layout)
        if type(self._sparsifier).select not in (HardThreshold.select, MarkingSparsifier.select):
            selected = in_order(selected, bucket.layout.num_elements)
        selected = without(selected, bucket.unused, bucket.layout.num_elements)
        sent = Selection(selected.indices, wire.rounded(selected.values))
        keep_rest(compensated, *sent)
        return sent

    def _mask_on_cpu(self, bucket: BucketGradient, shipment: Shipment) -> LocalNumbers:
        after, divisor = bucket.residual.after, shipment.format.wire.divisor(shipment.workers.num_workers)
        shipment.is_divided = divisor > 1
        counts = self._block_filter.take_out_masked(
            bucket.residual,
            bucket.gradient,
            self._runs(bucket, by_layer=self._per_layer),
            bucket.loss_scale,
            shipment.format.wire,
            shipment.out,
            divisor=divisor,
        )
        squared_error = 0.0 if self._block_filter.is_zero(after) else squared_norm(after).item()
        non_finite = 0
        if not isfinite(squared_error):
            non_finite = repair(after)
            squared_error = squared_norm(after).item()
        if not self._keeps_rest:
            after.zero_()
            squared_error = 0.0
        numbers = LocalNumbers(sum(counts), non_finite, squared_error)
        if self._per_layer:
            of_errors = layer_errors(after, bucket.layout)
            numbers.of_layers = {"selected": torch.tensor(counts), "squared_error": of_errors}
        return numbers

    def _fill_fused(self, bucket: BucketGradient, shipment: Shipment, measures_gradient: bool) -> Tensor:
        after, runs = bucket.residual.after, self._runs(bucket)
        header = torch.empty(header_fields(bucket.layout, self._per_layer), dtype=torch.float64, device=after.device)
        boundaries = self._boundaries(bucket, has_slices=shipment.payload is not None)
        if shipment.payload is None:
            divisor = shipment.format.wire.divisor(shipment.workers.num_workers)
            shipment.is_divided = divisor > 1
            self._fused.mask(
                bucket.residual,
                bucket.gradient,
                runs,
                loss_scale=bucket.loss_scale,
                out=shipment.out,
                wire=shipment.format.wire,
                divisor=divisor,
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

    def _fill_marked(self, bucket: BucketGradient, shipment: Shipment) -> LocalNumbers:
        """On a GPU, where asking for the indices would make the host wait for their number."""
        assert isinstance(self._sparsifier, MarkingSparsifier)
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        marks = self._sparsifier.mark(compensated, bucket.layout)
        values = self._sparsifier.values(compensated, bucket.layout)
        for start, end in bucket.unused:
            marks[start:end] = False
        non_finite = bucket.residual.after.isfinite().logical_not_().logical_and_(marks).count_nonzero()
        take_out_marked(bucket.residual, marks, values, shipment)
        if not self._keeps_rest:
            bucket.residual.after.zero_()
        after = bucket.residual.after
        numbers = LocalNumbers.after_selection(after, selected=marks.count_nonzero(), non_finite=non_finite)
        boundaries = self._boundaries(bucket, has_slices=True)
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

    def _boundaries(self, bucket: BucketGradient, *, has_slices: bool) -> Boundaries | None:
        has_slices = has_slices and self._num_slices > 0
        if not (self._per_layer or has_slices):
            return None
        key = (bucket.layout, bucket.gradient.device, has_slices)
        if key not in self._known_boundaries:
            layers = bucket.layout.boundaries if self._per_layer else ()
            slices = slice_bounds(bucket.layout.num_elements, self._num_slices) if has_slices else ()
            self._known_boundaries[key] = Boundaries(layers, slices, bucket.gradient.device)
        return self._known_boundaries[key]

    def _numbers(self, bucket: BucketGradient, sent: Selection) -> LocalNumbers:
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

    def _runs(self, bucket: BucketGradient, *, by_layer: bool = False) -> Sequence[ThresholdRun]:
        assert isinstance(self._sparsifier, HardThreshold)
        dtype = bucket.residual.after.dtype
        if not bucket.unused:
            return self._sparsifier.runs(bucket.layout, dtype, by_layer=by_layer)
        # Unused layers are runs of their own with a threshold that nothing reaches: their residuals are finite.
        unused = set(bucket.unused)
        return [
            ThresholdRun(inf, start, end) if (start, end) in unused else ThresholdRun(threshold, start, end)
            for threshold, start, end in self._sparsifier.runs(bucket.layout, dtype, by_layer=True)
        ]


def _rest_in_residual(
    bucket: BucketGradient, runs: Sequence[ThresholdRun], payload_format: PayloadFormat, payload: Tensor
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
    sent = Selection(indices, payload_format.wire.rounded(residual[indices]))
    keep_rest(residual, *sent)
    return sent


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
