"""One worker's numbers of one bucket, and the header in which they travel."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from lightning_sparse.exchange import LARGEST_SLICE, NUM_SELECTED
from lightning_sparse.sparsifiers import LayerLayout

SELECTED = NUM_SELECTED
NON_FINITE, SQUARED_GRADIENT_NORM, SQUARED_RESIDUAL_NORM = range(2, 5)
FIXED_FIELDS = 5
"""Fields of a header before the per-layer ones: counts, and squared norms in gradient units squared."""
NORM_BLOCK = 1024


def header_fields(layout: LayerLayout, per_layer: bool) -> int:
    """Returns H, the number of header fields of a bucket."""
    return FIXED_FIELDS + (2 * len(layout.names) if per_layer else 0)


@dataclass
class LocalNumbers:
    """One worker's numbers of one bucket, as numbers or as tensors of one element on the bucket's device.

    Attributes:
        selected: k of this bucket.
        non_finite: NaN and infinite values among them.
        squared_error: ‖e'‖², in gradient units squared.
        largest_slice: the most coordinates in any of the exchange's slices, where it asks for that.
        selected_of_layers: k of every layer, shape (L,), where per-layer numbers are asked for.
        errors_of_layers: ‖e'‖² of every layer, shape (L,), likewise.
    """

    selected: int | Tensor
    non_finite: int | Tensor
    squared_error: float | Tensor
    largest_slice: int | Tensor = 0
    selected_of_layers: Tensor | None = None
    errors_of_layers: Tensor | None = None

    def header(self, squared_gradient_norm: Tensor | None, device: torch.device) -> Tensor:
        """Returns the header: float64, shape (H,), on the device, without a wait for it.

        Args:
            squared_gradient_norm: ‖g‖² of the bucket where it is needed, else None.
            device: the bucket's.
        """
        fixed: list[int | float | Tensor] = [0.0] * FIXED_FIELDS
        fixed[SELECTED], fixed[LARGEST_SLICE] = self.selected, self.largest_slice
        fixed[NON_FINITE], fixed[SQUARED_RESIDUAL_NORM] = self.non_finite, self.squared_error
        fixed[SQUARED_GRADIENT_NORM] = 0.0 if squared_gradient_norm is None else squared_gradient_norm
        if device.type == "cpu":
            header = torch.tensor([float(number) for number in fixed], dtype=torch.float64)
        else:
            header = torch.zeros(FIXED_FIELDS, dtype=torch.float64, device=device)
            for place, number in enumerate(fixed):
                header[place] = number
        if self.selected_of_layers is None or self.errors_of_layers is None:
            return header
        return torch.cat([header, self.selected_of_layers.double(), self.errors_of_layers.double()])


SMALLEST_SQUARES = 1e-29
"""A smaller sum of squares in float32 may have lost some of them."""


def layer_errors(residual: Tensor, layout: LayerLayout) -> Tensor:
    """Returns ‖e‖² of every layer: float64, shape (L,)."""
    if not layout.names:
        return residual.new_zeros(0, dtype=torch.float64)
    parts = [residual[start:end] for _, start, end in layout.spans()]
    if residual.device.type == "cpu":
        return torch.stack([squared_norm(part) for part in parts])
    return torch.stack(torch._foreach_norm(parts)).double().square()  # a few kernels for all layers together


def squared_norm(values: Tensor) -> Tensor:
    """Returns ‖values‖² as a float64 tensor of one element, without a wait for the device.

    Block by block in float32, the blocks in float64: one float32 sum over 11 million values is off by 6e-4 on a CPU,
    and this is as fast.

    Args:
        values: any floating dtype, shape (m,), contiguous.
    """
    if values.dtype == torch.float64:
        return _sum_of_squares(values, torch.float64)
    squared = _sum_of_squares(values, torch.float32)
    if values.device.type != "cpu" or SMALLEST_SQUARES < float(squared) < inf or not values.numel():
        return squared
    # Beyond what float32 can square a CPU, which nobody waits for, looks again.
    lowest, highest = torch.aminmax(values)
    largest = torch.maximum(highest, -lowest).double()
    if largest == 0 or not largest.isfinite():
        return squared
    return _sum_of_squares(values / largest, torch.float32) * largest.square()


def _sum_of_squares(values: Tensor, accumulate_in: torch.dtype) -> Tensor:
    whole = values.numel() // NORM_BLOCK * NORM_BLOCK
    blocks = torch.linalg.vector_norm(values[:whole].view(-1, NORM_BLOCK), dim=1, dtype=accumulate_in)
    rest = torch.linalg.vector_norm(values[whole:], dtype=accumulate_in)
    squared: Tensor = blocks.double().square().sum() + rest.double().square()
    return squared
