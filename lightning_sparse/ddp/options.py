"""What can be chosen about the exchange beside the sparsifier: the words that are allowed, checked early."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from lightning_sparse.exchange import EXCHANGE_MODES, ExchangeMode, require_link
from lightning_sparse.exchange.wire import VALUE_DTYPES, ValueDtype
from lightning_sparse.sparsifiers import HardThreshold, Sparsifier

ErrorFeedback = Literal["gradient", "learning_rate", "none"]
ERROR_FEEDBACKS: tuple[ErrorFeedback, ...] = ("gradient", "learning_rate", "none")
DensityControlMode = Literal["hold", "calibrate"]
DENSITY_CONTROLS: tuple[DensityControlMode | None, ...] = ("hold", "calibrate", None)


def require_density_control(sparsifier: Sparsifier, density_control: DensityControlMode | None) -> None:
    """Raises ValueError where a density is to be held and there is none to which λ could be corrected."""
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
class ExchangeOptions:
    """How gradients are exchanged, apart from the sparsifier; checked when made.

    Args:
        error_feedback: ``"gradient"`` keeps residuals in gradient units; ``"learning_rate"`` multiplies them by
            lr_{t-1} / lr_t before each step (Algorithm 1 of Sahu et al., NeurIPS 2021); ``"none"`` keeps nothing.
        local_clip_norm: clips this worker's whole gradient to this norm before it is compensated. The norm needs all
            buckets, so nothing is sent before backward has ended: the exchange no longer overlaps with it.
        value_dtype: what values travel in. ``"float32"`` sends them as the residual holds them; what rounding to any
            other leaves is kept and sent later. ``"float8"`` (e4m3, scaled to λ) needs a threshold or
            a sparsifier that rounds, ``"int8"`` the latter (``lightning_sparse.exchange.wire``).
        exchange: see ``Exchange``.
        density_control: what becomes of a λ that was asked for by a density. ``"hold"``, which None stands for,
            corrects it slowly, so that the average volume after calibration meets the density
            (``lightning_sparse.engine.density_control``); ``"calibrate"`` leaves it constant after its calibration,
            as the theory has it.
        link_gbit_s: the rate of a worker's link in one direction, by which ``exchange="auto"`` chooses, and by which
            small payloads wait for each other over Gloo; None chooses with caution, see
            ``lightning_sparse.exchange.routes.cost_model`` and ``lightning_sparse.exchange.routes.coalescer``.

    Raises:
        ValueError: a word or a number that is not allowed.
    """

    error_feedback: ErrorFeedback = "gradient"
    local_clip_norm: float | None = None
    value_dtype: ValueDtype = "float32"
    exchange: ExchangeMode = "auto"
    density_control: DensityControlMode | None = None
    link_gbit_s: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("error_feedback", ERROR_FEEDBACKS),
            ("value_dtype", VALUE_DTYPES),
            ("exchange", EXCHANGE_MODES),
            ("density_control", DENSITY_CONTROLS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, allowed))}.")
        require_link(self.link_gbit_s)
        if self.local_clip_norm is not None and not (isfinite(self.local_clip_norm) and self.local_clip_norm > 0):
            raise ValueError(
                f"Invalid local_clip_norm={self.local_clip_norm}. Must be a finite number above 0, or None to not clip."
            )

    @property
    def holds_density(self) -> bool:
        """Whether a λ that was asked for by a density is corrected after its calibration."""
        return self.density_control != "calibrate"
