"""The numbers of a step: what every worker reports in its header, and what follows from all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from lightning_sparse.exchange import LARGEST_SLICE, NUM_SELECTED
from lightning_sparse.sparsifiers import LayerLayout

SELECTED = NUM_SELECTED
NON_FINITE, SQUARED_GRADIENT_NORM, SQUARED_RESIDUAL_NORM = range(2, 5)
FIXED_FIELDS = 5
"""Fields of a header before the per-layer ones: counts, and squared norms in gradient units squared."""
NORM_BLOCK = 1024


@dataclass(frozen=True)
class LayerStats:
    """The numbers of one layer in one step, averaged over the workers.

    Attributes:
        num_elements: elements of the layer.
        selected: Σ_i k_i of this layer.
        density: (1/n) Σ_i k_i / num_elements, in 0…1.
        squared_error: (1/n) Σ_i ‖e_i‖² of this layer after the step, in gradient units squared.
    """

    num_elements: int
    selected: int
    density: float
    squared_error: float


@dataclass(frozen=True)
class StepStats:
    """The numbers of one exchange of all gradients, the same on every worker.

    Attributes:
        step: how many exchanges came before this one.
        num_workers: n.
        num_elements: d, the elements of all exchanged parameters.
        selected: Σ_i k_i over all workers.
        squared_error: (1/n) Σ_i ‖e_i‖² after the step, in gradient units squared.
        squared_gradient_norm: (1/n) Σ_i ‖g_i‖² of the unscaled gradients; 0 when no calibration asked for it.
        non_finite: NaN and infinite values sent by all workers together.
        payload_bytes: bytes that one worker handed to collectives in this step.
        dense_bytes: bytes of the gradient itself, which plain DDP hands to its all-reduce.
        threshold: λ in gradient units, None for a sparsifier without one.
        layers: per parameter name, if per-layer numbers were asked for; else empty.
    """

    step: int
    num_workers: int
    num_elements: int
    selected: int
    squared_error: float
    squared_gradient_norm: float
    non_finite: int
    payload_bytes: int
    dense_bytes: int
    threshold: float | None = None
    layers: dict[str, LayerStats] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """(1/n) Σ_i k_i / d, in 0…1."""
        return self.selected / (self.num_workers * self.num_elements) if self.num_elements else 0.0

    @property
    def error_norm(self) -> float:
        """sqrt((1/n) Σ_i ‖e_i‖²) after the step, in gradient units."""
        return sqrt(self.squared_error)


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


def layer_errors(residual: Tensor, layout: LayerLayout) -> Tensor:
    """Returns ‖e‖² of every layer: float64, shape (L,)."""
    if not layout.names:
        return residual.new_zeros(0, dtype=torch.float64)
    return torch.stack([squared_norm(residual[start:end]) for _, start, end in layout.spans()])


def squared_norm(values: Tensor) -> Tensor:
    """Returns ‖values‖² as a float64 tensor of one element, without a wait for the device.

    Block by block in float32, the blocks in float64: one float32 sum over 11 million values is off by 6e-4 on a CPU,
    and this is as fast.

    Args:
        values: any floating dtype, shape (m,), contiguous.
    """
    accumulate_in = torch.float64 if values.dtype == torch.float64 else torch.float32
    whole = values.numel() // NORM_BLOCK * NORM_BLOCK
    blocks = torch.linalg.vector_norm(values[:whole].view(-1, NORM_BLOCK), dim=1, dtype=accumulate_in)
    rest = torch.linalg.vector_norm(values[whole:], dtype=accumulate_in)
    squared: Tensor = blocks.double().square().sum() + rest.double().square()
    return squared


def step_stats(
    step: int,
    layouts: Sequence[LayerLayout],
    headers: Sequence[Tensor],
    *,
    payload_bytes: int,
    dense_bytes: int,
    threshold: float | None,
) -> StepStats:
    """Returns the numbers of a step from the headers of its buckets.

    Args:
        step: how many exchanges came before.
        layouts: the layout of each bucket.
        headers: for each bucket all workers' headers, on the CPU: float64, shape (n, H).
        payload_bytes: bytes that this worker handed to collectives.
        dense_bytes: bytes of the gradient.
        threshold: λ in force.
    """
    num_workers = headers[0].shape[0]
    totals = torch.stack([header[:, :FIXED_FIELDS] for header in headers]).sum(dim=(0, 1)).tolist()
    layers: dict[str, LayerStats] = {}
    for layout, header in zip(layouts, headers, strict=True):
        if header.shape[1] > FIXED_FIELDS:
            selected, errors = header[:, FIXED_FIELDS:].sum(0).view(2, len(layout.names))
            for name, size, count, error in zip(
                layout.names, layout.sizes, selected.tolist(), errors.tolist(), strict=True
            ):
                density = count / (num_workers * size) if size else 0.0
                layers[name] = LayerStats(size, int(count), density, error / num_workers)
    return StepStats(
        step=step,
        num_workers=num_workers,
        num_elements=sum(layout.num_elements for layout in layouts),
        selected=int(totals[SELECTED]),
        squared_error=totals[SQUARED_RESIDUAL_NORM] / num_workers,
        squared_gradient_norm=totals[SQUARED_GRADIENT_NORM] / num_workers,
        non_finite=int(totals[NON_FINITE]),
        payload_bytes=payload_bytes,
        dense_bytes=dense_bytes,
        threshold=threshold,
        layers=layers,
    )
