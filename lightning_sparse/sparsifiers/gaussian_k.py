"""The GaussianK sparsifier: about a share of every layer, by a threshold from a fitted Gaussian."""

from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import require_density
from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier
from lightning_sparse.sparsifiers.top_k import k_of

CORRECTIONS = 3
TOO_FEW, TOO_MANY = 2 / 3, 4 / 3
SMALLER, LARGER = 0.5, 1.5
SMALLEST = 1e-300
"""The smallest share of a Gaussian's tail whose quantile is finite."""


class GaussianK(MarkingSparsifier):
    """Fits a Gaussian to each layer and selects magnitudes above a threshold, aiming at k = ⌊density · size⌋.

    Top-k without a sort (Shi, Chu, Cheung and See, *Understanding Top-k sparsification in distributed deep learning*,
    arXiv:1911.08772, Algorithm 1): t = abs(μ) + z σ of the layer's finite p, with z the quantile of 1 − density / 2.
    Three times, t is halved if less than 2/3 k magnitudes exceed it, or multiplied by 1.5 if more than 4/3 k do. Then
    all magnitudes above t are sent, perhaps many times k; if there are none, the largest. k is at least 1.

    As with Top-k, unsent values have no bound. (The authors' code takes μ with its sign, sends at most k, and never
    sends a layer of equal magnitudes. Here, every layer sends at least one value.)

    Args:
        density: the share of each layer to aim at, in (0, 1].

    Raises:
        ValueError: a density outside (0, 1].

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(6,))
        >>> GaussianK(density=0.2).select(torch.tensor([0.1, -3.0, 0.2, 0.0, 0.1, -0.1]), layout).indices.tolist()
        [1]
    """

    def __init__(self, density: float = 0.001) -> None:
        require_density(density, "about 0.1 % of each layer")
        self.density = density

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Mark coordinates above their layer's threshold and non-finite ones; see `MarkingSparsifier.mark`."""
        is_finite = compensated.isfinite()
        finite = torch.where(is_finite, compensated, 0)
        marks = is_finite.logical_not_()
        spans = [slice(start, end) for _, start, end in layout.spans() if end > start]
        if not spans:
            return marks
        moments = [torch.std_mean(finite[span], correction=0) for span in spans]
        deviations, means = (torch.stack(values) for values in zip(*moments, strict=True))
        thresholds = means.abs() + -NormalDist().inv_cdf(max(self.density / 2, SMALLEST)) * deviations
        magnitude = finite.abs_()
        k_by_layer = _k_by_layer(self.density, layout, compensated.device)
        for _ in range(CORRECTIONS):
            exceed = [magnitude[span] > threshold for span, threshold in zip(spans, thresholds.unbind(), strict=True)]
            share = torch.stack([marked.count_nonzero() for marked in exceed]) / k_by_layer
            factors = torch.where(share < TOO_FEW, SMALLER, torch.where(share > TOO_MANY, LARGER, 1.0))
            thresholds = thresholds * factors.to(thresholds.dtype)
        largest = torch.stack([magnitude[span].amax() for span in spans])
        thresholds = torch.minimum(thresholds, largest.nextafter(torch.zeros_like(largest)))
        for span, threshold in zip(spans, thresholds.unbind(), strict=True):
            marks[span].logical_or_(magnitude[span] > threshold)
        return marks


@lru_cache(maxsize=256)
def _k_by_layer(density: float, layout: LayerLayout, device: torch.device) -> Tensor:
    """Return k of every nonempty layer, as float64 on the device."""
    k = [k_of(density, size) for size in layout.sizes if size]
    return torch.tensor(k, dtype=torch.float64).to(device, non_blocking=True)
