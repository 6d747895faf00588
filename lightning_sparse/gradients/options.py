"""Options of the exchange of gradients, checked at construction."""

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from lightning_sparse.engine.transport_options import TransportOptions
from lightning_sparse.sparsifiers.protocol import is_number, require_word

ErrorFeedback = Literal["gradient", "learning_rate", "none"]


@dataclass(frozen=True)
class ExchangeOptions(TransportOptions):
    """Options of the exchange of gradients, apart from the sparsifier.

    Args:
        error_feedback: units of the residual. ``"gradient"``; ``"learning_rate"``: multiplied by lr_{t-1} / lr_t
            before each step (Algorithm 1 of Sahu et al., NeurIPS 2021); ``"none"`` discards unsent values.
        local_clip_norm: above 0, in gradient units: clips this worker's whole gradient to this norm *before* the
            exchange (Lightning's ``gradient_clip_val`` clips the averaged gradient). The exchange then starts only
            after backward. None does not clip.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    error_feedback: ErrorFeedback = "gradient"
    local_clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_word("error_feedback", self.error_feedback, get_args(ErrorFeedback))
        norm = self.local_clip_norm
        if norm is not None and not (is_number(norm) and 0 < norm < inf):
            raise ValueError(f"Invalid local_clip_norm={norm!r}. Must be a finite number above 0, or None to not clip.")

    @property
    def keeps_rest(self) -> bool:
        """Whether unsent values stay in the residual."""
        return self.error_feedback != "none"
