"""Local training: every worker runs its own optimizer, and workers exchange drifts from a shared anchor."""

from lightning_sparse.drift.averager import SparseModelAverager
from lightning_sparse.drift.options import DriftOptions

__all__ = ["DriftOptions", "SparseModelAverager"]
