"""A flat bucket of named layers with its error feedback: p = e + g / S and e' = p − out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchange.payload import BLOCK_ELEMENTS
from lightning_sparse.exchange.routes.adding import native_payloads
from lightning_sparse.exchange.routes.transfer import Rows, Transfer
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels.native import Parts, subtract
from lightning_sparse.selection.statistics import squared_norm
from lightning_sparse.sparsifiers.hard_threshold import ThresholdRun
from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection


class Residual(NamedTuple):
    """A bucket's residual in a backward, flat: float32, or float64 if the gradient is.

    Attributes:
        before: e, which is read.
        after: receives p = e + g / S and then e'; may be the same memory.
        is_zero: whether both are known to hold zeros.
    """

    before: Tensor
    after: Tensor
    is_zero: bool = False


@dataclass
class FlatBucket:
    """A bucket in a step.

    Attributes:
        index: its position, the same on all workers.
        layout: its layers.
        gradient: g · S, flat, shape (layout.num_elements,). The average may be formed in its memory.
        residual: e, and where e' is formed; float32, or float64 where the gradient is.
        is_last: whether this is the last bucket of the step.
        left_out: ``(start, end)`` of layers of which this worker sends only non-finite values.
        loss_scale: S, one element on the same device; None is 1.
        notes: the caller's numbers for all workers, float64, on the bucket's device; sent in the header.
        average: the average of out over the workers after the step, in the residual's dtype; ``gradient`` itself if
            their dtypes are equal.
        weights: w, if compiled functions compute the drift p = x − w while they select, with x = ``residual.before``.
            Then w becomes x − e', ``notes[0]`` receives max |p|, and ``gradient`` only holds the average.
        has_moved: whether the average has already moved x and w, without a tensor for the average.
    """

    index: int
    layout: LayerLayout
    gradient: Tensor
    residual: Residual
    is_last: bool
    left_out: Sequence[tuple[int, int]] = ()
    loss_scale: Tensor | None = None
    notes: Tensor | None = None
    average: Tensor = None  # type: ignore[assignment]  # the engine sets it
    weights: Parts | None = None
    has_moved: bool = False

    def form(self) -> None:
        """Do nothing. Drifts override it: without compiled functions, they must be computed before a selection."""

    def move(self, transfer: Transfer, rows: Rows) -> None:
        """Move x and w by the average of all workers' payloads, without a tensor for the average."""
        assert self.weights is not None
        anchor = self.residual.before
        zeros = transfer.buffers.take("zeros", BLOCK_ELEMENTS, anchor.dtype, anchor.device).zero_()
        subtract(native_payloads(transfer.format, rows, transfer.by_senders), anchor, self.weights, zeros)
        self.has_moved = True

    def pieces(self, run: ThresholdRun) -> list[ThresholdRun]:
        """Return the pieces of a run; left-out pieces have an infinite threshold.

        An infinite threshold selects only values that are not finite.
        """
        if not self.left_out:
            return [run]
        inside = {min(max(bound, run.start), run.end) for span in self.left_out for bound in span}
        pieces = []
        for start, end in pairwise(sorted({run.start, run.end, *inside})):
            is_left_out = any(first <= start < last for first, last in self.left_out)
            pieces.append(ThresholdRun(inf, start, end) if is_left_out else run._replace(start=start, end=end))
        return pieces

    def compensated(self) -> Tensor:
        """Return a new tensor with p, and 0 for left-out layers: shape (layout.num_elements,)."""
        before = self.residual.before
        compensated = compensate(Residual(before, torch.empty_like(before)), self.gradient, self.loss_scale)
        for start, end in self.left_out:
            compensated[start:end] = 0
        return compensated


def compensate(residual: Residual, gradient: Tensor, loss_scale: Tensor | None = None) -> Tensor:
    """Return the compensated gradient p = e + g / S, formed in ``residual.after``.

    Args:
        residual: e; shapes (m,).
        gradient: g of the same bucket in any floating dtype, shape (m,). Not modified.
        loss_scale: S, one element on the same device; None is 1.
    """
    unscaled = gradient if loss_scale is None else gradient.to(residual.before.dtype) / loss_scale
    return torch.add(residual.before, unscaled, out=residual.after)


def require_unchanged(compensated: Tensor, version: int) -> None:
    """Raise ValueError if p was changed in place since it had this version."""
    if compensated._version != version:
        raise ValueError("A sparsifier changed the compensated gradient in place. Select from a copy.")


def sent_and_kept(compensated: Tensor, values: Tensor, wire: Wire) -> tuple[Tensor, Tensor]:
    """Return out and e' = p − out of selected coordinates, shapes (k,).

    ``sent_and_kept`` in ``kernels/native.c`` and in ``kernels/values.py`` give the same bits. A value that is not
    finite leaves a residual of 0.

    Args:
        compensated: p at the selected coordinates, float32 or float64, shape (k,).
        values: p, or the value that the sparsifier sends for p, before rounding for the wire.
        wire: how values are rounded.
    """
    sent = wire.rounded(values)
    kept = compensated - sent
    return sent, torch.where(kept.isfinite(), kept, 0)


def keep_residual(compensated: Tensor, selected: Selection, wire: Wire) -> Selection:
    """Return the sent selection, and form e' = p − out in the memory of p.

    Args:
        compensated: p, shape (m,). Becomes e'.
        selected: unique indices, and the values to send there before they are rounded for the wire, shapes (k,).
        wire: how values are rounded.
    """
    sent, kept = sent_and_kept(compensated.index_select(0, selected.indices), selected.values, wire)
    compensated[selected.indices] = kept
    return Selection(selected.indices, sent)


def clip_norm(buckets: Sequence[FlatBucket], max_norm: float) -> None:
    """Clip a whole step's gradients in place to a common norm.

    Equals torch's ``clip_grad_norm_``, except for a NaN norm: finite values become 0, others NaN. torch would turn the
    whole gradient into NaN, which would be sent together with the residual.

    Args:
        buckets: of one step, with the same loss scale.
        max_norm: in units of the unscaled gradient.
    """
    norm = torch.stack([squared_norm(bucket.gradient) for bucket in buckets]).sum().sqrt()
    if buckets[0].loss_scale is not None:
        norm = norm / buckets[0].loss_scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
    for bucket in buckets:
        bucket.gradient.mul_(factor)
