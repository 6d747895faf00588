"""The hard-threshold step of one bucket in three GPU kernels, without a wait for the device.

The same bits as ``compensate``, ``HardThreshold.select``, ``keep_rest`` and ``PayloadFormat.fill`` one after the other,
with nearly all memory traffic in one pass: 12 bytes an element where the gradient is float32, 10
where it is bfloat16, 4 or 2 more where the gradient is cleared for the average, and some 100 bytes for each coordinate
of a sparse selection.

1. ``walk_block`` forms p where e' is to be, and marks what is selected with one bit an element.
2. ``summarise`` adds up what all blocks have: where in the payload each one's coordinates begin, and the header.
3. ``pack_block`` writes values and offsets there and keeps the rest.

One program has one block of 8,192 elements, an eighth of the payload's: of a bucket of 25 MB there are 800, of one of
1 MB 32. On 132 multiprocessors that hold two such programs each, that is three rounds, and a quarter of one; with the
payload's own 65,536 it would be less than half a round and 4 programs, each eight times as long. No two programs write
to one place: coordinates ascend without a sort, and there is no atomic addition whose order could make two runs differ.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import let_go, without_wait
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS as ELEMENTS_PER_END
from lightning_sparse.exchange.payload import PayloadParts
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import launch, tl
from lightning_sparse.kernels.threshold import pack_block, summarise, walk_block
from lightning_sparse.selection.numbers import FIXED_FIELDS, SLOTS
from lightning_sparse.selection.residual import Residual

Run = tuple[float, int, int]
"""λ, exact in the residual's dtype, the first element for which it holds, and the one after the last."""

BLOCK_ELEMENTS = 8192
PER_END = ELEMENTS_PER_END // BLOCK_ELEMENTS
ALIGNED_BYTES = 16
"""What a thread reads and writes at once where it can, as Triton sees from the pointer. Memory of torch's begins so."""
# 512 threads with 8 elements each need some 50 registers: two programs fit a multiprocessor of an H100 or H200. Without
# fusing, a multiplication and an addition round twice, as in PyTorch.
_WALK = {"BLOCK": BLOCK_ELEMENTS, "WORDS": 128, "num_warps": 16, "enable_fp_fusion": False}
_SUMMARISE = {"BLOCK": BLOCK_ELEMENTS, "PER_END": PER_END, "WIDTH": 2048, "ROWS": 16, "num_warps": 8}
# The marks, not the numbers of blocks, tell how many coordinates are selected in a bucket and its slices.
_SLOTS = {name.upper(): slot for name, slot in SLOTS.items()}
_WALK |= {name: slot for name, slot in _SLOTS.items() if name not in ("SELECTED", "LARGEST_SLICE")}
_SUMMARISE |= _SLOTS | {"FIXED_FIELDS": FIXED_FIELDS}
_PACK = {"BLOCK": BLOCK_ELEMENTS, "PER_END": PER_END, "num_warps": 4, "enable_fp_fusion": False}


class Boundaries:
    """Where the layers of a bucket begin and end of which numbers are asked for, and slices, on its device.

    Args:
        layers: ascending from 0 to m; empty for none.
        slices: likewise.
        device: the bucket's.
    """

    def __init__(self, layers: Sequence[int], slices: Sequence[int], device: torch.device) -> None:
        self.num_layers, self.num_slices = (max(len(places) - 1, 0) for places in (layers, slices))
        # From a list the first step waits for the copy, and no other.
        self.places = torch.tensor([*layers, *slices], dtype=torch.int64).to(device) if layers or slices else None


class FusedThreshold:
    """Launches the kernels and owns their work space: 1 bit an element of the largest bucket, 52 bytes a block.

    All buckets share the space, which is safe as long as they are worked on in one stream.
    """

    def __init__(self) -> None:
        self._space: dict[str, Tensor] = {}

    def select(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        *,
        loss_scale: Tensor | None,
        payload: PayloadParts,
        header: Tensor,
        wire: Wire,
        boundaries: Boundaries | None = None,
        clears_gradient: bool = False,
        measures_gradient: bool = False,
    ) -> None:
        """Selects the coordinates with not (abs(p) < λ), p = e + g / S, writes them into a payload and keeps the rest.

        Coordinates are written in ascending order until the payload is full. One that finds no room stays in the
        residual as p, to be sent another way, but all numbers are those after it has been sent. Room that is left
        over is not written to.

        Args:
            residual: e, and where e' is formed: float32 or float64, shapes (m,), contiguous.
            gradient: g in any floating dtype, shape (m,), contiguous.
            runs: neighbouring runs that together cover the bucket.
            loss_scale: S, one element on the same device; None is 1.
            payload: ends, which count what is written and what is not; values, rounded to their dtype; and offsets. Its
                own header is left as it is.
            header: float64, shape (FIXED_FIELDS + layers,) or more: becomes the numbers of the step, of each layer how
                many coordinates are selected. What is beyond is left as it is.
            wire: how values are rounded and written.
            boundaries: of the layers and slices that are counted.
            clears_gradient: whether to leave zeros in the gradient, which else is not modified.
            measures_gradient: whether the header tells ‖g‖², else 0.

        Raises:
            ValueError: runs that do not cover the bucket, shapes that do not match, a tensor that is not contiguous.
        """
        size, blocks = residual.after.numel(), -(-residual.after.numel() // BLOCK_ELEMENTS)
        _, ends, values, offsets = payload
        _check_flat(-(-size // ELEMENTS_PER_END), ends=ends)
        _check_flat(values.numel(), values=values, offsets=offsets)
        device = residual.after.device
        bits = self._reserve("bits", blocks * BLOCK_ELEMENTS // 32, torch.int32, device)
        # The zeros follow from nothing that the kernel read. Where the gradient is not aligned, threads read other
        # elements than they write, and one could clear what another has yet to read.
        clears = clears_gradient and gradient.storage_offset() * gradient.element_size() % ALIGNED_BYTES == 0
        constants = _wire(wire) | {"CLEARS": clears, "MEASURES": measures_gradient}
        self._walk(residual, gradient, runs, loss_scale, bits, None, 1, wire.scale, constants)
        if clears_gradient and not clears:
            gradient.zero_()
        starts = self._summarise(size, bits, boundaries, ends, header, measures_gradient)
        if size:
            packed = (residual.after, bits, starts, values, offsets, size, values.numel(), wire.scale)
            launch(pack_block, blocks, *packed, LIMIT=wire.limit, **_PACK)

    def mask(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        *,
        loss_scale: Tensor | None,
        out: Tensor,
        wire: Wire,
        header: Tensor,
        divisor: int = 1,
        boundaries: Boundaries | None = None,
        measures_gradient: bool = False,
    ) -> None:
        """Selects as ``select`` does, but into a dense tensor with zeros between the rounded values. Two kernels.

        Args:
            residual: as for ``select``.
            gradient: as for ``select``; it may be ``out`` as well.
            runs: as for ``select``.
            loss_scale: as for ``select``.
            out: shape (m,), contiguous, in a dtype that holds all that travels. Overwritten.
            wire: how values are rounded.
            divisor: by which they are divided then; the residual is not concerned.
            header: as for ``select``.
            boundaries: as for ``select``.
            measures_gradient: as for ``select``.
        """
        size, blocks = residual.after.numel(), -(-residual.after.numel() // BLOCK_ELEMENTS)
        _check_flat(size, out=out)
        bits = None
        if boundaries is not None:
            bits = self._reserve("bits", blocks * BLOCK_ELEMENTS // 32, torch.int32, residual.after.device)
        constants = _wire(wire) | {"CLEARS": False, "MEASURES": measures_gradient}
        self._walk(residual, gradient, runs, loss_scale, bits, out, divisor, wire.scale, constants)
        self._summarise(size, bits, boundaries, None, header, measures_gradient)

    def _walk(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        loss_scale: Tensor | None,
        bits: Tensor | None,
        out: Tensor | None,
        divisor: int,
        scale: float,
        constants: dict[str, object],
    ) -> None:
        before, after = residual
        size, blocks = after.numel(), -(-after.numel() // BLOCK_ELEMENTS)
        _check_flat(size, residual=before, new_residual=after, gradient=gradient)
        tables = _threshold_tables(tuple(runs), size, after.dtype, after.device) if size else (None, None, None)
        counts = self._reserve("counts", blocks, torch.int32, after.device)
        numbers = self._reserve("numbers", FIXED_FIELDS * blocks, torch.float64, after.device)
        if size:
            inputs = (before, after, gradient, loss_scale, *tables)
            launch(walk_block, blocks, *inputs, bits, counts, out, numbers, size, divisor, scale, **constants, **_WALK)

    def _summarise(
        self,
        size: int,
        bits: Tensor | None,
        boundaries: Boundaries | None,
        ends: Tensor | None,
        header: Tensor,
        measures: bool,
    ) -> Tensor:
        blocks = -(-size // BLOCK_ELEMENTS)
        starts = self._reserve("starts", blocks + 1, torch.int64, header.device)
        if not size:
            header.zero_()
            return starts
        places, num_layers, num_slices, before = None, 0, 0, None
        if boundaries is not None and boundaries.places is not None:
            places, num_layers, num_slices = boundaries.places, boundaries.num_layers, boundaries.num_slices
            before = self._reserve("before", places.numel(), torch.int64, header.device)
        assert header.numel() >= FIXED_FIELDS + num_layers
        work = (self._space["counts"], self._space["numbers"], bits, places, before, starts, ends, header)
        launch(summarise, 1, *work, blocks, num_layers, num_slices, MEASURES=measures, **_SUMMARISE)
        return starts

    def _reserve(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        space = self._space.get(name)
        if space is None or space.numel() < size or space.device != device:
            if space is not None:
                let_go(space)
            space = self._space[name] = torch.empty(size, dtype=dtype, device=device)
        return space[:size]


def _wire(wire: Wire) -> dict[str, object]:
    return {"WIRE": getattr(tl, str(wire.storage).removeprefix("torch.")), "LIMIT": wire.limit}


def _check_flat(size: int, **tensors: Tensor) -> None:
    # A kernel that is told a wrong size writes into memory that belongs to others.
    for name, tensor in tensors.items():
        if tensor.shape != (size,) or not tensor.is_contiguous():
            given = f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            raise ValueError(f"Invalid {name}: {given}. Must be contiguous, of shape ({size},).")


@lru_cache(maxsize=4096)
def _threshold_tables(
    runs: tuple[Run, ...], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns λ of each run, where each begins, and the run in which each block, and the end, begins."""
    edges = [0, *(end for _, _, end in runs)]
    if edges != [*(start for _, start, _ in runs), size]:
        raise ValueError(f"Invalid {runs=}. Each must begin where the one before it ends, from 0 to {size}.")
    thresholds = [threshold for threshold, start, end in runs if start < end]
    if len(set(thresholds)) == 1:
        return torch.full((1,), thresholds[0], dtype=dtype, device=device), None, None  # filled on the device
    tables = _edge_tables(tuple(start for _, start, end in runs if start < end), size, device)
    return without_wait(torch.tensor(thresholds, dtype=dtype), device), *tables


@lru_cache(maxsize=4096)
def _edge_tables(starts: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    edges = torch.tensor(starts)
    blocks = torch.arange(0, size + BLOCK_ELEMENTS, BLOCK_ELEMENTS)
    first_run = torch.searchsorted(edges, blocks, right=True, out_int32=True) - 1
    return without_wait(edges, device), without_wait(first_run, device)
