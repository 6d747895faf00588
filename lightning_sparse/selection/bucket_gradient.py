"""What there is of one bucket before anything of it is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.selection.residual import Residual
from lightning_sparse.sparsifiers import LayerLayout


@dataclass(frozen=True)
class BucketGradient:
    """What there is of one bucket before anything is sent.

    Attributes:
        layout: its layers.
        gradient: g · S, shape (m,).
        residual: e, and where e' is formed; float32 or float64, shapes (m,).
        unused: ``(start, end)`` of layers that send nothing in this step.
        loss_scale: S, one element; None is 1.
    """

    layout: LayerLayout
    gradient: Tensor
    residual: Residual
    unused: Sequence[tuple[int, int]]
    loss_scale: Tensor | None
