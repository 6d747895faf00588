"""What is more than a scalar: one callback a file."""

from lightning_sparse.callbacks.communication_profile import CommunicationProfile
from lightning_sparse.callbacks.communication_profiler import CommunicationProfiler
from lightning_sparse.callbacks.density_monitor import DensityMonitor
from lightning_sparse.callbacks.error_monitor import ErrorMonitor
from lightning_sparse.callbacks.threshold_curve import ThresholdCurve
from lightning_sparse.callbacks.threshold_finder import ThresholdFinder, find_threshold
from lightning_sparse.callbacks.threshold_schedule import ThresholdSchedule

__all__ = [
    "CommunicationProfile",
    "CommunicationProfiler",
    "DensityMonitor",
    "ErrorMonitor",
    "ThresholdCurve",
    "ThresholdFinder",
    "ThresholdSchedule",
    "find_threshold",
]
