"""How a parameter's numbers lie in a flat bucket, whatever its memory format, and in a checkpoint."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def real_numel(parameter: Tensor) -> int:
    """Returns how many real numbers a parameter's gradient has in DDP's buckets: two an element if it is complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def zero_residual(parameter: Tensor) -> Tensor:
    """Returns the residual of a parameter that no backward has reached."""
    dtype = torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.zeros(real_numel(parameter), dtype=dtype, device=parameter.device)


def require_strides(names: Sequence[str], parameters: Sequence[Tensor], strides: Mapping[str, tuple[int, ...]]) -> None:
    """Raises if a parameter no longer lies in memory as it did when buckets were made, in whose order residuals are.

    Raises:
        RuntimeError: names the first such parameter and says what to do.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.stride() != strides.get(name, parameter.stride()):
            raise RuntimeError(
                f"The parameter {name!r} has strides {tuple(parameter.stride())}, and had {tuple(strides[name])} when "
                "training was set up. Change the memory format before that: in __init__, configure_model or "
                "setup, or before fit."
            )


def is_dense(parameter: Tensor) -> bool:
    """Returns whether a parameter fills its memory without gaps or overlaps, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_logical_order(residual: Tensor, parameter: Tensor) -> Tensor:
    """Returns a residual in the order of its parameter's indices, whatever the parameter's memory format.

    DDP lays a gradient out as its parameter lies in memory (``channels_last``, transposed). A checkpoint must not.

    Args:
        residual: flat, as it is in a bucket; two numbers an element where the parameter is complex.
        parameter: whose it is.
    """
    if parameter.is_contiguous() or not is_dense(parameter):
        return residual
    return _as_laid_out(residual, parameter).flatten(0, parameter.dim() - 1).flatten()


def in_memory_order(residual: Tensor, parameter: Tensor) -> Tensor:
    """Returns a residual as DDP lays it out in a bucket; the inverse of ``in_logical_order``."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return residual
    laid_out = torch.empty_like(residual)
    view = _as_laid_out(laid_out, parameter)
    view.copy_(residual.view(view.shape))
    return laid_out


def as_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """Returns a view of what lies in a bucket, of a real parameter's shape and strides."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return flat.view(parameter.shape)
    return _as_laid_out(flat, parameter)


def _as_laid_out(flat: Tensor, parameter: Tensor) -> Tensor:
    """Returns a view of shape parameter.shape, with a last dimension of 2 more where the parameter is complex."""
    if parameter.is_complex():
        strides = [2 * stride for stride in parameter.stride()]
        return flat.as_strided([*parameter.shape, 2], [*strides, 1])
    return flat.as_strided(parameter.shape, parameter.stride())
