"""The hard threshold and the adding up of payloads on a CPU in one pass each: ``native.c``, compiled where it can be.

A compiler is asked for once, when training is set up, and what it makes is tried before it is used. Where there is
none, or ``LIGHTNING_SPARSE_NATIVE=0``, tensor operations do the same in several passes and come to the same bits.
One thread does it: a pass takes hardly longer than adding two vectors, so that more threads gain little.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.kernels.building import build

SOURCE = Path(__file__).with_name("native.c")
_NAMES = ("take_out", "take_out_masked", "average")
_WIRES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
_VECTORS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
SUBNORMAL = 5e-324


class _Payload(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("wire", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("selected", ctypes.c_int64),
        ("non_finite", ctypes.c_int64),
        ("squares", ctypes.c_double),
        ("slice_elements", ctypes.c_int64),
        ("slices", ctypes.c_void_p),
    )


def is_native(*tensors: Tensor, wire_dtype: torch.dtype) -> bool:
    """Whether the functions here are there and take such tensors: float32 on a CPU."""
    return (
        wire_dtype in _WIRES
        and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)
        and _library() is not None
        and _is_right()
    )


class NativeThreshold:
    """What one bucket sends, span by span from the first element to the last.

    Args:
        before: e, float32, shape (m,), contiguous.
        after: where e' is formed, likewise; may be the same memory.
        gradient: g, likewise.
        loss_scale: S, one element; None is 1.
        wire_dtype: float32, bfloat16, float16 or float8_e4m3fn.
        scale: by how much less than a value is what has that dtype, a power of two.

    Attributes:
        selected: coordinates with not (abs(p) < λ), p = e + g / S, so far.
    """

    def __init__(
        self,
        before: Tensor,
        after: Tensor,
        gradient: Tensor,
        loss_scale: Tensor | None,
        wire_dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        self._tensors = before, after, gradient
        divisor = 1.0 if loss_scale is None else float(loss_scale)
        self._inputs = (*map(_pointer, self._tensors), ctypes.c_float(divisor), loss_scale is not None)
        self._state = _Payload(wire=_WIRES[wire_dtype], scale=scale)
        self._kept_alive: list[Tensor] = []

    @property
    def selected(self) -> int:
        """Coordinates selected so far, written or not."""
        return int(self._state.selected)

    @property
    def non_finite(self) -> int:
        """NaN and infinite values among them."""
        return int(self._state.non_finite)

    def pop_squared_error(self) -> float:
        """Returns ‖e'‖² of what was taken out since the last call, as if all had found room."""
        squares, self._state.squares = float(self._state.squares), 0.0
        return squares

    def write_to(self, ends: Tensor, values: Tensor, offsets: Tensor) -> None:
        """Makes a payload what ``take_out`` writes to: int32, the wire dtype, int16."""
        state = self._state
        state.ends, state.values, state.offsets = (tensor.data_ptr() for tensor in (ends, values, offsets))
        state.capacity = values.numel()
        self._kept_alive += [ends, values, offsets]

    def count_slices(self, slice_elements: int, num_slices: int) -> Tensor:
        """Returns what becomes the numbers of coordinates in equal slices: int64, shape (num_slices,)."""
        counts = torch.zeros(num_slices, dtype=torch.int64)
        self._state.slice_elements, self._state.slices = max(slice_elements, 1), counts.data_ptr()
        self._kept_alive.append(counts)
        return counts

    def take_out(self, threshold: float, start: int, end: int, *, clears_gradient: bool) -> None:
        """Sends what reaches λ of the elements from start to end; what finds no room stays in e' as p."""
        span = (ctypes.c_int64(start), ctypes.c_int64(end), ctypes.c_float(threshold), ctypes.byref(self._state))
        _functions().take_out(*self._inputs, clears_gradient, *span)
        self._note_changes(self._tensors[1:] if clears_gradient else self._tensors[1:2])

    def take_out_masked(self, threshold: float, start: int, end: int, out: Tensor, divisor: int) -> None:
        """Writes into out what reaches λ, divided, with zeros between; out may be the gradient."""
        span = (ctypes.c_int64(start), ctypes.c_int64(end), ctypes.c_float(threshold), ctypes.byref(self._state))
        _functions().take_out_masked(*self._inputs, _pointer(out), ctypes.c_float(divisor), *span)
        self._note_changes((self._tensors[1], out))

    def _note_changes(self, tensors: tuple[Tensor, ...]) -> None:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def average(
    rows: Tensor, ends: Tensor, values: Tensor, offsets: Tensor, out: Tensor, wire_dtype: torch.dtype, scale: float
) -> None:
    """Adds payloads to zeros in rank order and divides by their number.

    Args:
        rows: uint8, shape (n, bytes), each contiguous: the payloads.
        ends: int32, shape (B,): of the first of them, a view of it.
        values: as they travel, shape (capacity,), likewise.
        offsets: int16, shape (capacity,), likewise.
        out: float32, all zeros.
        wire_dtype: what the values are.
        scale: by how much less than a value is what has that dtype.
    """
    parts = map(_pointer, (ends, values, offsets))
    numbers = map(ctypes.c_int64, (rows.stride(0), len(rows), values.numel()))
    wire = _WIRES[wire_dtype], ctypes.c_float(scale)
    _functions().average(*parts, *numbers, *wire, _pointer(out), ctypes.c_int64(ends.numel()))
    torch.autograd.graph.increment_version(out)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _functions() -> Any:
    library = _library()
    assert library is not None, "is_native was not asked"
    return library


@lru_cache(maxsize=1)
def _library() -> Any:
    if os.environ.get("LIGHTNING_SPARSE_NATIVE") == "0" or sys.byteorder != "little":
        return None
    chosen = os.environ.get("CC", "cc")
    slower = "Taking out of buckets what is sent takes longer. LIGHTNING_SPARSE_NATIVE=0 is the same without this line."
    try:
        compiler = shlex.split(chosen)
        if not compiler or shutil.which(compiler[0]) is None:
            rank_zero_info(f"lightning_sparse: there is no C compiler {chosen!r} (set CC=… to name one). {slower}")
            return None
        # After the compiler's own options: with any that takes liberties NaN would not travel.
        flags = ["-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
        if platform.machine() in ("x86_64", "AMD64"):
            flags += _VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])
        # Without start files: those of a library that is linked for fast mathematics change the process that loads it.
        are_kept = SUBNORMAL * 2 > 0.0  # unless torch.set_flush_denormal(True) was called
        library = build(SOURCE, [*compiler, *flags, "-shared", "-fPIC", "-nostartfiles"], _NAMES)
        if are_kept and SUBNORMAL * 2 == 0.0:
            torch.set_flush_denormal(False)
            raise OSError("what it makes turns subnormal numbers into 0, in the whole process")
        return library
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", None) or error).strip()
        rank_zero_warn(
            f"lightning_sparse: the C compiler {chosen!r} makes nothing that works. {slower} It says: {told}"
        )
        return None


@lru_cache(maxsize=1)
@torch.inference_mode(mode=False)
def _is_right() -> bool:
    """Whether the functions come to the bits of tensor operations, whatever the compiler takes for the same."""
    special = torch.tensor([float("nan"), float("inf"), 0.5, -0.0, 1e-40, 3.39e38, -0.7, 0.1]).repeat(20)
    before, gradient, after, out = special, special.flip(0) + 0.3, *torch.empty(2, special.numel()).unbind()
    taken = NativeThreshold(before, after, gradient, torch.tensor([3.0]), torch.float32)
    taken.take_out_masked(0.4, 0, special.numel(), out, 3)
    compensated = before + gradient / 3.0
    is_sent = (compensated.abs() < 0.4).logical_not()
    expected = compensated.masked_fill(is_sent, 0.0), (compensated / 3.0).masked_fill(~is_sent, 0.0)
    in_eight_bits = torch.empty_like(out)
    taken = NativeThreshold(before, torch.empty_like(out), gradient, None, torch.float8_e4m3fn, 0.25)
    taken.take_out_masked(0.4, 0, special.numel(), in_eight_bits, 1)
    compensated = before + gradient
    eighth = compensated.div(0.25).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32).mul(0.25)
    eighth = eighth.masked_fill(~compensated.isfinite(), float("nan")).masked_fill(compensated.abs() < 0.4, 0.0)
    pairs = *zip((after, out), expected, strict=True), (in_eight_bits, eighth)
    is_right = all(torch.equal(*map(_bits, pair)) for pair in pairs)
    if not is_right:
        rank_zero_warn(
            f"lightning_sparse: what the C compiler {os.environ.get('CC', 'cc')!r} makes does not calculate as IEEE "
            "754 has it, and is not used: taking out of buckets what is sent takes longer. Set CC=… to name another."
        )
    return is_right


def _bits(tensor: Tensor) -> Tensor:
    """The values as integers, all NaN alike."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).view(torch.int32)
