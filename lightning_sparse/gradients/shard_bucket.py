"""A flat bucket of this rank's shards: gradients are copied in, and averages out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.engine import FlatBucket
from lightning_sparse.engine.grouping import as_real, kept_dtype, local
from lightning_sparse.engine.parameter_bucket import ParameterBucket, bucketed
from lightning_sparse.selection.bucket import Residual


@dataclass
class ShardBucket(ParameterBucket):
    """This rank's shards of some parameters, and unsent values of their gradients.

    Attributes:
        residual: e, shape (layout.num_elements,): float32, or float64 where gradients are.
    """

    residual: Tensor

    def bring(self, used: Collection[str], *, is_last: bool, notes: Tensor) -> FlatBucket:
        """Returns the bucket for a step, with a copy of the gradients.

        Args:
            used: names of parameters whose gradient takes part; nothing of the others is sent.
            is_last: whether no bucket of this step comes after it.
            notes: for the header.
        """
        first = local(self.parameters[0])
        gradient = torch.empty(self.layout.num_elements, dtype=first.dtype.to_real(), device=first.device)
        parts = self.shaped_parts(gradient)
        places, gradients, unused = [], [], []
        for name, parameter, part in zip(self.layout.names, self.parameters, parts, strict=True):
            if name in used:
                places.append(part)
                assert parameter.grad is not None
                gradients.append(as_real(local(parameter.grad)))
            else:
                unused.append(part)
        if places:
            torch._foreach_copy_(places, gradients)
        if unused:
            torch._foreach_zero_(unused)
        left_out = [(start, end) for name, start, end in self.layout.spans() if name not in used and end > start]
        residual = Residual(self.residual, self.residual)
        return FlatBucket(self.index, self.layout, gradient, residual, is_last, left_out=left_out, notes=notes)

    def give_back(self, average: Tensor, used_by_any: Collection[str]) -> None:
        """Makes the average the gradient of every parameter that any replica used.

        Args:
            average: shape (layout.num_elements,).
            used_by_any: names of these.
        """
        targets, sources = [], []
        for name, parameter, part in zip(self.layout.names, self.parameters, self.shaped_parts(average), strict=True):
            if name not in used_by_any:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            targets.append(as_real(local(parameter.grad)))
            sources.append(part)
        if targets:
            torch._foreach_copy_(targets, sources)


def lay_out(parameters: Mapping[str, Tensor], first_index: int) -> list[ShardBucket]:
    """Return buckets for parameters, with residuals of zeros.

    Args:
        parameters: by name, in the same order on all replicas.
        first_index: of the first bucket.
    """
    buckets = []
    for bucket in bucketed(parameters, first_index, lambda parameter: parameter.dtype):  # that of the gradients
        first = local(bucket.parameters[0])
        residual = torch.zeros(bucket.layout.num_elements, dtype=kept_dtype(first), device=first.device)
        buckets.append(ShardBucket(**vars(bucket), residual=residual))
    return buckets
