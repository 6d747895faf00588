"""What of a step is known while its buckets still come in."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.engine import FlatBucket

Averaged = torch.futures.Future[Tensor]


@dataclass
class RunningStep:
    """One backward's exchange, from DDP's first bucket to its last.

    Attributes:
        loss_scale: S, one element; None is 1.
        buckets: those that have come.
        unused: names of the layers in them that this worker's backward did not reach.
    """

    loss_scale: Tensor | None = None
    buckets: list[FlatBucket] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    _futures: list[Averaged] = field(default_factory=list)

    def put(self, bucket: FlatBucket) -> Averaged:
        """Adds a bucket; returns the future that DDP waits for."""
        self.buckets.append(bucket)
        device = bucket.gradient.device
        self._futures.append(torch.futures.Future(devices=None if device.type == "cpu" else [device]))
        return self._futures[-1]

    def keep_promises(self) -> None:
        """Hands DDP what is now in all buckets' gradients."""
        for bucket, future in zip(self.buckets, self._futures, strict=True):
            future.set_result(bucket.gradient)
