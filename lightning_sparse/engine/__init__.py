"""One step of sparse averaging, whatever is averaged, and what a worker keeps from one step to the next."""

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.flat_bucket import FlatBucket
from lightning_sparse.engine.memory import ResidualMemory, Residuals
from lightning_sparse.engine.rehearsal import rehearse_steps
from lightning_sparse.engine.step_stats import LayerStats, StepStats

__all__ = [
    "Averager",
    "Engine",
    "FlatBucket",
    "LayerStats",
    "ResidualMemory",
    "Residuals",
    "StepStats",
    "rehearse_steps",
]
