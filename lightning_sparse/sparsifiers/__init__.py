"""What to send: one module per sparsifier, pure tensors, no communication and no Lightning."""

from lightning_sparse.sparsifiers.hard_threshold import HardThreshold, ThresholdRun
from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection, Sparsifier, in_order
from lightning_sparse.sparsifiers.top_k import TopK

__all__ = ["HardThreshold", "LayerLayout", "Selection", "Sparsifier", "ThresholdRun", "TopK", "in_order"]
