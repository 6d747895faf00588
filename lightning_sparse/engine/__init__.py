"""The engine of sparse averaging, and the state that a worker keeps between steps."""

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.memory import ResidualMemory
from lightning_sparse.engine.step_stats import LayerStats, StepStats
from lightning_sparse.engine.warmup import warm_up_steps
from lightning_sparse.selection.bucket import FlatBucket

__all__ = [
    "Averager",
    "Engine",
    "FlatBucket",
    "LayerStats",
    "ResidualMemory",
    "StepStats",
    "warm_up_steps",
]
