"""A flat bucket of named layers on its way through a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.selection.numbers import squared_norm
from lightning_sparse.selection.residual import Residual, compensate
from lightning_sparse.sparsifiers import LayerLayout


@dataclass
class FlatBucket:
    """One bucket on its way through a step.

    Attributes:
        index: its place in the order that all workers keep to.
        layout: its layers.
        gradient: g · S, flat, shape (layout.num_elements,). The average may be formed in its memory.
        residual: e, and where e' is formed; float32, or float64 where the gradient is.
        is_last: whether no bucket of this step comes after it.
        left_out: ``(start, end)`` of layers of which this worker sends nothing.
        loss_scale: S, one element on the same device; None is 1.
        notes: numbers of the caller's own for all workers, float64, on the bucket's device: they ride in the header.
        average: (1/n) Σ_i out_i, once the step is finished, in the residual's dtype; the gradient's memory if it fits.
    """

    index: int
    layout: LayerLayout
    gradient: Tensor
    residual: Residual
    is_last: bool
    left_out: Sequence[tuple[int, int]] = ()
    loss_scale: Tensor | None = None
    notes: Tensor | None = None
    average: Tensor = None  # type: ignore[assignment]  # the engine's to give

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Returns p in memory of its own, 0 where nothing is sent: shape (layout.num_elements,)."""
        before = self.residual.before
        whole = compensate(Residual(before, torch.empty_like(before)), self.gradient, self.loss_scale)
        for start, end in self.left_out:
            whole[start:end] = 0
        return whole.to(dtype)


def clip_norm(buckets: Sequence[FlatBucket], max_norm: float) -> None:
    """Scales the gradients of a whole step in place so that their common norm is at most max_norm.

    As torch's ``clip_grad_norm_``, except that a gradient whose norm is NaN or infinite becomes 0 apart from its own
    NaN. (torch turns all of it into NaN, which would be sent, and the whole residual with it.)

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
