"""The hard threshold and the adding up of payloads on a CPU in one pass each: ``native.c``, compiled where it can be.

A compiler is asked for once, when a process first needs the functions; what it makes is kept in the user's cache, by
content and kind of processor. Where there is none, or ``LIGHTNING_SPARSE_NATIVE=0``, tensor operations do the same in
several passes and come to the same bits.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
_WIRES = {torch.float32: 0, torch.bfloat16: 1}
_VECTORS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
MOST_THREADS = 2
"""With more threads than that tensor operations, which use all of them, are faster than one pass on one of them."""


class _Payload(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("wire", ctypes.c_int32),
        ("selected", ctypes.c_int64),
        ("non_finite", ctypes.c_int64),
        ("squares", ctypes.c_double),
        ("slice_elements", ctypes.c_int64),
        ("slices", ctypes.c_void_p),
    )


def is_native(*tensors: Tensor, wire_dtype: torch.dtype) -> bool:
    """Whether the functions here are there and take such tensors: float32 on a CPU, values of 4 or 2 bytes."""
    return (
        wire_dtype in _WIRES
        and all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
        and torch.get_num_threads() <= MOST_THREADS
        and _library() is not None
    )


class NativeThreshold:
    """What one bucket sends, span by span from the first element to the last.

    Args:
        before: e, float32, shape (m,), contiguous.
        after: where e' is formed, likewise; may be the same memory.
        gradient: g, likewise.
        loss_scale: S, one element; None is 1.
        wire_dtype: float32 or bfloat16.

    Attributes:
        selected: coordinates with not (abs(p) < λ), p = e + g / S, so far.
    """

    def __init__(
        self, before: Tensor, after: Tensor, gradient: Tensor, loss_scale: Tensor | None, wire_dtype: torch.dtype
    ) -> None:
        self._tensors = before, after, gradient
        scale = 1.0 if loss_scale is None else float(loss_scale)
        self._inputs = (*map(_pointer, self._tensors), ctypes.c_float(scale), loss_scale is not None)
        self._state = _Payload(wire=_WIRES[wire_dtype])
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
        """Makes a payload what :meth:`take_out` writes to: int32, the wire dtype, int16."""
        state = self._state
        state.ends, state.values, state.offsets = (one.data_ptr() for one in (ends, values, offsets))
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
        """Writes into out what reaches λ > 0, divided, with zeros between; out may be the gradient."""
        span = (ctypes.c_int64(start), ctypes.c_int64(end), ctypes.c_float(threshold), ctypes.byref(self._state))
        _functions().take_out_masked(*self._inputs, _pointer(out), ctypes.c_float(divisor), *span)
        self._note_changes((self._tensors[1], out))

    def _note_changes(self, tensors: tuple[Tensor, ...]) -> None:
        for one in tensors:
            torch.autograd.graph.increment_version(one)


def average(rows: Tensor, ends: Tensor, values: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Adds payloads to zeros in rank order and divides by their number.

    Args:
        rows: uint8, shape (n, bytes), contiguous: the payloads.
        ends: int32, shape (B,): of the first of them, a view of it.
        values: the wire dtype, shape (capacity,), likewise.
        offsets: int16, shape (capacity,), likewise.
        out: float32, all zeros.
    """
    parts = map(_pointer, (ends, values, offsets))
    numbers = map(ctypes.c_int64, (rows.shape[1], len(rows), values.numel()))
    _functions().average(*parts, *numbers, _WIRES[values.dtype], _pointer(out), ctypes.c_int64(ends.numel()))
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
    compiler = shlex.split(os.environ.get("CC", "cc"))
    is_possible = sys.byteorder == "little" and compiler and shutil.which(compiler[0]) is not None
    if os.environ.get("LIGHTNING_SPARSE_NATIVE") == "0" or not is_possible:
        return None
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags += _VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([platform.machine(), *compiler, *flags]).encode())
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(cache) / "lightning_sparse" / f"native-{key.hexdigest()[:16]}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as part:  # other workers do the same at the same time
                made = Path(part) / "native.so"
                subprocess.run([*compiler, *flags, "-o", made, SOURCE], check=True, capture_output=True, timeout=60)
                made.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # no place to write to, a compiler that does not work
        return None
