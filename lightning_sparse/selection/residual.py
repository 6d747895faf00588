"""Error feedback in one bucket: p = e + g / S before something is sent, and e' = p − out after it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchange.wire import Wire
from lightning_sparse.sparsifiers import LayerLayout, Selection


class Residual(NamedTuple):
    """A bucket's residual on its way through a backward, flat: float32, or float64 where the gradient is.

    Attributes:
        before: e, what is read.
        after: what p = e + g and then e' are formed in; may be the same memory.
    """

    before: Tensor
    after: Tensor


def compensate(residual: Residual, gradient: Tensor, loss_scale: Tensor | None = None) -> Tensor:
    """Returns the compensated gradient p = e + g / S, formed in ``residual.after``.

    Args:
        residual: e; shapes (m,).
        gradient: g of the same bucket in any floating dtype, shape (m,). Not modified.
        loss_scale: S, one element on the same device; None is 1.
    """
    unscaled = gradient if loss_scale is None else gradient.to(residual.before.dtype) / loss_scale
    return torch.add(residual.before, unscaled, out=residual.after)


def sent_and_kept(compensated: Tensor, values: Tensor, wire: Wire) -> tuple[Tensor, Tensor]:
    """Returns what selected coordinates send and what they keep: out and e' = p − out, shapes (k,).

    The rule of a selected value, for tensors. ``sent_and_kept`` in ``kernels/native.c`` and in ``kernels/threshold.py``
    are the same rule with the same bits. Where a value is not finite the residual restarts from 0: infinity minus
    infinity is no number to keep.

    Args:
        compensated: p at the selected coordinates, float32 or float64, shape (k,).
        values: what the sparsifier sends for p, before it is rounded for the wire: p itself or a rounding of p.
        wire: how values travel.
    """
    sent = wire.rounded(values)
    kept = compensated - sent
    return sent, torch.where(kept.isfinite(), kept, 0)


def keep_rest(compensated: Tensor, selected: Selection, wire: Wire) -> Selection:
    """Returns the sent selection, and forms the residual e' = p − out in the compensated gradient's memory.

    Args:
        compensated: p, shape (m,). Becomes e'.
        selected: int64 indices, unique, and what to send for p at those places, shapes (k,).
        wire: how values travel.
    """
    sent, kept = sent_and_kept(compensated.index_select(0, selected.indices), selected.values, wire)
    compensated[selected.indices] = kept
    return Selection(selected.indices, sent)


def rescale(residual: Tensor, layout: LayerLayout, factors: Mapping[str, float]) -> Tensor:
    """Multiplies the residual of each layer by its factor, in place; a layer without one keeps its residual.

    Args:
        residual: e of a bucket, shape (layout.num_elements,).
        layout: its layers.
        factors: a factor per parameter name, for example lr_{t-1} / lr_t (Algorithm 1 of Sahu et al., NeurIPS 2021,
            keeps its residual in units of the learning rate).
    """
    values = [factors.get(name, 1.0) for name in layout.names]
    if values and all(value == values[0] for value in values):
        return residual if values[0] == 1.0 else residual.mul_(values[0])
    for value, (_, start, end) in zip(values, layout.spans(), strict=True):
        if value != 1.0:
            residual[start:end].mul_(value)
    return residual
