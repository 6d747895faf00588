"""What is more than a scalar: one callback a file."""

from lightning_sparse.callbacks.density_monitor import DensityMonitor
from lightning_sparse.callbacks.error_monitor import ErrorMonitor
from lightning_sparse.callbacks.threshold_schedule import ThresholdSchedule

__all__ = [
    "DensityMonitor",
    "ErrorMonitor",
    "ThresholdSchedule",
]
