"""The form of a value in a payload: a floating dtype or a multiple of a step."""

from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Literal

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor

from lightning_sparse.sparsifiers.protocol import Sparsifier

ValueDtype = Literal["float32", "bfloat16", "float8", "int8"]
DTYPES: dict[ValueDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
MAX_GRID_STEPS = {torch.float8_e4m3fn: 448 * 512, torch.int16: 32_767, torch.int8: 127}
"""The largest magnitude in steps. int16 is only for sums of int8 (``exchange/routes/dense.py``)."""


@dataclass(frozen=True)
class Wire:
    """The form of a value on the wire.

    int8 and int16 hold a number of steps. A float8 has four significant bits (e4m3: Micikevicius et al., *FP8 formats
    for deep learning*, 2022, arXiv:2209.05433) and is scaled so that its smallest magnitude is a step, so it also
    represents a whole number of steps. Sums of up to 2^24 steps are exact in float32, so any order of additions gives
    the same bits. These three dtypes decode non-finite values as NaN.

    Args:
        dtype: float32, float64 or bfloat16; float8_e4m3fn, int8 or int16 for multiples of a step.
        step: ε, a power of two; 1 for a dtype without steps.
    """

    dtype: torch.dtype
    step: float = 1.0

    @property
    def is_quantised(self) -> bool:
        """Whether values are multiples of the step."""
        return self.dtype in MAX_GRID_STEPS

    @property
    def is_integer(self) -> bool:
        """Whether values are sent as integers."""
        return not self.dtype.is_floating_point

    @property
    def storage(self) -> torch.dtype:
        """The dtype of tensors of encoded values; it is not float8, which few operations support."""
        return torch.uint8 if self.dtype == torch.float8_e4m3fn else self.dtype

    @property
    def scale(self) -> float:
        """The factor from a number in the dtype to its value."""
        return self.step * 512 if self.dtype == torch.float8_e4m3fn else self.step

    @property
    def limit(self) -> float:
        """The largest magnitude in the dtype."""
        return float(torch.iinfo(self.dtype).max) if self.is_integer else torch.finfo(self.dtype).max

    def rounded(self, values: Tensor) -> Tensor:
        """Return the values as they will be decoded, in their own dtype; the rest stays in the residual.

        A finite value beyond the range (448 · 512 steps for float8, 127 for int8) becomes the largest finite value,
        because infinity would look like an overflow to every worker. Later steps send the remainder.
        """
        if self.dtype == values.dtype:
            return values
        if not self.is_quantised:
            within = torch.where(values.isfinite(), values.clamp(-self.limit, self.limit), values)
            return within.to(self.dtype).to(values.dtype)
        scaled = values.div(self.scale).clamp_(-self.limit, self.limit)
        # Rounds half to even, and turns -0.0, which integers cannot hold, into 0.0.
        scaled = scaled.round_().add_(0.0) if self.is_integer else scaled.to(self.dtype).to(values.dtype)
        return torch.where(values.isfinite(), scaled.mul_(self.scale), nan)

    def encoded(self, values: Tensor) -> Tensor:
        """Return rounded values, the results of ``rounded``, in the storage dtype."""
        if not self.is_quantised:
            return values.to(self.dtype)
        scaled = values.div(self.scale)
        if self.is_integer:
            return torch.where(values.isnan(), torch.iinfo(self.dtype).min, scaled).to(self.dtype)
        return scaled.to(self.dtype).view(self.storage)

    def decoded(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Return encoded values in a floating dtype."""
        if not self.is_quantised:
            return encoded.to(dtype)
        if self.is_integer:
            is_nan = encoded == torch.iinfo(self.dtype).min
            return torch.where(is_nan, nan, encoded.to(dtype).mul_(self.scale))
        return encoded.view(self.dtype).to(dtype).mul_(self.scale)


def wire_of(name: ValueDtype, residual_dtype: torch.dtype, sparsifier: Sparsifier | None) -> Wire:
    """Return the form in which values are sent.

    Args:
        name: the option of the strategy. ``"float32"`` means the residual's dtype: float64 in a float64 model.
        residual_dtype: float32 or float64.
        sparsifier: gives the step of float8 and int8. Without a sparsifier or a step, both send the residual's dtype.
    """
    dtype = DTYPES[name]
    if dtype in MAX_GRID_STEPS and sparsifier is not None:
        step = sparsifier.grid_step(MAX_GRID_STEPS[dtype])
        if step is not None:
            return Wire(dtype, step)
        _warn_of_missing_step(name)
    return Wire(residual_dtype if dtype in (torch.float32, *MAX_GRID_STEPS) else dtype)


@lru_cache
def _warn_of_missing_step(name: ValueDtype) -> None:
    rank_zero_warn(
        f"lightning_sparse: with the current thresholds, the range of value_dtype={name!r} is too small (every λ "
        "must be above 0). Values are sent as float32. Choose layer_thresholds closer to the calibrated threshold, "
        "leave out granularity='layer', or use 'bfloat16'."
    )
