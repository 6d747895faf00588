"""The door of DistributedDataParallel: its hook, its buckets, its unused parameters, and when a gradient trains."""

from lightning_sparse.ddp.comm_hook import register_comm_hook
from lightning_sparse.ddp.sparse_state import SparseState

__all__ = ["SparseState", "register_comm_hook"]
