"""Lightning's strategies, their names, and what checkpoints hold."""

from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import (
    DDPHardThresholdStrategy,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
)
from lightning_sparse.strategies.hsdp import SparseHSDPStrategy, SparseLocalHSDPStrategy
from lightning_sparse.strategies.local import SparseLocalStrategy
from lightning_sparse.strategies.names import register_strategies

__all__ = [
    "DDPHardThresholdStrategy",
    "HSDPHardThresholdStrategy",
    "LocalHSDPHardThresholdStrategy",
    "LocalHardThresholdStrategy",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparseLocalHSDPStrategy",
    "SparseLocalStrategy",
    "register_strategies",
]
