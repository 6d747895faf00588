"""Groups local parts of parameters into flat buckets of real numbers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sparse.exchange.workers import as_real as as_real
from lightning_sparse.sparsifiers.protocol import LayerLayout

BUCKET_ELEMENTS = 25 * 2**18
"""25 MiB of float32, as in DDP. A larger parameter has its own bucket, because no parameter is split."""


def require_one_device(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if parameters are on several devices, because buckets share a header."""
    first: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ValueError(
            f"The module's parameters are on several devices: {places}. Put all parameters of a process on one device. "
            "If the model does not fit, see HSDPHardThresholdStrategy and ShardGradientAverager."
        )


def residual_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's residual: float64 for double precision, else float32."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def real_numel(tensor: Tensor) -> int:
    """Return the number of real numbers in a tensor, two per complex element."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached; shares its memory."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


# DDP's buckets have the memory order of parameters. Checkpoints have the order of indices.


def require_strides(names: Sequence[str], parameters: Sequence[Tensor], strides: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RuntimeError if a parameter's memory format has changed since the buckets were made."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.stride() != strides.get(name, parameter.stride()):
            raise RuntimeError(
                f"The parameter {name!r} has strides {tuple(parameter.stride())}, and had {tuple(strides[name])} when "
                "training was set up. Change the memory format before set-up: in __init__, configure_model or setup, "
                "or before fit."
            )


def as_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """View a bucket's part with a parameter's shape and strides.

    Complex parameters get a last dimension of two, parameters with gaps in memory contiguous strides.
    """
    real = as_real(parameter.detach())
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.view(real.shape)
    return flat.as_strided(real.shape, real.stride())


def flatten_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor flat, in a parameter's memory order; a view if possible. ``as_parameter`` reverses it.

    Args:
        parameter: the parameter.
        tensor: real, with the shape of ``as_real(parameter)``, or flat in the order of indices.
    """
    parameter = as_real(parameter)
    tensor = tensor.view(parameter.shape)
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tensor.flatten()
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass
class ParameterBucket:
    """Parameters on one device, each with a part of a flat tensor.

    Attributes:
        index: the position of the bucket, the same on all workers.
        layout: the parameters' names and sizes on this rank; a complex number is two coordinates.
        parameters: the module's parameters; of distributed tensors, only the local part is used.
    """

    index: int
    layout: LayerLayout
    parameters: list[Tensor]

    def zeros(self) -> Tensor:
        """Return a flat tensor of zeros: float64 for double precision, else float32."""
        first = local(self.parameters[0])
        return torch.zeros(self.layout.num_elements, dtype=residual_dtype(first), device=first.device)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return flat views of a flat tensor by parameter name, in the order of indices."""
        return {name: flat[start:end] for name, start, end in self.layout.spans()}

    def shaped_parts(self, flat: Tensor) -> list[Tensor]:
        """Return views of the parts of a flat tensor in the parameters' shapes, complex ones as real."""
        shapes = (as_real(local(parameter)).shape for parameter in self.parameters)
        parts = torch.split(flat, list(self.layout.sizes))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


_Bucket = TypeVar("_Bucket", bound=ParameterBucket)


def bucketed(
    kind: type[_Bucket], parameters: Mapping[str, Tensor], first_index: int, dtype_of: Callable[[Tensor], torch.dtype]
) -> list[_Bucket]:
    """Group parameters in order into buckets of one dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[str]]] = {}
    sizes = {name: real_numel(local(parameter)) for name, parameter in parameters.items()}
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for name, parameter in parameters.items():
        key = dtype_of(parameter), local(parameter).device
        runs = groups.setdefault(key, [[]])
        if runs[-1] and filled[key] + sizes[name] > BUCKET_ELEMENTS:
            runs.append([])
            filled[key] = 0
        runs[-1].append(name)
        filled[key] += sizes[name]
    names_of_buckets = [names for runs in groups.values() for names in runs]
    return [
        kind(
            index, LayerLayout(tuple(names), tuple(sizes[name] for name in names)), [parameters[name] for name in names]
        )
        for index, names in enumerate(names_of_buckets, first_index)
    ]
