"""Extracts this worker's sent values from a bucket and keeps the rest.

Several implementations give the same bits. The hard threshold has compiled functions on CPUs and ``fused_threshold`` on
GPUs. On GPUs and on dense routes, a ``MarkingSparsifier`` returns a mask. In all other cases `Sparsifier.select`
returns indices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes.reduce_scatter import ReduceScatterTransfer, slice_elements
from lightning_sparse.exchange.routes.transfer import Transfer
from lightning_sparse.kernels.launching import is_available
from lightning_sparse.kernels.native import WIRES, Task, is_native, pointer, take_out
from lightning_sparse.selection.bucket import FlatBucket, compensate, keep_residual, require_unchanged, sent_and_kept
from lightning_sparse.selection.fused_threshold import take_out_fused
from lightning_sparse.selection.sparse_sums import keep_small_sums, put_back
from lightning_sparse.selection.statistics import (
    FIXED_FIELDS,
    SLOTS,
    boundaries_of,
    header_fields,
    header_of,
    layer_errors,
    squared_norm,
)
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold, ThresholdRun, exceed
from lightning_sparse.sparsifiers.protocol import MarkingSparsifier, Selection, Sparsifier, in_order, require_marks


class Extraction:
    """Takes a sparsifier's selection out of buckets and fills their transfers.

    Args:
        sparsifier: selects the sent values.
        num_slices: number of equal slices whose coordinates are counted for the exchange; 0 for none.
        per_layer: whether to report numbers of every layer.
    """

    def __init__(self, sparsifier: Sparsifier, *, num_slices: int, per_layer: bool) -> None:
        self._sparsifier = sparsifier
        self._num_slices = num_slices
        self._per_layer = per_layer
        self._selects_by_mask = type(sparsifier).select is MarkingSparsifier.select
        # A subclass of HardThreshold may select differently: the fast path needs these methods unchanged.
        self._selects_by_threshold = all(
            getattr(sparsifier.__class__, method, None) is getattr(HardThreshold, method)
            for method in ("select", "mark", "values")
        )

    def fill(self, bucket: FlatBucket, transfer: Transfer, *, measures_gradient: bool = False) -> Tensor:
        """Compute p, write sent values into the transfer, leave e' in the residual and return the header.

        Args:
            bucket: residual and gradient.
            transfer: receives the sent values.
            measures_gradient: whether the header holds ‖g‖².

        Returns:
            float64, shape (``header_fields``,), on the bucket's device.
        """
        wire = transfer.format.wire
        keeps_sums = False
        if isinstance(transfer, ReduceScatterTransfer) and transfer.thresholds_sums:
            keeps_sums = True
            transfer.keep_sums = partial(keep_small_sums, bucket, transfer, self._runs(bucket))
            transfer.put_back = partial(put_back, bucket.residual.after)
            bucket = replace(bucket, left_out=[*bucket.left_out, transfer.own_slice])
        can_fuse = self._selects_by_threshold and not wire.is_integer
        uses_triton = can_fuse and is_available(bucket.gradient.device)
        uses_c = can_fuse and not uses_triton and is_native(bucket.residual.after, wire_dtype=wire.dtype)
        if bucket.weights is not None and not uses_c:
            bucket.form()
        if (uses_triton or uses_c) and transfer.payload is not None:
            transfer.overflow = partial(self._take_overflow, bucket, transfer.format, transfer.payload)
        squared_gradient_norm: float | Tensor = 0.0
        if measures_gradient:
            gradient = bucket.gradient if bucket.weights is None else bucket.compensated()
            squared_gradient_norm = squared_norm(gradient)
            if bucket.loss_scale is not None:
                squared_gradient_norm /= bucket.loss_scale.double().square().view(())
        if uses_triton:
            header = self._fill_fused(bucket, transfer)
        elif uses_c:
            header = self._fill_natively(bucket, transfer)
        elif self._selects_by_mask and (transfer.payload is None or bucket.gradient.device.type != "cpu"):
            header = self._fill_marked(bucket, transfer)
        else:
            header = self._fill_selected(bucket, transfer)
        if measures_gradient:
            header[SLOTS["squared_gradient_norm"]] = squared_gradient_norm
        if keeps_sums:
            if not uses_triton and not uses_c:
                put_back(bucket.residual.after, transfer.overflow())
            if not uses_c or header[SLOTS["non_finite"]]:
                bucket.residual.after.nan_to_num_(0.0, 0.0, 0.0)  # non-finite values beyond the capacity
        return header

    def _fill_fused(self, bucket: FlatBucket, transfer: Transfer) -> Tensor:
        after, runs = bucket.residual.after, self._pieces(bucket)
        header = torch.empty(header_fields(bucket.layout, self._per_layer), dtype=torch.float64, device=after.device)
        if transfer.payload is not None:
            transfer.is_cleared = transfer.out is bucket.gradient
        take_out_fused(bucket, transfer, runs, header, *self._counted(bucket, transfer))
        if self._per_layer:
            # The kernels write the selected coordinates of each layer, which precede the errors.
            header[FIXED_FIELDS + len(bucket.layout.names) :] = layer_errors(after, bucket.layout)
        return header

    def _fill_natively(self, bucket: FlatBucket, transfer: Transfer) -> Tensor:
        """Fill by compiled functions in one pass over memory.

        Moves 12 bytes per element of a gradient, or 16 if it is cleared or masked. A drift moves 8, or 16 if it is
        masked, and leaves x − e' in the weights. A residual of zeros stays unread and unwritten if a dense route sends
        all values unrounded: 8 bytes.
        """
        (before, after, is_zero), gradient, weights = bucket.residual, bucket.gradient, bucket.weights
        wire = transfer.format.wire
        task = Task(wire=WIRES[wire.dtype], scale=wire.scale, divisor=transfer.divisor)
        task.loss_scale = 1.0 if bucket.loss_scale is None else float(bucket.loss_scale)
        sends_unrounded = transfer.payload is None and wire.dtype == before.dtype
        stays_zero = is_zero and sends_unrounded and not any(piece.threshold for piece in self._pieces(bucket))
        written = [transfer.out]
        if weights is not None:
            task.before = pointer(before)
            task.parts, task.part_ends = weights.addresses
            written += weights.tensors
        else:
            if gradient.dtype != transfer.out.dtype:  # the average then has separate memory
                gradient = transfer.out.copy_(gradient)
            task.gradient = pointer(gradient)
            if not stays_zero:
                task.before, task.after = pointer(before), pointer(after)
                written.append(after)
        slices = torch.zeros(self._num_slices, dtype=torch.int64) if self._num_slices else None
        if transfer.payload is None:
            task.dense = pointer(transfer.out)
        else:
            task.clears = transfer.is_cleared = weights is None and transfer.out is gradient
            address, task.capacity = pointer(transfer.payload), transfer.format.capacity(transfer.payload.numel())
            starts = transfer.format.starts(task.capacity)
            task.ends, task.values, task.offsets = (address + start for start in starts)
            if slices is not None:
                task.slices = pointer(slices)
                task.slice_elements = max(slice_elements(bucket.layout.num_elements, self._num_slices), 1)
        counts, errors = [0], []
        for run in self._runs(bucket, by_layer=self._per_layer):
            task.squares = 0.0
            for piece in bucket.pieces(run):
                take_out(task, *piece)
            counts.append(task.selected)
            errors.append(task.squares)
        torch.autograd.graph.increment_version(written)
        if weights is not None:
            assert bucket.notes is not None
            bucket.notes[0] = task.largest
            if not self._sparsifier.needs_averages:
                transfer.take_payloads = bucket.move
        of_layers = None
        if self._per_layer:
            of_errors = torch.tensor(errors, dtype=torch.float64)
            of_layers = {"selected": torch.tensor(counts).diff(), "squared_error": of_errors}
        return header_of(
            gradient.device,
            of_layers,
            selected=task.selected,
            non_finite=task.non_finite,
            squared_error=sum(errors),
            largest_slice=0 if slices is None else slices.amax(),
        )

    def _fill_marked(self, bucket: FlatBucket, transfer: Transfer) -> Tensor:
        """Fill by a mask, because indices would synchronise with the device."""
        assert isinstance(self._sparsifier, MarkingSparsifier)
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        version = compensated._version
        marks = require_marks(self._sparsifier.mark(compensated, bucket.layout), compensated)
        for start, end in bucket.left_out:
            marks[start:end] = compensated[start:end].isfinite().logical_not_()
        values = self._sparsifier.values(compensated, bucket.layout)
        require_unchanged(compensated, version)
        non_finite = compensated.isfinite().logical_not_().logical_and_(marks).count_nonzero()
        sent, kept = sent_and_kept(compensated, values, transfer.format.wire)
        sent = torch.where(marks, sent, 0)  # a copy, because the values may be p, whose memory becomes e'
        torch.where(marks, kept, compensated, out=compensated)
        if transfer.payload is None:
            torch.div(sent, transfer.divisor, out=transfer.out)
        else:
            transfer.format.fill_marked(transfer.payload, marks, sent)
            capacity = transfer.format.capacity(transfer.payload.numel())

            def overflow() -> Selection:
                indices = marks.nonzero().squeeze(1)[capacity:]
                return Selection(indices, sent[indices])

            transfer.overflow = overflow

        def count_before(positions: Tensor) -> Tensor:
            return torch.nn.functional.pad(marks.cumsum(0), (1, 0)).index_select(0, positions)

        return self._header(bucket, transfer, marks.count_nonzero(), non_finite, count_before)

    def _fill_selected(self, bucket: FlatBucket, transfer: Transfer) -> Tensor:
        compensated = compensate(bucket.residual, bucket.gradient, bucket.loss_scale)
        version = compensated._version
        selected = self._sparsifier.select(compensated, bucket.layout)
        require_unchanged(compensated, version)
        if not self._selects_by_mask:
            selected = in_order(selected, bucket.layout.num_elements, compensated.dtype)
        if bucket.left_out:
            used = torch.ones_like(compensated, dtype=torch.bool)
            for start, end in bucket.left_out:
                used[start:end] = compensated[start:end].isfinite().logical_not_()
            selected = Selection(*(part[used[selected.indices]] for part in selected))
        sent = keep_residual(compensated, selected, transfer.format.wire)
        if transfer.payload is None:
            transfer.out.zero_()
            transfer.out[sent.indices] = sent.values / transfer.divisor
        else:
            transfer.format.fill(transfer.payload, sent)
            capacity = transfer.format.capacity(transfer.payload.numel())
            transfer.overflow = lambda: Selection(sent.indices[capacity:], sent.values[capacity:])
        non_finite = sent.values.isfinite().logical_not_().count_nonzero()
        count_before = partial(torch.searchsorted, sent.indices)
        return self._header(bucket, transfer, sent.indices.numel(), non_finite, count_before)

    def _take_overflow(self, bucket: FlatBucket, payload_format: PayloadFormat, payload: Tensor) -> Selection:
        """Take the values beyond a payload's capacity out of the residual or the weights. Waits for a GPU."""
        anchor, residual, _ = bucket.residual
        if bucket.weights is not None:
            residual = bucket.compensated()
        first = payload_format.unpack(payload, residual.dtype)
        # Overflow starts after the payload's last coordinate. Earlier values of at least λ are what rounding left.
        begin = int(first.indices[-1]) + 1 if first.indices.numel() else 0
        selections = [Selection(first.indices[:0], residual[:0])]
        for threshold, start, end, excess in self._pieces(bucket):
            if end > begin:  # a range, because the whole bucket takes many times as long
                position = max(start, begin)
                part = residual[position:end]
                indices = (part.abs() < threshold).logical_not_().nonzero().squeeze(1)
                selections.append(Selection(indices + position, exceed(part[indices], excess)))
        selection = Selection(*map(torch.cat, zip(*selections, strict=True)))
        overflow = keep_residual(residual, selection, payload_format.wire)
        if bucket.weights is not None:
            bucket.weights.put(overflow.indices, (anchor - residual)[overflow.indices])
        return overflow

    def _header(
        self,
        bucket: FlatBucket,
        transfer: Transfer,
        selected: int | Tensor,
        non_finite: Tensor,
        count_before: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the header of a bucket with computed e'; ``count_before`` counts coordinates before positions."""
        after = bucket.residual.after
        numbers = {"selected": selected, "non_finite": non_finite, "squared_error": squared_norm(after)}
        of_layers = None
        boundaries, num_layers, num_slices = self._counted(bucket, transfer)
        if boundaries is not None:
            before = count_before(boundaries)
            if num_slices:
                numbers["largest_slice"] = before[-num_slices - 1 :].diff().amax()
            if num_layers:
                counts = before[: num_layers + 1].diff()
                of_layers = {"selected": counts, "squared_error": layer_errors(after, bucket.layout)}
        return header_of(after.device, of_layers, **numbers)

    def _counted(self, bucket: FlatBucket, transfer: Transfer) -> tuple[Tensor | None, int, int]:
        """Return boundaries of the layers and slices whose coordinates are counted, and the number of each."""
        num_layers = len(bucket.layout.names) if self._per_layer else 0
        num_slices = 0 if transfer.payload is None else self._num_slices
        return boundaries_of(bucket.layout, num_layers, num_slices, bucket.gradient.device), num_layers, num_slices

    def _pieces(self, bucket: FlatBucket) -> list[ThresholdRun]:
        return [piece for run in self._runs(bucket) for piece in bucket.pieces(run)]

    def _runs(self, bucket: FlatBucket, *, by_layer: bool = False) -> Sequence[ThresholdRun]:
        assert isinstance(self._sparsifier, HardThreshold)
        return self._sparsifier.runs(bucket.layout, bucket.residual.after.dtype, by_layer=by_layer)
