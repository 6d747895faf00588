"""Lightning's strategies, their names, and what checkpoints hold."""

from lightning_sparse.strategies.ddp import DDPHardThresholdStrategy, SparseDDPStrategy
from lightning_sparse.strategies.local import LocalHardThresholdStrategy, SparseLocalStrategy
from lightning_sparse.strategies.names import register_strategies

__all__ = [
    "DDPHardThresholdStrategy",
    "LocalHardThresholdStrategy",
    "SparseDDPStrategy",
    "SparseLocalStrategy",
    "register_strategies",
]
