"""Flat buckets of parameters, where the grouping is ours to choose: what drifts, and the gradients of shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.sparsifiers import LayerLayout

BUCKET_ELEMENTS = 25 * 2**18
"""25 MiB of float32, as DDP's buckets. A parameter is never cut, so one that is larger has a bucket of its own."""


@dataclass
class ParameterBucket:
    """Some parameters of one device, of which a flat tensor has a part each.

    Attributes:
        index: its place in the order that all workers keep to.
        layout: the parameters' names and sizes on this rank; a complex number is two coordinates.
        parameters: as the module has them; distributed tensors count with their local part.
    """

    index: int
    layout: LayerLayout
    parameters: list[Tensor]

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a flat tensor by parameter name: views, flat, in the order of the indices."""
        return {name: flat[start:end] for name, start, end in self.layout.spans()}

    def shaped_parts(self, flat: Tensor) -> list[Tensor]:
        """Return views of the parts of a flat tensor in the parameters' shapes, complex ones as real."""
        shapes = (as_real(local(parameter)).shape for parameter in self.parameters)
        parts = torch.split(flat, list(self.layout.sizes))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def bucketed(
    parameters: Mapping[str, Tensor], first_index: int, dtype_of: Callable[[Tensor], torch.dtype]
) -> list[ParameterBucket]:
    """Return buckets for parameters, each of one dtype and device, in the order given.

    Args:
        parameters: by name, in the same order on all workers.
        first_index: of the first bucket.
        dtype_of: returns the dtype of a parameter's bucket.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[list[str]]] = {}
    sizes = {name: as_real(local(parameter)).numel() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        runs = groups.setdefault((dtype_of(parameter), local(parameter).device), [[]])
        if runs[-1] and sizes[name] + sum(sizes[other] for other in runs[-1]) > BUCKET_ELEMENTS:
            runs.append([])
        runs[-1].append(name)
    names_of_buckets = [names for runs in groups.values() for names in runs]
    return [
        ParameterBucket(
            index,
            LayerLayout(tuple(names), tuple(sizes[name] for name in names)),
            [parameters[name] for name in names],
        )
        for index, names in enumerate(names_of_buckets, first_index)
    ]


def sizes_by_name(buckets: Sequence[ParameterBucket]) -> dict[str, int]:
    """Return how many real numbers this rank exchanges of each parameter."""
    return {
        name: size for bucket in buckets for name, size in zip(bucket.layout.names, bucket.layout.sizes, strict=True)
    }
