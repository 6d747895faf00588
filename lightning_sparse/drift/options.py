"""Options of local training, checked at construction."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.engine.transport_options import TransportOptions
from lightning_sparse.sparsifiers.protocol import is_number, require_count

OuterOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True)
class DriftOptions(TransportOptions):
    """Options of the exchange of drifts.

    Args:
        every_n_steps: optimizer steps (of all optimizers together) per exchange, at least 1.
        keep_drift: True keeps unsent values e_i in each worker's weights: θ_i = x − e_i. False resets every worker to
            the anchor after each exchange, θ_i = x, and stores unsent values e_i separately (SparseLoCo: Sarfi et al.,
            *Communication efficient LLM pre-training with SparseLoCo*, 2025, arXiv:2508.15706).
        drift_decay: β, factor on unsent values before the next drift is added, in (0, 1]; below 1 only with
            ``keep_drift=False``.
        outer_learning_rate: factor on the average drift by which the anchor moves, above 0. Take 2 with Adam and an
            exchange in every step (docs/local-training.md).
        outer_optimizer: makes the optimizer that moves the anchor, with the average drift as its gradient; None
            subtracts the average times ``outer_learning_rate``. DiLoCo (Douillard et al., 2023, arXiv:2311.08105):
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
        overlap: True overlaps the exchange with the next step and applies its result one step later.
        value_dtype: dtype of sent values, as for gradients. Rounding errors stay with unsent values.
        exchange: the route, as for gradients.
        link_gbit_s: the rate of a worker's link, as for gradients.

    Raises:
        ValueError: an option has a value that is not allowed, or two options exclude each other.
    """

    every_n_steps: int = 1
    keep_drift: bool = True
    drift_decay: float = 1.0
    outer_learning_rate: float = 1.0
    outer_optimizer: OuterOptimizer | None = None
    overlap: bool = False
    why_no_overshoot = "for drifts, where it would move a worker's own weights back"
    why_no_sparse_sums = "for drifts, where the sums of all workers would stay in a worker's own weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("every_n_steps", self.every_n_steps)
        for name in ("keep_drift", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Invalid {name}={getattr(self, name)!r}. Must be True or False.")
        if not (is_number(self.drift_decay) and 0 < self.drift_decay <= 1):
            raise ValueError(f"Invalid drift_decay={self.drift_decay!r}. Must be within (0, 1].")
        if self.keep_drift and self.drift_decay != 1:
            raise ValueError(
                f"Got drift_decay={self.drift_decay} with keep_drift=True, where unsent values are part of the weights "
                "and cannot decay. Use keep_drift=False, or leave drift_decay out."
            )
        if not (is_number(self.outer_learning_rate) and 0 < self.outer_learning_rate < inf):
            raise ValueError(
                f"Invalid outer_learning_rate={self.outer_learning_rate!r}. Must be above 0 and finite; 1 moves the "
                "anchor by the average drift."
            )
        if self.outer_optimizer is not None and self.outer_learning_rate != 1:
            raise ValueError(
                f"Got outer_learning_rate={self.outer_learning_rate} with an outer_optimizer, which has its own rate. "
                "Give only one of them."
            )
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise ValueError(
                f"Invalid outer_optimizer={self.outer_optimizer!r}. Must be a function of parameters, such as "
                "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
            )
