"""A flat bucket of this rank's shards: gradients are copied in, and averages out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sparse.engine import FlatBucket
from lightning_sparse.engine.grouping import as_real, grouped, kept_dtype, local
from lightning_sparse.selection.residual import Residual
from lightning_sparse.sparsifiers import LayerLayout


@dataclass
class ShardBucket:
    """This rank's shards of some parameters, and what it has not sent of their gradients.

    Attributes:
        index: its place in the order that all replicas keep to.
        layout: names of the parameters, and the elements of each that this rank holds, which may be none.
        parameters: as the module has them when they are sharded.
        residual: e, shape (layout.num_elements,): float32, or float64 where gradients are.
    """

    index: int
    layout: LayerLayout
    parameters: list[nn.Parameter]
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
        parts = self._parts(gradient)
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
        for name, parameter, part in zip(self.layout.names, self.parameters, self._parts(average), strict=True):
            if name not in used_by_any:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            targets.append(as_real(local(parameter.grad)))
            sources.append(part)
        if targets:
            torch._foreach_copy_(targets, sources)

    def by_name(self) -> dict[str, Tensor]:
        """Returns views of the residual, flat, in the order of each shard's indices."""
        return {name: self.residual[start:end] for name, start, end in self.layout.spans()}

    def _parts(self, flat: Tensor) -> list[Tensor]:
        shapes = (as_real(local(one)).shape for one in self.parameters)
        parts = torch.split(flat, list(self.layout.sizes))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def lay_out(parameters: Mapping[str, nn.Parameter], first_index: int) -> list[ShardBucket]:
    """Returns buckets for parameters, with residuals of zeros.

    Args:
        parameters: by name, in the same order on all replicas.
        first_index: of the first bucket.
    """
    held = {name: local(one) for name, one in parameters.items()}
    buckets: list[ShardBucket] = []
    # By the gradients' own dtype: a bucket is one flat tensor of them.
    for (_, device), runs in grouped(held, lambda one: one.dtype).items():
        for names in runs:
            layout = LayerLayout(tuple(names), tuple(as_real(held[name]).numel() for name in names))
            residual = torch.zeros(layout.num_elements, dtype=kept_dtype(held[names[0]]), device=device)
            of_names = [parameters[name] for name in names]
            buckets.append(ShardBucket(first_index + len(buckets), layout, of_names, residual))
    return buckets
