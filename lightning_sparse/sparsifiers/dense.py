"""Everything: the control of an experiment, with the same statistics as what it is compared with."""

from lightning_sparse.sparsifiers.hard_threshold import HardThreshold


class Dense(HardThreshold):
    """Selects every coordinate: the hard threshold at λ = 0, which is plain DDP up to the order of additions.

    Example:
        >>> import torch
        >>> from lightning_sparse import LayerLayout
        >>> Dense().select(torch.tensor([0.0, -1.0]), LayerLayout(("weight",), (2,))).indices.tolist()
        [0, 1]
    """

    def __init__(self) -> None:
        super().__init__(threshold=0.0)
