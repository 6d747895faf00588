"""The exchange, which turns the payloads of all workers into the same averaged gradient on every worker.

Only this package issues collectives. Every worker must issue them in the same order, and only from the body of DDP's
communication hook. Gloo matches collectives by order, and the order of a future's callbacks differs between workers.
"""

from lightning_sparse.exchange.agreement import parameter_settings, require_agreement
from lightning_sparse.exchange.buffers import Buffers, without_wait
from lightning_sparse.exchange.exchange import Exchange, ExchangeMode
from lightning_sparse.exchange.groups import OwnGroup
from lightning_sparse.exchange.in_process import ThreadWorkers
from lightning_sparse.exchange.routes.cost_model import require_link
from lightning_sparse.exchange.routes.reduce_scatter import slice_bounds, slice_elements
from lightning_sparse.exchange.routes.shipment import Shipment
from lightning_sparse.exchange.save_barrier import SaveBarrier
from lightning_sparse.exchange.workers import Workers

__all__ = [
    "Buffers",
    "Exchange",
    "ExchangeMode",
    "OwnGroup",
    "SaveBarrier",
    "Shipment",
    "ThreadWorkers",
    "Workers",
    "parameter_settings",
    "require_agreement",
    "require_link",
    "slice_bounds",
    "slice_elements",
    "without_wait",
]
