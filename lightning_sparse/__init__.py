"""Gradient sparsification with error feedback for PyTorch Lightning.

Importing this package registers ``Trainer(strategy="ddp_hardthreshold")`` and its relatives.
"""

from lightning_sparse._version import __version__ as __version__
from lightning_sparse.callbacks.density_monitor import DensityMonitor
from lightning_sparse.callbacks.error_monitor import ErrorMonitor
from lightning_sparse.drift.model_averager import SparseModelAverager
from lightning_sparse.engine.options import DriftOptions, ExchangeOptions, GradientOptions
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.exchange.estimate import Estimate, estimate
from lightning_sparse.gradients.comm_hook import register_comm_hook
from lightning_sparse.gradients.ddp_averager import DDPGradientAverager
from lightning_sparse.gradients.shard_averager import ShardGradientAverager
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
    "DDPGradientAverager",
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
    "ShardGradientAverager",
    "SimulatedWorkersStrategy",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparseLocalHSDPStrategy",
    "SparseLocalStrategy",
    "SparseModelAverager",
    "Sparsifier",
    "StepStats",
    "StochasticRounding",
    "TopK",
    "estimate",
    "paper_threshold",
    "register_comm_hook",
]

register_strategies()
