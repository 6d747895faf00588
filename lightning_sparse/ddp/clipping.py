"""Clipping of one worker's whole gradient, before anything of it is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.selection.numbers import squared_norm


def clip_gradient(gradients: Sequence[Tensor], max_norm: float, loss_scale: Tensor | None = None) -> None:
    """Scales the gradients in place so that their common norm is at most max_norm, as torch's clip_grad_norm_ does.

    Of a gradient whose norm is no number or infinite nothing is left but what is no number itself. (torch makes NaN of
    all of it, which would be sent, and take with it all that was held back.)

    Args:
        gradients: the parts of one gradient.
        max_norm: in units of the unscaled gradient.
        loss_scale: S by which the gradients are still multiplied; None is 1.
    """
    norm = torch.stack([squared_norm(part) for part in gradients]).sum().sqrt()
    if loss_scale is not None:
        norm = norm / loss_scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
    for part in gradients:
        part.mul_(factor)
