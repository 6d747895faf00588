"""Callbacks and metrics, one per file."""

from lightning_sparse.callbacks.density_monitor import DensityMonitor
from lightning_sparse.callbacks.error_monitor import ErrorMonitor
from lightning_sparse.callbacks.metrics import AverageDensity, TotalError

__all__ = ["AverageDensity", "DensityMonitor", "ErrorMonitor", "TotalError"]
