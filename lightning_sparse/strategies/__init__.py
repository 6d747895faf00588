"""Lightning's strategies, their names, and what checkpoints hold."""

from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import DDPHardThresholdStrategy, LocalHardThresholdStrategy
from lightning_sparse.strategies.local import SparseLocalStrategy
from lightning_sparse.strategies.names import register_strategies

__all__ = [
    "DDPHardThresholdStrategy",
    "LocalHardThresholdStrategy",
    "SparseDDPStrategy",
    "SparseLocalStrategy",
    "register_strategies",
]
