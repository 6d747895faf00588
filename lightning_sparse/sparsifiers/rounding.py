"""Rounding to a grid: absolute compressors that send nonzero multiples of a step."""

from math import frexp, ldexp

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import is_number, require_count
from lightning_sparse.sparsifiers.protocol import LayerLayout, MarkingSparsifier
from lightning_sparse.sparsifiers.random_k import random_bits

BITS = 24
"""Random bits per element, the resolution of float32 between 1/2 and 1."""
SMALLEST_STEP, LARGEST_STEP = 2.0**-126, 2.0**100
"""Limits of ε, within which 1 / ε and sums of multiples of ε are float32 numbers."""


def power_of_two(largest: float) -> float:
    """Return the largest power of two up to this positive number, within the limits of a step."""
    _, exponent = frexp(largest)
    return min(max(ldexp(1.0, exponent - 1), SMALLEST_STEP), LARGEST_STEP)


class ScaledIntegerRounding(MarkingSparsifier):
    """Rounds every coordinate to the nearest multiple of a step ε, and sends nonzero multiples.

    Scaled integer rounding as in SwitchML (Sapio et al., NSDI 2021), an absolute compressor (Sahu et al., NeurIPS 2021,
    section 5): with error feedback no coordinate of the residual exceeds ε / 2. It is the hard threshold at ε / 2 whose
    values lie on the grid. With ``value_dtype="int8"`` they are sent as whole numbers. A value beyond 127 steps is cut
    off at 127, and the rest is sent in the next steps.

    Args:
        step: ε is the largest power of two up to this, so that sums of multiples are exact; in gradient units.

    Raises:
        ValueError: a step outside 2^-126 … 2^100.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(4,))
        >>> ScaledIntegerRounding(step=0.5).select(torch.tensor([0.2, -0.3, 1.1, 0.25]), layout).values.tolist()
        [-0.5, 1.0]
    """

    def __init__(self, step: float) -> None:
        if not is_number(step) or not SMALLEST_STEP <= step <= LARGEST_STEP:
            raise ValueError(
                f"Invalid {step=}. Must be a number from {SMALLEST_STEP:.3g} to {LARGEST_STEP:.3g}, in gradient units, "
                "such as 0.001."
            )
        self.step = step

    def grid_step(self, most_steps: int = 0) -> float:
        """Return ε; see `Sparsifier.grid_step`."""
        return power_of_two(self.step)

    def why_no_grid(self, most_steps: int) -> str | None:
        """Return None, because every rounding has a step; see `Sparsifier.why_no_grid`."""
        return None

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Mark values that do not round to 0; see `MarkingSparsifier.mark`."""
        return self.values(compensated, layout) != 0  # NaN is not 0

    def values(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Return multiples of ε; see `MarkingSparsifier.values`."""
        rounded = self._whole_steps(compensated / self.grid_step(), layout).mul_(self.grid_step())
        # A number whose steps overflow is already a multiple of ε.
        return torch.where(rounded.isfinite(), rounded, compensated)

    def _whole_steps(self, steps: Tensor, layout: LayerLayout) -> Tensor:
        return steps.round()  # rounds half to even


class StochasticRounding(ScaledIntegerRounding):
    """Rounds every coordinate up or down to a multiple of a step ε, without a bias.

    This is stochastic rounding to a grid (Gupta et al., *Deep learning with limited numerical precision*, ICML 2015),
    an absolute compressor (Sahu et al., NeurIPS 2021, section 5). It rounds x ε up with probability x − ⌊x⌋. With error
    feedback every coordinate of the residual stays below ε.

    The random bits depend on the seed, the number of the step, the worker and the layer's name. A resumed run therefore
    rounds like an uninterrupted run, on every kind of device and with any buckets of DDP.

    Args:
        step: see `ScaledIntegerRounding`.
        seed: at least 0.

    Raises:
        ValueError: an invalid step, or a seed that is not a whole number of at least 0.

    Example:
        >>> layout = LayerLayout(names=("weight",), sizes=(1000,))
        >>> sent = StochasticRounding(step=0.5).select(torch.full((1000,), 0.125), layout)
        >>> sent.values.unique().tolist(), 200 < sent.indices.numel() < 300
        ([0.5], True)
    """

    def __init__(self, step: float, *, seed: int = 0) -> None:
        super().__init__(step)
        require_count("seed", seed, least=0)
        self.seed = seed
        self._step_number = self._rank = 0

    def begin_step(self, step: int, rank: int) -> None:
        """Note the number of the step and the rank."""
        self._step_number, self._rank = step, rank

    def _whole_steps(self, steps: Tensor, layout: LayerLayout) -> Tensor:
        bits = random_bits(layout, steps.device, seed=self.seed, step=self._step_number, rank=self._rank)
        uniform = bits.bitwise_and_((1 << BITS) - 1).to(steps.dtype).div_(1 << BITS)
        below = steps.floor()
        return below.add_(steps - below > uniform)
