"""The hard-threshold step of one bucket in two GPU kernels, without a wait for the device.

The same bits as ``compensate``, ``HardThreshold.select``, ``round_to_wire``, ``keep_rest`` and ``PayloadFormat.fill``
one after the other, with nearly all memory traffic in one pass: 12 bytes an element where the gradient is float32, 10
where it is bfloat16, and some 100 bytes for each coordinate of a sparse selection.

1. ``walk_block`` forms p where e' is to be, and marks what is selected with one bit an element.
2. ``torch.cumsum`` over the counts tells each block where in the payload its coordinates begin.
3. ``pack_block`` writes values and offsets there and keeps the rest.

One program has one block of 65,536 elements, the payload's own. So no two programs write to one place: coordinates
ascend without a sort, and there is no atomic addition whose order could make two runs differ.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor

from lightning_sparse.exchange.payload import BLOCK_ELEMENTS
from lightning_sparse.selection.fused_kernels import count_before, pack_block, tl, triton, walk_block
from lightning_sparse.selection.residual import Residual

Run = tuple[float, int, int]
"""λ, exact in the residual's dtype, the first element for which it holds, and the one after the last."""

# 512 threads with 8 elements each need some 50 registers: two programs fit a multiprocessor of an H100 or H200. Without
# fusing, a multiplication and an addition round twice, as in PyTorch.
_WALK = {"BLOCK": BLOCK_ELEMENTS, "WORDS": 128, "num_warps": 16, "enable_fp_fusion": False}
_PACK = {"BLOCK": BLOCK_ELEMENTS, "num_warps": 16, "enable_fp_fusion": False}


def is_available(device: torch.device) -> bool:
    """Whether the kernels run for tensors of this device: it is a GPU, triton is installed and can build them.

    Said once where they cannot be built, as without a C compiler: the plain way gives the same bits and takes longer.
    """
    return triton is not None and device.type == "cuda" and _can_build(device)


@lru_cache(maxsize=64)
def _can_build(device: torch.device) -> bool:
    residual, counts = torch.zeros(32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.zeros(4, dtype=torch.int16, device=device)
    places = {"counts": counts, "values": residual[:4], "offsets": offsets}
    try:
        FusedThreshold().select(Residual(residual, residual), residual, [(1.0, 0, 32)], loss_scale=None, **places)
    except Exception as error:  # whatever stops a compiler
        rank_zero_warn(
            f"lightning_sparse: the fused kernels cannot be built for {device} and are not used: selecting takes "
            f"longer and waits for the device. Triton says: {type(error).__name__}: {error}"
        )
        return False
    return True


class FusedThreshold:
    """Launches the kernels and owns their work space: 1 bit an element of the largest bucket, 32 bytes a block.

    All buckets share the space, which is safe as long as they are worked on in one stream.
    """

    def __init__(self) -> None:
        self._space: dict[str, Tensor] = {}
        self._last_blocks = 0

    def select(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        *,
        loss_scale: Tensor | None,
        counts: Tensor,
        values: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Selects the coordinates with not (abs(p) < λ), p = e + g / S, writes them into a payload and keeps the rest.

        Coordinates are written in ascending order until the payload is full. One that finds no room stays in the
        residual as p, to be sent another way, but all numbers are those after it has been sent. Room that is left
        over is not written to.

        Args:
            residual: e, and where e' is formed: float32 or float64, shapes (m,), contiguous.
            gradient: g in any floating dtype, shape (m,), contiguous. Not modified.
            runs: neighbouring runs that together cover the bucket.
            loss_scale: S, one element on the same device; None is 1.
            counts: int32, shape (B,). Becomes the number of coordinates selected in each block, written or not.
            values: the wire dtype, shape (capacity,). Becomes the rounded values.
            offsets: int16, shape (capacity,). Becomes the offsets inside the blocks, 16 unsigned bits each.

        Returns:
            float64, shape (3,), on the device: the numbers of selected coordinates and of non-finite ones among them,
            and ‖e'‖² in gradient units squared.

        Raises:
            ValueError: runs that do not cover the bucket, shapes that do not match, a tensor that is not contiguous.
        """
        before, after = residual
        size, blocks = after.numel(), -(-after.numel() // BLOCK_ELEMENTS)
        _check_flat(size, residual=before, new_residual=after, gradient=gradient)
        _check_flat(blocks, counts=counts)
        _check_flat(values.numel(), values=values, offsets=offsets)
        self._last_blocks = blocks
        if not size:
            return after.new_zeros(3, dtype=torch.float64)
        tables = _threshold_tables(tuple(runs), size, after.dtype, after.device)
        bits = self._reserve("bits", blocks * BLOCK_ELEMENTS // 32, torch.int32, after.device)
        ends = self._reserve("ends", blocks, torch.int64, after.device)
        numbers = self._reserve("numbers", 3 * blocks, torch.float64, after.device).view(3, blocks)
        inputs = (before, after, gradient, loss_scale, *tables)
        _launch(walk_block, blocks, *inputs, bits, counts, None, numbers, size, WIRE=None, LIMIT=None, **_WALK)
        torch.cumsum(counts, 0, out=ends)
        outputs, limit = (values, offsets, numbers), torch.finfo(values.dtype).max
        _launch(pack_block, blocks, after, bits, counts, ends, *outputs, size, values.numel(), LIMIT=limit, **_PACK)
        return numbers.sum(1)

    def layer_counts(self, boundaries: Tensor) -> Tensor:
        """Returns how many coordinates of each layer the last :meth:`select` selected: int64, shape (L,).

        Args:
            boundaries: int64, shape (L + 1,), ascending from 0 to m, on the device: where layers begin and end.
        """
        before = torch.zeros_like(boundaries)
        if self._last_blocks:
            work = (self._space["bits"], self._space["ends"], before)
            _launch(count_before, boundaries.numel(), boundaries, *work, **_PACK)
        return before.diff()

    def mask(
        self,
        residual: Residual,
        gradient: Tensor,
        runs: Sequence[Run],
        *,
        loss_scale: Tensor | None,
        out: Tensor,
        wire_dtype: torch.dtype,
    ) -> Tensor:
        """Selects as :meth:`select` does, but into a dense tensor with zeros between the rounded values. One kernel.

        Args:
            residual: as for :meth:`select`.
            gradient: as for :meth:`select`; it may be ``out`` as well.
            runs: as for :meth:`select`.
            loss_scale: as for :meth:`select`.
            out: shape (m,), contiguous, in a dtype that holds every value of ``wire_dtype``. Overwritten.
            wire_dtype: the dtype to which values are rounded.

        Returns:
            As :meth:`select`.
        """
        before, after = residual
        size, blocks = after.numel(), -(-after.numel() // BLOCK_ELEMENTS)
        _check_flat(size, residual=before, new_residual=after, gradient=gradient, out=out)
        if not size:
            return after.new_zeros(3, dtype=torch.float64)
        tables = _threshold_tables(tuple(runs), size, after.dtype, after.device)
        inputs = (before, after, gradient, loss_scale, *tables)
        numbers = self._reserve("numbers", 3 * blocks, torch.float64, after.device).view(3, blocks)
        wire = {"WIRE": getattr(tl, str(wire_dtype).removeprefix("torch.")), "LIMIT": torch.finfo(wire_dtype).max}
        _launch(walk_block, blocks, *inputs, None, None, out, numbers, size, **wire, **_WALK)
        return numbers.sum(1)

    def _reserve(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        space = self._space.get(name)
        if space is None or space.numel() < size or space.device != device:
            space = self._space[name] = torch.empty(size, dtype=dtype, device=device)
        return space[:size]


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
        # Filled on the device. What is copied there from a list is waited for; the tables below are, this once.
        return torch.full((1,), thresholds[0], dtype=dtype, device=device), None, None
    starts = torch.tensor([start for _, start, end in runs if start < end])
    blocks = torch.arange(0, size + BLOCK_ELEMENTS, BLOCK_ELEMENTS)
    first_run = torch.searchsorted(starts, blocks, right=True, out_int32=True) - 1
    return torch.tensor(thresholds, dtype=dtype, device=device), starts.to(device), first_run.to(device)


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[(programs,)](*arguments, **constants)
