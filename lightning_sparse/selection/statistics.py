"""The statistics of a step: how to combine and log them, and their layout in a header."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import copy_to_device
from lightning_sparse.exchange.routes.reduce_scatter import slice_bounds
from lightning_sparse.sparsifiers.protocol import LayerLayout

NORM_BLOCK = 1024


@dataclass(frozen=True)
class Statistic:
    """How to combine and log a statistic of a step.

    Attributes:
        name: its field in `StepStats`, if it has one.
        is_count: whether it is a whole number.
        in_header: whether every bucket's header holds it. Headers keep the order of the table.
        per_layer: whether it exists for every layer: in ``LayerStats`` and, with ``in_header``, in the header.
        workers: how to combine the headers of all workers. ``"mean"`` is the mean of the workers' sums over buckets.
            None for statistics that no header holds or that only the exchange reads.
        shards: whether to sum it over the ranks of one replica, instead of taking any of their equal values.
        exchanges: whether to sum it over several exchanges that are logged together, instead of taking the last.
        logged: the attribute of `StepStats` that every step logs as ``sparse/<attribute>``; None for no attribute.
    """

    name: str
    is_count: bool = False
    in_header: bool = False
    per_layer: bool = False
    workers: Literal["sum", "mean"] | None = None
    shards: bool = False
    exchanges: bool = False
    logged: str | None = None


def _count(name: str, **columns: Any) -> Statistic:
    return Statistic(name, is_count=True, **columns)


STATISTICS = (
    # The exchange reads the first three from the header (``Largest``).
    _count("selected", in_header=True, per_layer=True, workers="sum", shards=True, exchanges=True, logged="density"),
    _count("largest_slice", in_header=True),
    _count("non_finite", in_header=True, workers="sum", shards=True, exchanges=True),
    Statistic("squared_gradient_norm", in_header=True, workers="mean", shards=True),
    Statistic("squared_error", in_header=True, per_layer=True, workers="mean", shards=True, logged="error_norm"),
    _count("num_elements", per_layer=True, shards=True, exchanges=True),
    _count("payload_bytes", shards=True, exchanges=True, logged="payload_bytes"),
    _count("dense_bytes", shards=True, exchanges=True),
    _count("dense_elements", shards=True, exchanges=True),
    Statistic("threshold", logged="threshold"),
)
"""Every statistic of a step. A new one needs a row here and a field in `StepStats`, with a default because checkpoints
hold `StepStats`. Another combination than sum and mean needs a branch in ``combined``. If headers hold the statistic,
three places measure it: ``Extraction._header`` for tensors, ``native.c`` with ``Extraction._fill_natively``, and
``kernels/threshold.py``. In ``threshold.py``, ``walk_block`` writes a block's statistic if ``_WALK`` names it, and
``summarise`` needs a parameter for the statistic's place in the header and must store it.
"""
HEADER = tuple(statistic for statistic in STATISTICS if statistic.in_header)
LAYER_HEADER = tuple(statistic for statistic in HEADER if statistic.per_layer)
SLOTS = {statistic.name: slot for slot, statistic in enumerate(HEADER)}
"""The position of each statistic in a header."""
FIXED_FIELDS = len(HEADER)
"""Fields of a header before the per-layer fields."""


def header_fields(layout: LayerLayout, per_layer: bool) -> int:
    """Return H, the number of header fields of a bucket."""
    return FIXED_FIELDS + (len(LAYER_HEADER) * len(layout.names) if per_layer else 0)


def combined(rows: Tensor, statistics: Sequence[Statistic], num_workers: int = 1) -> list[Any]:
    """Return a number per column: the sum, divided by ``num_workers`` for a mean over workers.

    Args:
        rows: float64, shape (m, N), on the CPU: headers of ``num_workers`` workers, ranks of a replica, or exchanges.
        statistics: of the N columns.
        num_workers: n; 1 for ranks and exchanges.
    """
    return [
        (int if statistic.is_count else float)(total / num_workers if statistic.workers == "mean" else total)
        for statistic, total in zip(statistics, rows.sum(0).tolist(), strict=True)
    ]


def header_of(device: torch.device, of_layers: Mapping[str, Tensor] | None = None, **values: float | Tensor) -> Tensor:
    """Return a header: float64, shape (H,), on the bucket's device, without a wait for the device.

    Args:
        device: the bucket's device.
        of_layers: the values of ``LAYER_HEADER`` for every layer, by name, shapes (L,); None without per-layer
            statistics.
        **values: the values of ``HEADER`` by name: numbers, or tensors of one element; the others are 0.
    """
    if device.type == "cpu":
        header = torch.tensor([float(values.get(name, 0)) for name in SLOTS], dtype=torch.float64)
    else:
        header = torch.zeros(FIXED_FIELDS, dtype=torch.float64, device=device)
        for name, value in values.items():
            header[SLOTS[name]] = value
    if of_layers is None:
        return header
    return torch.cat([header, *(of_layers[statistic.name].double() for statistic in LAYER_HEADER)])


SMALLEST_SQUARES = 1e-29
"""In float32, a sum of squares below this may have lost some squares to underflow."""


def layer_errors(residual: Tensor, layout: LayerLayout) -> Tensor:
    """Return ‖e‖² of every layer: float64, shape (L,)."""
    parts = [residual[start:end] for _, start, end in layout.spans()]
    if residual.device.type == "cpu":
        return torch.stack([squared_norm(part) for part in parts])
    return torch.stack(torch._foreach_norm(parts)).double().square()  # few kernels for all layers together


def squared_norm(values: Tensor) -> Tensor:
    """Return ‖values‖² as a float64 tensor of one element, without a wait for the device.

    Sums each block in float32 and all blocks in float64: a float32 sum over 11 million values is off by 6e-4 on a CPU,
    and no faster.

    Args:
        values: any floating dtype, shape (m,), contiguous.
    """
    if values.dtype == torch.float64:
        return _sum_of_squares(values, torch.float64)
    squared = _sum_of_squares(values, torch.float32)
    if values.device.type != "cpu" or SMALLEST_SQUARES < float(squared) < inf or not values.any():
        return squared
    return _sum_of_squares(values, torch.float64)  # float32 cannot square these; a CPU needs no synchronisation


def _sum_of_squares(values: Tensor, accumulate_in: torch.dtype) -> Tensor:
    whole = values.numel() // NORM_BLOCK * NORM_BLOCK
    blocks = torch.linalg.vector_norm(values[:whole].view(-1, NORM_BLOCK), dim=1, dtype=accumulate_in)
    rest = torch.linalg.vector_norm(values[whole:], dtype=accumulate_in)
    squared: Tensor = blocks.double().square().sum() + rest.double().square()
    return squared


@lru_cache(maxsize=4096)
def boundaries_of(layout: LayerLayout, num_layers: int, num_slices: int, device: torch.device) -> Tensor | None:
    """Return the boundaries of a bucket's layers and of equal slices: int64, or None if both numbers are 0."""
    layers = layout.boundaries if num_layers else ()
    slices = slice_bounds(layout.num_elements, num_slices) if num_slices else ()
    return copy_to_device(torch.tensor([*layers, *slices]), device) if layers or slices else None
