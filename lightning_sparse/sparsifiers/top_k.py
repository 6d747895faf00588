"""The Top-k sparsifiers: send a fixed share of every layer, or of the whole model."""

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.magnitudes import kth_largest_magnitude
from lightning_sparse.sparsifiers.protocol import (
    Granularity,
    LayerLayout,
    MarkingSparsifier,
    WholeStep,
    require_density,
    require_granularity,
)


class TopK(MarkingSparsifier):
    """Selects the k coordinates of largest magnitude of every layer, or of the whole model.

    The usual rival of the hard threshold (Aji and Heafield, EMNLP 2017; layer-wise as in the experiments of Sahu et
    al., NeurIPS 2021). k = max(1, ⌊density · size⌋) of a layer or of the model.

    It has no bound on what stays unsent: the residual can build up for as long as gradients stay large. By layer, k
    coordinates are sent also of a layer whose gradient is zero, and among equal magnitudes which ones are sent is up
    to ``torch.topk``. Of the model, all that equal the k-th are sent, and nothing that is zero.

    Args:
        density: the share to send, in (0, 1].
        granularity: ``"layer"``; or ``"model"``, which gives every layer what its magnitudes deserve in the whole.
            Then no exchange can begin before backward has ended, and p is looked at twice more
            (``lightning_sparse.sparsifiers.magnitudes.kth_largest_magnitude``).

    Raises:
        ValueError: a density outside (0, 1], or another granularity.

    Example:
        >>> import torch
        >>> layout = LayerLayout(names=("weight", "bias"), sizes=(4, 1))
        >>> TopK(density=0.5).select(torch.tensor([0.1, -3.0, 2.0, 0.0, 0.5]), layout).indices.tolist()
        [1, 2, 4]
    """

    def __init__(self, density: float = 0.001, granularity: Granularity = "layer") -> None:
        require_density(density, "0.1 % of each layer")
        require_granularity(granularity)
        self.density = density
        self.granularity = granularity
        self._kth: Tensor | None = None

    @property
    def needs_survey(self) -> bool:  # type: ignore[override]
        """Whether one threshold holds for the whole step."""
        return self.granularity == "model"

    def begin_step(self, step: int, rank: int) -> None:
        """Forgets the magnitude of the last step."""
        self._kth = None

    def survey(self, step: WholeStep) -> None:
        """Finds the k-th largest magnitude of the whole step."""
        if step.num_elements:
            self._kth = kth_largest_magnitude(step.buckets, self._k(step.num_elements), step.dtype)

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Marks k coordinates of each layer, or this bucket's of the model's, and every non-finite one."""
        if self.needs_survey:
            return self._mark_largest(compensated)
        magnitude = compensated.abs()
        # topk counts NaN as largest, but a layer may hold more non-finite values than k: all of those are sent.
        selected = magnitude.isfinite().logical_not_()
        for _, start, end in layout.spans():
            if end > start:
                largest = magnitude[start:end].topk(self._k(end - start), sorted=False).indices
                selected[start:end].index_fill_(0, largest, True)
        return selected

    def _mark_largest(self, compensated: Tensor) -> Tensor:
        if not compensated.numel():
            return torch.zeros_like(compensated, dtype=torch.bool)
        kth = self._kth
        if kth is None:  # nobody has shown more than this bucket
            kth = kth_largest_magnitude([lambda: compensated], self._k(compensated.numel()), compensated.dtype)
        # Nothing is below a NaN: where it is the k-th, what is finite stays.
        kth = kth.to(compensated.device, non_blocking=True).nan_to_num(nan=torch.inf, posinf=torch.inf)
        if kth.dtype != compensated.dtype:  # to which a comparison would round it: down would let in what is smaller
            rounded = kth.to(compensated.dtype)
            kth = torch.where(rounded < kth, rounded.nextafter(torch.full_like(rounded, torch.inf)), rounded)
        magnitude = compensated.abs()
        return (magnitude < kth).logical_not_().logical_and_(magnitude != 0)

    def _k(self, num_elements: int) -> int:
        return max(1, int(self.density * num_elements))
