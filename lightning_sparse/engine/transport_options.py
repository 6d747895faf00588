"""Options of an exchange that are the same for gradients and drifts, checked when they are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sparse.exchange import EXCHANGE_MODES, ExchangeMode, require_link
from lightning_sparse.exchange.wire import VALUE_DTYPES, ValueDtype


def require_word(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Raise ValueError if an option has a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, allowed))}.")


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """How values travel.

    Args:
        value_dtype: what values travel in. ``"float32"`` sends them as the residual holds them. Any other rounds them;
            the rounding error is kept and sent later. ``"float8"`` (e4m3, scaled to λ) needs a threshold or a
            sparsifier that rounds, ``"int8"`` the latter (``lightning_sparse.exchange.wire``).
        exchange: the route, see ``Exchange``.
        link_gbit_s: the rate of a worker's link in one direction. ``exchange="auto"`` chooses routes by it, and small
            payloads wait for each other over Gloo by it. None assumes a cautious value, see
            ``lightning_sparse.exchange.routes.cost_model`` and ``lightning_sparse.exchange.routes.gather``.

    Raises:
        ValueError: a word or a rate that is not allowed.
    """

    value_dtype: ValueDtype = "float32"
    exchange: ExchangeMode = "auto"
    link_gbit_s: float | None = None

    @property
    def holds_density(self) -> bool:
        """Whether a λ that was calibrated to a density is corrected afterwards."""
        return True

    @property
    def keeps_rest(self) -> bool:
        """Whether unsent values stay in the residual."""
        return True

    def __post_init__(self) -> None:
        require_word("value_dtype", self.value_dtype, VALUE_DTYPES)
        require_word("exchange", self.exchange, EXCHANGE_MODES)
        require_link(self.link_gbit_s)
