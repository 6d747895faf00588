"""Options of the exchange of gradients beside the sparsifier, checked when they are made."""

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from lightning_sparse.engine.transport_options import TransportOptions, require_word
from lightning_sparse.sparsifiers import HardThreshold, Sparsifier
from lightning_sparse.sparsifiers.protocol import is_number

ErrorFeedback = Literal["gradient", "learning_rate", "none"]
DensityControlMode = Literal["hold", "calibrate"]


def require_density_control(sparsifier: Sparsifier, density_control: DensityControlMode | None) -> None:
    """Raise ValueError for a density control that the sparsifier cannot follow."""
    has_density = isinstance(sparsifier, HardThreshold) and (sparsifier.density is not None or not sparsifier.threshold)
    if density_control == "hold" and not has_density:
        what = "a constant threshold" if isinstance(sparsifier, HardThreshold) else type(sparsifier).__name__
        raise ValueError(
            f"Got density_control='hold' with {what}. It corrects the λ of a hard threshold that was asked for by a "
            "density: give density=… in place of threshold=…, or leave density_control out."
        )
    if density_control == "calibrate" and isinstance(sparsifier, HardThreshold) and sparsifier.granularity == "layer":
        raise ValueError(
            "Got density_control='calibrate' with granularity='layer'. Calibration finds one λ for all layers, which "
            "is corrected layer by layer after that: leave density_control out, or granularity."
        )


@dataclass(frozen=True)
class ExchangeOptions(TransportOptions):
    """Options of the exchange of gradients, apart from the sparsifier.

    Args:
        error_feedback: units of the residual. ``"gradient"``; ``"learning_rate"``: multiplied by lr_{t-1} / lr_t
            before each step (Algorithm 1 of Sahu et al., NeurIPS 2021); ``"none"`` throws unsent values away.
        local_clip_norm: above 0, in gradient units: clips this worker's whole gradient to this norm *before* the
            exchange (Lightning's ``gradient_clip_val`` acts on the averaged gradient). The exchange then begins only
            after backward has ended. None does not clip.
        density_control: what happens to a λ that was calibrated to a density. ``"hold"`` (the meaning of None):
            corrected slowly, so that the average volume meets the density; ``"calibrate"``: constant.

    Raises:
        ValueError: a word or a number that is not allowed.
    """

    error_feedback: ErrorFeedback = "gradient"
    local_clip_norm: float | None = None
    density_control: DensityControlMode | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_word("error_feedback", self.error_feedback, get_args(ErrorFeedback))
        require_word("density_control", self.density_control, (*get_args(DensityControlMode), None))
        norm = self.local_clip_norm
        if norm is not None and not (is_number(norm) and 0 < norm < inf):
            raise ValueError(f"Invalid local_clip_norm={norm!r}. Must be a finite number above 0, or None to not clip.")

    @property
    def why_no_overshoot(self) -> str | None:
        """See ``TransportOptions``: without a residual nothing corrects the next value."""
        return None if self.keeps_rest else "with error_feedback='none', which would enlarge every sent value for good"

    @property
    def keeps_rest(self) -> bool:
        """Whether unsent values stay in the residual."""
        return self.error_feedback != "none"

    @property
    def holds_density(self) -> bool:
        """Whether a λ that was asked for by a density is corrected after its calibration."""
        return self.density_control != "calibrate"
