"""Options of every exchange, of gradients and of drifts, checked at construction."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, TypeVar, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.exchange.wire import DTYPES, MAX_GRID_STEPS, ValueDtype
from lightning_sparse.sparsifiers.checks import is_number, require_count, require_flag, require_link, require_word
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.sparsifiers.protocol import Sparsifier, describe

Options = TypeVar("Options", bound="ExchangeOptions")
AverageOver = Literal["senders", "workers"]
OuterOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options that every exchange has.

    Args:
        value_dtype: dtype of sent values. Rounding errors stay with unsent values, which are sent later. With its
            index, a coordinate takes 6 bytes in ``"float32"``, 4 in ``"bfloat16"`` and 3 in
            ``"float8"`` (e4m3). float8 is scaled to λ and needs a threshold above 0 in every layer or a sparsifier
            that rounds. ``"int8"`` needs a sparsifier that rounds.
        exchange: route of the selected values. ``"gather"``: all-gather of every worker's values.
            ``"reduce_scatter"``: each value goes to the worker that sums its part of the bucket, and the sums go to
            all. ``"sparse_sums"``: a reduce-scatter in which averages below λ / √n stay in the residual of the worker
            that computed them. Bytes do not grow with the number of workers. Only for gradients and a hard threshold.
            ``"dense"``: all-reduce of the masked bucket. ``"auto"``: gather, reduce-scatter or dense for each bucket,
            whichever is predicted to be fastest.
        link_gbit_s: rate in Gbit/s at which a worker receives from other nodes, for ``exchange="auto"``, within 1e-6
            and 1e6. Give the rate of a node's network card; with sharded replicas, divide it by the ranks of a node,
            which receive at the same time. None assumes 3.8 Gbit/s on CPUs, and on GPUs NVLink inside a node and 100
            Gbit/s between nodes. Over Gloo, it also limits the payloads that are sent together: 1 ms of the link, or 64
            kB if None.

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

    def validate(self, sparsifier: Sparsifier) -> None:
        """Raise ValueError if these options do not support the sparsifier's values."""
        most_steps = MAX_GRID_STEPS.get(DTYPES[self.value_dtype])
        no_grid = None if most_steps is None else sparsifier.why_no_grid(most_steps)
        if no_grid is not None:
            raise ValueError(f"Got value_dtype={self.value_dtype!r} {no_grid}")
        overshoot = getattr(sparsifier, "overshoot", 0.0)
        no_overshoot, no_sums = self.why_no_overshoot, self.why_no_sparse_sums
        if no_sums is None and not isinstance(sparsifier, HardThreshold):
            no_sums = f"with {type(sparsifier).__name__}, which has no threshold for sums; it needs a HardThreshold"
        if overshoot and no_overshoot is not None:
            raise ValueError(f"Got {overshoot=} {no_overshoot}. Use overshoot=0.")
        if self.exchange == "sparse_sums" and no_sums is not None:
            raise ValueError(f"Got exchange='sparse_sums' {no_sums}. Use exchange='auto'.")

    def __post_init__(self) -> None:
        require_word("value_dtype", self.value_dtype, get_args(ValueDtype))
        require_word("exchange", self.exchange, get_args(ExchangeMode))
        if self.link_gbit_s is not None:
            require_link(self.link_gbit_s)


@dataclass(frozen=True, kw_only=True)
class GradientOptions(ExchangeOptions):
    """Options of the exchange of gradients, added to `ExchangeOptions`.

    Args:
        local_clip_norm: above 0, in gradient units: clips this worker's whole gradient to this norm *before* the
            exchange (Lightning's ``gradient_clip_val`` clips the averaged gradient). The exchange then starts only
            after backward. None does not clip.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    local_clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        norm = self.local_clip_norm
        if norm is not None and not (is_number(norm) and 0 < norm < inf):
            raise ValueError(f"Invalid local_clip_norm={norm!r}. Must be a finite number above 0, or None to not clip.")


@dataclass(frozen=True, kw_only=True)
class DriftOptions(ExchangeOptions):
    """Options of the exchange of drifts, added to `ExchangeOptions`.

    Args:
        every_n_steps: optimizer steps per exchange, at least 1. If a ``training_step`` has several optimizers, their
            steps together count as one.
        keep_drift: True keeps unsent values e_i in each worker's weights: θ_i = x − e_i. False resets every worker to
            the anchor after each exchange, θ_i = x, and stores unsent values e_i separately (SparseLoCo: Sarfi et al.,
            *Communication efficient LLM pre-training with SparseLoCo*, 2025, arXiv:2508.15706).
        drift_decay: β, factor on unsent values before the next drift is added, in (0, 1]; below 1 only with
            ``keep_drift=False``.
        average_over: the workers over which a coordinate is averaged. ``"senders"``: those that sent a nonzero value
            for it, or all workers if every λ of the bucket is 0. ``"workers"``: all; unsent values count as 0.
        outer_optimizer: makes the optimizer that moves the anchor, with the average drift as its gradient; None
            subtracts the average. DiLoCo (Douillard et al., 2023, arXiv:2311.08105):
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.

    Raises:
        ValueError: an option has a value that is not allowed, or two options exclude each other.
    """

    every_n_steps: int = 1
    keep_drift: bool = True
    drift_decay: float = 1.0
    average_over: AverageOver = "senders"
    outer_optimizer: OuterOptimizer | None = None
    why_no_overshoot = "for drifts, which gained nothing from it in tests"
    why_no_sparse_sums = "for drifts, where the sums of all workers would stay in a worker's own weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("every_n_steps", self.every_n_steps)
        require_flag("keep_drift", self.keep_drift)
        if not (is_number(self.drift_decay) and 0 < self.drift_decay <= 1):
            raise ValueError(f"Invalid drift_decay={self.drift_decay!r}. Must be within (0, 1].")
        if self.keep_drift and self.drift_decay != 1:
            raise ValueError(
                f"Got drift_decay={self.drift_decay} with keep_drift=True, where unsent values are part of the weights "
                "and cannot decay. Use keep_drift=False, or leave drift_decay out."
            )
        require_word("average_over", self.average_over, get_args(AverageOver))
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise ValueError(
                f"Invalid outer_optimizer={self.outer_optimizer!r}. Must be a function of parameters, such as "
                "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
            )


def settings_of(sparsifier: Sparsifier, options: ExchangeOptions, per_layer_stats: bool) -> dict[str, Any]:
    """Return plain values of the settings that must be equal on all workers."""
    values = {name: describe(value) for name, value in vars(options).items()}
    return sparsifier.settings() | values | {"per_layer_stats": per_layer_stats}


def checked(options: Options | None, kind: type[Options]) -> Options:
    """Return options of exactly this kind, the default for None; raise TypeError otherwise."""
    if options is not None and type(options) is not kind:
        raise TypeError(f"Invalid {options=}. Must be {kind.__name__}(exchange='gather'), for example.")
    return kind() if options is None else options
