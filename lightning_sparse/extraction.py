"""Taking what this worker sends out of a bucket: p = e + g / S, the selection, and the rest that stays.

Three ways come to the same bits: the hard threshold has one for CPUs (:mod:`lightning_sparse.block_filter`) and one for
GPUs (:mod:`lightning_sparse.fused_threshold`), every other sparsifier is asked through
:meth:`~lightning_sparse.sparsifiers.Sparsifier.select`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite

import torch
from torch import Tensor

from lightning_sparse.block_filter import BlockFilter, repair
from lightning_sparse.exchange import Shipment, largest_slice
from lightning_sparse.fused_threshold import FusedThreshold, is_available
from lightning_sparse.parameter_use import without
from lightning_sparse.payload import round_to_wire
from lightning_sparse.residual import compensate, keep_rest
from lightning_sparse.sparsifiers import HardThreshold, LayerLayout, Selection, Sparsifier, ThresholdRun
from lightning_sparse.step_stats import LocalNumbers, layer_errors, squared_norm


@dataclass(frozen=True)
class BucketGradient:
    """What there is of one bucket before anything is sent.

    Attributes:
        layout: its layers.
        gradient: g · S, shape (m,).
        residual: e, float32 or float64, shape (m,); becomes e'.
        unused: ``(start, end)`` of layers that send nothing in this step.
        loss_scale: S, one element; None is 1.
    """

    layout: LayerLayout
    gradient: Tensor
    residual: Tensor
    unused: Sequence[tuple[int, int]]
    loss_scale: Tensor | None


@dataclass(frozen=True)
class Extracted:
    """What was taken out of a bucket.

    Attributes:
        numbers: this worker's numbers of the bucket.
        sent: returns what was sent, for taking it back; to be asked only while losses are scaled.
    """

    numbers: LocalNumbers
    sent: Callable[[], Selection]


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

    def fill(self, bucket: BucketGradient, shipment: Shipment) -> Extracted:
        """Forms p in the residual's memory, writes what is sent into the shipment, leaves e' in the residual."""
        # A subclass that selects differently is asked, not bypassed.
        is_threshold = type(self._sparsifier).select is HardThreshold.select
        is_on_cpu = bucket.residual.device.type == "cpu"
        if is_threshold and self._keeps_rest and is_available(bucket.residual.device):
            if shipment.payload is not None:
                return self._take_out_on_gpu(bucket, shipment, shipment.payload)
            if not self._per_layer:
                return self._mask_on_gpu(bucket, shipment)
        if is_threshold and is_on_cpu and shipment.is_masked:
            return self._mask_on_cpu(bucket, shipment)
        if is_threshold and is_on_cpu:
            shipment.is_cleared = shipment.out is bucket.gradient
            sent = self._block_filter.take_out(
                bucket.residual,
                bucket.gradient,
                self._runs(bucket),
                bucket.loss_scale,
                shipment.format.wire_dtype,
                clears_gradient=shipment.is_cleared,
            )
        else:
            sent = self._select(bucket, shipment.format.wire_dtype)
        if not self._keeps_rest:
            bucket.residual.zero_()
        if shipment.payload is None:
            shipment.out.zero_()
            shipment.out[sent.indices] = sent.values
        else:
            shipment.format.fill(shipment.payload, sent)
            capacity = shipment.format.capacity(shipment.payload.numel())
            shipment.rest = lambda: Selection(sent.indices[capacity:], sent.values[capacity:])
        return Extracted(self._numbers(bucket, sent), lambda: sent)

    def _select(self, bucket: BucketGradient, wire_dtype: torch.dtype) -> Selection:
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        selected = self._sparsifier.select(compensated, bucket.layout)
        selected = without(selected, bucket.unused, bucket.layout.num_elements)
        sent = Selection(selected.indices, round_to_wire(selected.values, wire_dtype))
        keep_rest(compensated, *sent)
        return sent

    def _mask_on_cpu(self, bucket: BucketGradient, shipment: Shipment) -> Extracted:
        residual, out = bucket.residual, shipment.out
        runs = self._runs(bucket, by_layer=self._per_layer)
        # While losses are scaled a step may have to be taken back, for which what is sent must stay as it was.
        shipment.is_divided = bucket.loss_scale is None
        counts = self._block_filter.take_out_masked(
            residual,
            bucket.gradient,
            runs,
            bucket.loss_scale,
            shipment.format.wire_dtype,
            out,
            divisor=shipment.workers.num_workers if shipment.is_divided else 1,
        )
        squared_error = 0.0 if self._block_filter.is_zero(residual) else squared_norm(residual).item()
        non_finite = 0
        if not isfinite(squared_error):
            non_finite = repair(residual)
            squared_error = squared_norm(residual).item()
        if not self._keeps_rest:
            residual.zero_()
            squared_error = 0.0
        numbers = LocalNumbers(sum(counts), non_finite, squared_error)
        if self._per_layer:
            numbers.selected_of_layers = torch.tensor(counts)
            numbers.errors_of_layers = layer_errors(residual, bucket.layout)
        sent = out.clone() if bucket.loss_scale is not None else out  # the all-reduce overwrites it
        return Extracted(numbers, lambda: _non_zero(sent))

    def _take_out_on_gpu(self, bucket: BucketGradient, shipment: Shipment, payload: Tensor) -> Extracted:
        residual, payload_format = bucket.residual, shipment.format
        runs = self._runs(bucket)
        _, counts, values, offsets = payload_format.parts(payload)
        fused = self._fused.select(
            residual,
            bucket.gradient,
            runs,
            loss_scale=bucket.loss_scale,
            counts=counts,
            values=values,
            offsets=offsets,
        )
        numbers = LocalNumbers(*fused.unbind())
        if self._num_slices:
            indices = payload_format.unpack_padded(payload, values.dtype).indices
            numbers.largest_slice = largest_slice(indices, residual.numel(), self._num_slices)
        if self._per_layer:
            numbers.selected_of_layers = self._fused.layer_counts(self._boundaries(bucket))
            numbers.errors_of_layers = layer_errors(residual, bucket.layout)

        # From here on the host waits, so only where a payload was too small or a step is taken back.
        def first() -> Selection:
            return payload_format.unpack(payload, residual.dtype, int(counts.sum()))

        @cache
        def rest() -> Selection:
            is_left = torch.zeros(residual.shape, dtype=torch.bool, device=residual.device)
            for threshold, start, end in runs:
                is_left[start:end] = (residual[start:end].abs() < threshold).logical_not_()
            is_left[first().indices] = False  # what rounding left of these may reach λ: it goes in the next step
            indices = is_left.nonzero().squeeze(1)
            sent = Selection(indices, round_to_wire(residual[indices], values.dtype))
            keep_rest(residual, *sent)
            return sent

        def sent() -> Selection:
            if int(counts.sum()) <= values.numel():
                return first()
            return Selection(*(torch.cat(pair) for pair in zip(first(), rest(), strict=True)))

        shipment.rest = rest
        return Extracted(numbers, sent)

    def _mask_on_gpu(self, bucket: BucketGradient, shipment: Shipment) -> Extracted:
        out = shipment.out
        fused = self._fused.mask(
            bucket.residual,
            bucket.gradient,
            self._runs(bucket),
            loss_scale=bucket.loss_scale,
            out=out,
            wire_dtype=shipment.format.wire_dtype,
        )
        sent = out.clone() if bucket.loss_scale is not None else out  # the all-reduce overwrites it
        return Extracted(LocalNumbers(*fused.unbind()), lambda: _non_zero(sent))

    def _boundaries(self, bucket: BucketGradient) -> Tensor:
        return torch.tensor(bucket.layout.boundaries).to(bucket.residual.device, non_blocking=True)

    def _numbers(self, bucket: BucketGradient, sent: Selection) -> LocalNumbers:
        non_finite = sent.values.isfinite().logical_not_().count_nonzero()
        numbers = LocalNumbers(sent.indices.numel(), non_finite, squared_norm(bucket.residual))
        if self._num_slices:
            numbers.largest_slice = largest_slice(sent.indices, bucket.layout.num_elements, self._num_slices)
        if self._per_layer:
            numbers.selected_of_layers = torch.searchsorted(sent.indices, self._boundaries(bucket)).diff()
            numbers.errors_of_layers = layer_errors(bucket.residual, bucket.layout)
        return numbers

    def _runs(self, bucket: BucketGradient, *, by_layer: bool = False) -> Sequence[ThresholdRun]:
        assert isinstance(self._sparsifier, HardThreshold)
        dtype = bucket.residual.dtype
        if not bucket.unused:
            return self._sparsifier.runs(bucket.layout, dtype, by_layer=by_layer)
        # Unused layers are runs of their own with a threshold that nothing reaches: their residuals are finite.
        unused = set(bucket.unused)
        return [
            ThresholdRun(inf, start, end) if (start, end) in unused else ThresholdRun(threshold, start, end)
            for threshold, start, end in self._sparsifier.runs(bucket.layout, dtype, by_layer=True)
        ]


def _non_zero(masked: Tensor) -> Selection:
    indices = masked.nonzero().squeeze(1)
    return Selection(indices, masked[indices])
