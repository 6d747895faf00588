"""Lightning's strategies, their names, and what checkpoints hold."""

from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import (
    DDPHardThresholdStrategy,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
)
from lightning_sparse.strategies.hsdp import SparseHSDPStrategy
from lightning_sparse.strategies.local import SparseLocalStrategy
from lightning_sparse.strategies.names import register_strategies
from lightning_sparse.strategies.simulated import SimulatedWorkersStrategy

__all__ = [
    "DDPHardThresholdStrategy",
    "HSDPHardThresholdStrategy",
    "LocalHardThresholdStrategy",
    "SimulatedWorkersStrategy",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparseLocalStrategy",
    "register_strategies",
]
