"""Rounding to a grid: absolute compressors that send whole numbers of steps, and nothing where that number is 0."""

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.grid import LARGEST_STEP, SMALLEST_STEP, power_of_two
from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier
from lightning_sparse.sparsifiers.random_source import RandomSource

BITS = 24
"""Random bits per element: as fine as float32 is between 1/2 and 1."""


class ScaledIntegerRounding(MarkingSparsifier):
    """Rounds every coordinate to the nearest multiple of a step ε, and sends those that are not 0.

    Scaled integer rounding as in SwitchML (Sapio et al., NSDI 2021), an absolute compressor (Sahu et al., NeurIPS 2021,
    section 5): with error feedback no coordinate of the residual exceeds ε / 2. It is the hard threshold at ε / 2 whose
    values travel on the grid. With ``value_dtype="int8"`` they travel as whole numbers. A value beyond 127 steps is
    cut off at 127, and the rest goes out in the steps that follow.

    Args:
        step: ε is the largest power of two that is no larger, so that sums of multiples are exact; in gradient units.

    Raises:
        ValueError: a step that is no number of such a size.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(4,))
        >>> ScaledIntegerRounding(step=0.5).select(torch.tensor([0.2, -0.3, 1.1, 0.25]), layout).values.tolist()
        [-0.5, 1.0]
    """

    def __init__(self, step: float) -> None:
        is_number = isinstance(step, (int, float)) and not isinstance(step, bool)
        if not is_number or not SMALLEST_STEP <= step <= LARGEST_STEP:
            raise ValueError(
                f"Invalid {step=}. Must be a number from {SMALLEST_STEP:.3g} to {LARGEST_STEP:.3g}, in gradient units, "
                "such as 0.001."
            )
        self.step = step

    def grid_step(self, most_steps: int = 0) -> float:
        """Returns ε; see `Sparsifier.grid_step`."""
        return power_of_two(self.step)

    def require_grid(self, value_dtype: str, most_steps: int) -> None:
        """Does nothing: there is one; see `Sparsifier.require_grid`."""

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Marks what is not rounded to 0; see `MarkingSparsifier.mark`."""
        return self.values(compensated, layout) != 0  # NaN is not 0

    def values(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Returns multiples of ε; see `MarkingSparsifier.values`."""
        rounded = self._whole(compensated / self.grid_step(), layout).mul_(self.grid_step())
        # So large a number that its steps overflow is a multiple of ε as it is.
        return torch.where(rounded.isfinite(), rounded, compensated)

    def _whole(self, steps: Tensor, layout: LayerLayout) -> Tensor:
        return steps.round()  # half to even


class StochasticRounding(ScaledIntegerRounding):
    """Rounds every coordinate up or down to a multiple of a step ε, so that on average it is what it was.

    Stochastic rounding to a grid (Gupta et al., *Deep learning with limited numerical precision*, ICML 2015), an
    absolute compressor (Sahu et al., NeurIPS 2021, section 5): of a coordinate x ε the next multiple above is sent with
    the probability x − ⌊x⌋. With error feedback every coordinate of the residual stays below ε. Being unbiased it does
    without, too: ``error_feedback="none"``.

    The random bits follow from the seed, the number of the step, the worker and the layer's name: a resumed run rounds
    as one without a stop would have, on every kind of device and however DDP cuts its buckets.

    Args:
        step: as of `ScaledIntegerRounding`.
        seed: at least 0.

    Raises:
        ValueError: a step that is no number of such a size, or a seed that is no whole number of at least 0.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(1000,))
        >>> sent = StochasticRounding(step=0.5).select(torch.full((1000,), 0.125), layout)
        >>> sent.values.unique().tolist(), 200 < sent.indices.numel() < 300
        ([0.5], True)
    """

    def __init__(self, step: float, *, seed: int = 0) -> None:
        super().__init__(step)
        self._random = RandomSource(seed)
        self.seed = seed
        self._step_number = self._rank = 0

    def begin_step(self, step: int, rank: int) -> None:
        """Notes what this step's random bits follow from."""
        self._step_number, self._rank = step, rank

    def _whole(self, steps: Tensor, layout: LayerLayout) -> Tensor:
        random_bits = self._random.random_bits(layout, steps.device, self._step_number, self._rank)
        uniform = random_bits.bitwise_and_((1 << BITS) - 1).to(steps.dtype).div_(1 << BITS)
        below = steps.floor()
        return below.add_(steps - below > uniform)
