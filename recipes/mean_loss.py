"""Metrics of losses over the samples of all workers."""

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class MeanLoss(Metric):
    """The mean loss of all images or words of all workers, each counted once.

    Lightning's mean is wrong if workers have different numbers of samples: it divides by the rounded mean number.
    torchmetrics' mean leaves out NaN.
    """

    full_state_update = False
    total: Tensor
    num_counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_counted", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, total: Tensor, num_counted: Tensor) -> None:
        """Add the summed loss and the number of counted samples, both 0-d tensors; the number may be 0."""
        self.total += total.detach()
        self.num_counted += num_counted

    @override
    def compute(self) -> Tensor:
        """Return the mean loss since the last reset."""
        return (self.total / self.num_counted).float()


class Perplexity(MeanLoss):
    """exp of the mean cross-entropy over all words of all workers."""

    @override
    def compute(self) -> Tensor:
        """Return the perplexity since the last reset."""
        return (self.total / self.num_counted).exp().float()
