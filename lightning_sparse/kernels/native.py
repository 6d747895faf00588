"""Functions of ``native.c``, compiled at set-up, for the hard threshold and for received payloads on a CPU.

The compiled functions are tested before they are used. Without a compiler, or with ``LIGHTNING_SPARSE_NATIVE=0``,
tensor operations give the same bits in several passes; weights after an exchange of drifts may differ in the last bit.
The functions run in one thread: a pass takes hardly longer than adding two vectors.
"""

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.kernels.building import build

SOURCE = Path(__file__).with_name("native.c")
WIRES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}
_VECTORS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
_TYPES = {"float": ctypes.c_float, "double": ctypes.c_double, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}


def _fields_of(struct: str) -> list[tuple[str, Any]]:
    """Return the names and types of the fields of a struct in ``native.c``, the only place that lists them."""
    match = re.search(r"typedef struct \{([^{}]*)\} " + struct, SOURCE.read_text())
    assert match is not None
    fields: list[tuple[str, Any]] = []
    for declaration in re.sub(r"/\*.*?\*/|const ", "", match[1], flags=re.DOTALL).split(";")[:-1]:
        kind, names = declaration.split(maxsplit=1)
        for name in names.split(","):
            fields.append((name.strip(" *"), ctypes.c_void_p if "*" in name else _TYPES[kind]))
    return fields


class Task(ctypes.Structure):
    """The work of the hard threshold on one bucket."""

    _fields_ = _fields_of("task_t")


class Payloads(ctypes.Structure):
    """All workers' payloads of a bucket."""

    _fields_ = _fields_of("payloads_t")


class Parts:
    """Tensors that together hold the elements of a bucket: float32, contiguous, on the CPU.

    Attributes:
        tensors: the tensors, flat.
        addresses: of two arrays: the tensors' addresses, and the number of elements up to the end of each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.view(-1) for tensor in tensors]
        array = ctypes.c_int64 * len(tensors)  # faster than tensors of a few numbers
        self._ends = array(*accumulate(tensor.numel() for tensor in tensors))
        self._pointers = array(*map(pointer, tensors))
        self.addresses = ctypes.addressof(self._pointers), ctypes.addressof(self._ends)

    def put(self, indices: Tensor, values: Tensor) -> None:
        """Set elements, at ascending indices."""
        start, first = 0, 0
        places = torch.searchsorted(indices, torch.tensor([*self._ends])).tolist()
        for tensor, last in zip(self.tensors, places, strict=True):
            tensor[indices[first:last] - start] = values[first:last]
            start, first = start + tensor.numel(), last


def is_native(tensor: Tensor, *, wire_dtype: torch.dtype) -> bool:
    """Return whether the compiled functions are available for this tensor: float32 on a CPU."""
    return (
        wire_dtype in WIRES
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and _library() is not None
        and _passes_self_test()
    )


def take_out(task: Task, threshold: float, start: int, end: int, excess: float = 0.0) -> None:
    """Take coordinates with not (abs(p) < λ) out of [start, end) and send p + excess sign(p)."""
    bounds = ctypes.c_int64(start), ctypes.c_int64(end)
    _library().take_out(ctypes.byref(task), *bounds, ctypes.c_float(threshold), ctypes.c_float(excess))


def average(payloads: Payloads, out: Tensor) -> None:
    """Add payloads to zeros (float32, shape (num_elements,)) in rank order and average."""
    _library().average(ctypes.byref(payloads), ctypes.c_void_p(pointer(out)))
    torch.autograd.graph.increment_version(out)


def subtract(payloads: Payloads, anchor: Tensor, weights: Parts, zeros: Tensor) -> None:
    """Subtract the average of payloads from anchor and weights, where a payload has a value.

    Args:
        payloads: of all workers.
        anchor: float32, contiguous, shape (num_elements,).
        weights: hold as many elements.
        zeros: float32, at least as many elements as a block: work space, all zeros before and after.
    """
    places = pointer(zeros), pointer(anchor), *weights.addresses
    _library().subtract(ctypes.byref(payloads), *map(ctypes.c_void_p, places))
    torch.autograd.graph.increment_version((anchor, *weights.tensors))


def pointer(tensor: Tensor) -> int:
    """Return the address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


@lru_cache(maxsize=1)
def _library() -> Any:
    if os.environ.get("LIGHTNING_SPARSE_NATIVE") == "0" or sys.byteorder != "little" or os.name == "nt":
        return None
    command = os.environ.get("CC", "cc")
    consequence = "Selecting coordinates takes longer. LIGHTNING_SPARSE_NATIVE=0 hides this message."
    try:
        compiler = shlex.split(command)
        if not compiler or shutil.which(compiler[0]) is None:
            rank_zero_info(f"lightning_sparse: there is no C compiler {command!r} (CC=… names another). {consequence}")
            return None
        flags = ["-O2", "-ftree-vectorize"]
        # After the user's options, to override -ffast-math, which would lose NaN.
        flags += ["-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
        if platform.machine() in ("x86_64", "AMD64"):
            flags += _VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])
        # Without start files, because those for fast mathematics change the process that loads the library.
        return build(SOURCE, [*compiler, *flags, "-shared", "-fPIC", "-nostartfiles"])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or error).strip()
        rank_zero_warn(f"lightning_sparse: the C compiler {command!r} fails. {consequence} Its output: {output}")
        return None


@lru_cache(maxsize=1)
@torch.inference_mode(mode=False)
def _passes_self_test() -> bool:
    """Return whether the compiled functions give the bits of tensor operations on special values."""
    special = torch.tensor([float("nan"), float("inf"), 0.5, -0.0, 1e-40, 3.39e38, -0.7, 0.1]).repeat(20)
    gradient, size = special.flip(0) + 0.3, special.numel()
    after, out = torch.empty(2, size).unbind()
    task = Task(wire=WIRES[torch.float8_e4m3fn], scale=0.25, loss_scale=3.0, divisor=3.0)
    task.before, task.after, task.gradient, task.dense = map(pointer, (special, after, gradient, out))
    take_out(task, 0.4, 0, size)
    compensated = special + gradient / 3.0
    is_kept = compensated.abs() < 0.4
    as_float8 = compensated.div(0.25).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32).mul(0.25)
    as_float8 = as_float8.masked_fill(~compensated.isfinite(), float("nan"))
    rest = (compensated - as_float8).nan_to_num(0.0)
    expected = torch.where(is_kept, compensated, rest), (as_float8 / 3.0).masked_fill(is_kept, 0.0)
    pairs = zip((after, out), expected, strict=True)
    is_right = all(torch.equal(*map(_bits, pair)) for pair in pairs)
    if not is_right:
        rank_zero_warn(
            f"lightning_sparse: functions compiled by {os.environ.get('CC', 'cc')!r} deviate from IEEE 754 and are not "
            "used. Selecting coordinates takes longer. Set CC=… to use another compiler."
        )
    return is_right


def _bits(tensor: Tensor) -> Tensor:
    """Return the values as integers, with the same integer for every NaN."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).view(torch.int32)
