"""Gradient sparsification with error feedback for PyTorch Lightning.

Importing this package registers ``Trainer(strategy="ddp_hardthreshold")`` and its relatives.
"""

from lightning_sparse._version import __version__ as __version__
from lightning_sparse.callbacks.density_monitor import DensityMonitor
from lightning_sparse.callbacks.error_monitor import ErrorMonitor
from lightning_sparse.drift.averager import SparseModelAverager
from lightning_sparse.engine.options import DriftOptions, ExchangeOptions, GradientOptions
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.exchange.estimate import Estimate, estimate
from lightning_sparse.gradients.comm_hook import register_comm_hook
from lightning_sparse.gradients.shard_exchange import ShardExchange
from lightning_sparse.gradients.sparse_state import SparseState
from lightning_sparse.sparsifiers.accordion import Accordion
from lightning_sparse.sparsifiers.gaussian_k import GaussianK
from lightning_sparse.sparsifiers.hard_threshold import Dense, HardThreshold
from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier, Selection, Sparsifier
from lightning_sparse.sparsifiers.random_k import RandomK
from lightning_sparse.sparsifiers.rounding import ScaledIntegerRounding, StochasticRounding
from lightning_sparse.sparsifiers.top_k import TopK
from lightning_sparse.strategies import register_strategies
from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import (
    DDPHardThresholdStrategy,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
)
from lightning_sparse.strategies.hsdp import SparseHSDPStrategy, SparseLocalHSDPStrategy
from lightning_sparse.strategies.local import SparseLocalStrategy
from lightning_sparse.strategies.simulated.strategy import SimulatedWorkersStrategy
from lightning_sparse.theory.bounds import paper_threshold

__all__ = [
    "Accordion",
    "DDPHardThresholdStrategy",
    "Dense",
    "DensityMonitor",
    "DriftOptions",
    "ErrorMonitor",
    "Estimate",
    "ExchangeOptions",
    "GaussianK",
    "GradientOptions",
    "HSDPHardThresholdStrategy",
    "HardThreshold",
    "LayerLayout",
    "LocalHSDPHardThresholdStrategy",
    "LocalHardThresholdStrategy",
    "MarkingSparsifier",
    "RandomK",
    "ScaledIntegerRounding",
    "Selection",
    "ShardExchange",
    "SimulatedWorkersStrategy",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparseLocalHSDPStrategy",
    "SparseLocalStrategy",
    "SparseModelAverager",
    "SparseState",
    "Sparsifier",
    "StepStats",
    "StochasticRounding",
    "TopK",
    "estimate",
    "paper_threshold",
    "register_comm_hook",
]

register_strategies()
