"""Gradient sparsification with error feedback for PyTorch Lightning.

Importing this package registers ``Trainer(strategy="ddp_hardthreshold")`` and its relatives.
"""

from lightning_sparse._version import __version__ as __version__
from lightning_sparse.callbacks import DensityMonitor, ErrorMonitor
from lightning_sparse.comm_hook import register_comm_hook
from lightning_sparse.metrics import AverageDensity, TotalError
from lightning_sparse.sparse_state import SparseState
from lightning_sparse.sparsifiers import HardThreshold, LayerLayout, Selection, Sparsifier, TopK
from lightning_sparse.step_stats import StepStats
from lightning_sparse.strategy import DDPHardThresholdStrategy, SparseDDPStrategy, register_strategies
from lightning_sparse.threshold_rules import paper_threshold

__all__ = [
    "AverageDensity",
    "DDPHardThresholdStrategy",
    "DensityMonitor",
    "ErrorMonitor",
    "HardThreshold",
    "LayerLayout",
    "Selection",
    "SparseDDPStrategy",
    "SparseState",
    "Sparsifier",
    "StepStats",
    "TopK",
    "TotalError",
    "paper_threshold",
    "register_comm_hook",
]

register_strategies()
