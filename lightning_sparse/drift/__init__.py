"""Local training: workers run their own optimizers and exchange drifts from an anchor."""

from lightning_sparse.drift.averager import SparseModelAverager
from lightning_sparse.drift.options import DriftOptions

__all__ = ["DriftOptions", "SparseModelAverager"]
