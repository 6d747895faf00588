"""The layer-wise Top-k sparsifier: send a fixed share of every layer."""

from torch import Tensor

from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection, Sparsifier


class TopK(Sparsifier):
    """Selects in every layer the k coordinates of largest magnitude, k = max(1, ⌊density · size⌋).

    The usual rival of the hard threshold (Aji and Heafield, EMNLP 2017; layer-wise as in the experiments of Sahu et
    al., NeurIPS 2021). Among equal magnitudes which ones are sent is up to ``torch.topk``.

    It has no bound on what stays unsent: the residual can build up for as long as a layer's gradients stay large, and k
    coordinates of a layer are sent also when its gradient is zero.

    Args:
        density: the share of each layer to send, in (0, 1].

    Raises:
        ValueError: a density outside (0, 1].

    Example:
        >>> import torch
        >>> layout = LayerLayout(names=("weight", "bias"), sizes=(4, 1))
        >>> TopK(density=0.5).select(torch.tensor([0.1, -3.0, 2.0, 0.0, 0.5]), layout).indices.tolist()
        [1, 2, 4]
    """

    def __init__(self, density: float = 0.001) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"Invalid {density=}. Must be within (0, 1]; for example 0.001 sends 0.1 % of each layer.")
        self.density = density

    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        """Returns k coordinates per layer and every non-finite one; see :meth:`Sparsifier.select`."""
        indices = self.mark(compensated, layout).nonzero().squeeze(1)
        return Selection(indices, compensated[indices])

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Returns where :meth:`select` finds something: bool, the bucket's shape. Nothing waits for the device."""
        magnitude = compensated.abs()
        # topk counts NaN as largest, but a layer may hold more non-finite values than k: all of those are sent.
        selected = magnitude.isfinite().logical_not_()
        for _, start, end in layout.spans():
            if end > start:
                k = max(1, int(self.density * (end - start)))
                selected[start:end].index_fill_(0, magnitude[start:end].topk(k, sorted=False).indices, True)
        return selected
