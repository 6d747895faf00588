"""Options of every exchange, for gradients and drifts, checked at construction."""

from dataclasses import dataclass
from typing import ClassVar, get_args

from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.exchange.routes.cost_model import require_link
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.sparsifiers import HardThreshold, Sparsifier
from lightning_sparse.sparsifiers.protocol import require_word


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Options that every exchange has.

    Args:
        value_dtype: dtype of sent values. Rounding errors stay with unsent values, which are sent later. With its
            index, a coordinate takes 6 bytes in ``"float32"``, 4 in ``"bfloat16"`` or ``"float16"`` and 3 in
            ``"float8"`` (e4m3). float8 is scaled to λ and needs a threshold above 0 in every layer or a sparsifier
            that rounds. ``"int8"`` needs a sparsifier that rounds.
        exchange: route of the selected values. ``"gather"``: all-gather of every worker's values.
            ``"reduce_scatter"``: each value goes to the worker that sums its part of the bucket, and the sums go to
            all. ``"sparse_sums"``: the same, but averages below λ / √n stay in the residual of the worker that computed
            them, so bytes do not grow with the number of workers; for gradients and a hard threshold. ``"dense"``:
            all-reduce of the masked bucket. ``"hierarchical"``: dense inside a node, sparse between nodes. ``"auto"``:
            gather, reduce-scatter or dense for each bucket, whichever is predicted to be fastest.
        link_gbit_s: rate at which a worker receives from other nodes, above 0, in Gbit/s, for ``exchange="auto"``: the
            rate of a node's network card, which a ring of workers crosses once. With sharded replicas, all ranks of a
            node receive at the same time, so divide the rate by their number. None assumes 10 Gbit/s on CPUs, and on
            GPUs NVLink inside a node and 100 Gbit/s between nodes. Over Gloo, small payloads are sent together, up to
            the bytes that the link carries in 1 ms, or 64 kB if None.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    value_dtype: ValueDtype = "float32"
    exchange: ExchangeMode = "auto"
    link_gbit_s: float | None = None
    why_no_overshoot: ClassVar[str | None] = None
    """The reason why sent values must not exceed the residual, None if they may."""
    why_no_sparse_sums: ClassVar[str | None] = None
    """The reason why small sums must not stay with a worker, None if they may."""

    def require(self, sparsifier: Sparsifier) -> None:
        """Raise ValueError if these options do not support the sparsifier's values."""
        require_wire(sparsifier, self.value_dtype)
        overshoot = getattr(sparsifier, "overshoot", 0.0)
        no_overshoot, no_sums = self.why_no_overshoot, self.why_no_sparse_sums
        if not self.keeps_rest:
            no_overshoot = "with error_feedback='none', which would enlarge every sent value for good"
            no_sums = "with error_feedback='none', which would lose small sums"
        elif no_sums is None and not isinstance(sparsifier, HardThreshold):
            no_sums = f"with {type(sparsifier).__name__}, which has no threshold for sums; it needs a HardThreshold"
        if overshoot and no_overshoot is not None:
            raise ValueError(f"Got {overshoot=} {no_overshoot}. Use overshoot=0.")
        if self.exchange == "sparse_sums" and no_sums is not None:
            raise ValueError(f"Got exchange='sparse_sums' {no_sums}. Use exchange='auto'.")

    @property
    def keeps_rest(self) -> bool:
        """Whether unsent values stay in the residual."""
        return True

    def __post_init__(self) -> None:
        require_word("value_dtype", self.value_dtype, get_args(ValueDtype))
        require_word("exchange", self.exchange, get_args(ExchangeMode))
        require_link(self.link_gbit_s)
