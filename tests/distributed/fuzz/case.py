"""Draws a random training from its seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
WIRES = {"bfloat16": torch.bfloat16}
EXCHANGES = ("auto", "gather", "dense", "reduce_scatter")
ZEROING = ("none", "zeros", "used")
SIZES = (1, 2, 3, 17, 127, 128, 129, 1000, 4099)
LARGE_SIZES = (40_000, 65_535, 65_536, 65_537, 70_001)
BUCKET_CAPS_MB = (1e-6, 0.001, 0.02, 0.27, 25.0)
HUGE = 1e30
LOSS_SCALES = (2.0**10, 2.0**16, 1000.0)
BAD_VALUES = ("nan", "inf", "-inf")
DISCARDED = 3
"""Number of a backward with dropped gradients among the backwards of a step."""


@dataclass(frozen=True)
class Layer:
    """One parameter tensor, and the magnitude of its gradients."""

    name: str
    size: int
    dtype: str
    scale: float


@dataclass(frozen=True)
class Case:
    """All settings of a training; see ``draw_case``.

    Attributes:
        unused: the option of DDP that allows unused layers.
        skips: ``(step, worker, layer)`` that a backward skips; step −1 stands for every step.
        skips_late: whether only the last backward of a step skips the layer.
        zeroing: how gradients are cleared before a step; "used" clears only those of layers that the worker will use.
        step_scales: factors of the gradients of each step.
        silent: ``(step, worker)`` whose gradients are zero.
        bad: ``(step, worker, layer, value)`` of a gradient that contains the value.
        loss_scale: first scale of a GradScaler; it halves after an overflow and doubles after growth_interval steps.
        rates: the learning rates of even and of odd layers, by step.
        edges: whether some coordinates equal λ or λ / 2, or differ from them in the last bit.
        attempts: by step, whether the optimizers of even and odd layers step.
        has_two_optimizers: one for even and one for odd layers.
        keeps: whether unused gradients join the next step; otherwise they are dropped.
        discards: steps after a backward with dropped gradients.
        resumes: ``(step, moment, bucket_cap_mb)``: the training is saved in this step, after its backward or after its
            optimizer, and goes on in a new DDP module with other buckets.
    """

    seed: int
    num_workers: int
    layers: tuple[Layer, ...]
    bucket_cap_mb: float
    gradient_as_bucket_view: bool
    unused: str
    skips: tuple[tuple[int, int, int], ...]
    skips_late: bool
    zeroing: str
    sparsifier: str
    threshold: float
    density: float
    layer_thresholds: tuple[tuple[str, float], ...]
    value_dtype: str
    exchange: str
    local_clip_norm: float | None
    micro_steps: int
    step_scales: tuple[float, ...]
    silent: tuple[tuple[int, int], ...]
    bad: tuple[int, int, int, str] | None
    loss_scale: float | None
    growth_interval: int
    rates: tuple[tuple[float, float], ...]
    edges: bool
    per_layer_stats: bool
    attempts: tuple[tuple[bool, bool], ...]
    has_two_optimizers: bool
    keeps: bool
    discards: tuple[int, ...]
    resumes: tuple[tuple[int, str, float], ...]

    @property
    def steps(self) -> int:
        return len(self.step_scales)

    @property
    def num_elements(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def dtype(self) -> str:
        dtypes = {layer.dtype for layer in self.layers}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    def backwards(self, step: int) -> range:
        """Return the backwards of a step; the last exchanges. A static graph cannot accumulate in its first step."""
        is_first = step == 0 or any(at == step - 1 for at, _, _ in self.resumes)
        is_single = self.unused == "static" and is_first
        return range(self.micro_steps - 1 if is_single else 0, self.micro_steps)

    def uses(self, step: int, micro: int, worker: int, layer: int) -> bool:
        """Return whether a backward of a worker reaches a layer."""
        if self.skips_late and micro < self.micro_steps - 1:
            return True
        return not {(step, worker, layer), (-1, worker, layer)} & set(self.skips)

    def is_used(self, step: int, worker: int, layer: int) -> bool:
        """Return whether any backward of a worker in a step reaches a layer."""
        return any(self.uses(step, micro, worker, layer) for micro in self.backwards(step))

    def is_zeroed(self, step: int, worker: int, layer: int) -> bool:
        """Return whether a worker clears the gradient of a layer before a step."""
        if step in self.discards:
            return True
        if step and self.keeps and not self.attempts[step - 1][layer % 2]:
            return False
        return self.zeroing != "used" or self.is_used(step, worker, layer)


class Draw:
    """Draws from a seed by ``random()`` alone, the only method that Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def whole(self, low: int, high: int) -> int:
        """Draw from low to high inclusive."""
        return low + int(self._random.random() * (high - low + 1))

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.whole(0, len(options) - 1)]

    def number(self, lowest_exponent: int, highest_exponent: int) -> float:
        """Draw in [0.5, 1) times a power of two; in half of all cases with few enough bits for bfloat16."""
        mantissa = 0.5 + self._random.random() / 2
        if self.chance(0.5):
            mantissa = int(mantissa * 128) / 128
        return math.ldexp(mantissa, self.whole(lowest_exponent, highest_exponent))


def draw_case(seed: int) -> Case:
    """Return the case of a seed, which never changes on any machine."""
    draw = Draw(seed)
    num_workers = draw.one_of((1, 2, 2, 3, 3, 4, 4))
    steps = draw.whole(4, 12)
    layers = _draw_layers(draw)
    scale = layers[0].scale
    sparsifier = draw.one_of(("threshold", "threshold", "threshold", "density", "top_k"))
    draw.chance(0)  # so that later choices of a seed stay the same
    exchange = draw.one_of((*EXCHANGES, "reduce_scatter", "auto", "gather"))
    draw.chance(0)  # so that later choices of a seed stay the same
    micro_steps = draw.one_of((1, 1, 1, 2, 3))
    unused, skips = _draw_skips(draw, len(layers), num_workers, steps)
    skips_late = micro_steps > 1 and bool(skips) and unused == "find" and draw.chance(0.5)
    bad = None
    if draw.chance(0.3):
        possible = [index for index in range(len(layers)) if not any(index == layer for _, _, layer in skips)]
        bad = (draw.whole(1, steps - 1), draw.whole(0, num_workers - 1), draw.one_of(possible), draw.one_of(BAD_VALUES))
    zeroing = draw.one_of(ZEROING if unused == "find" and bad is None else ZEROING[:2])
    loss_scale = draw.one_of(LOSS_SCALES) if draw.chance(0.3) else None
    if loss_scale is not None and zeroing == "used":
        zeroing = "none"  # otherwise the scaler unscales an older gradient again
    # A separate stream, so that earlier choices of a seed stay the same.
    more = Draw(seed + 2**32)
    has_two_optimizers = more.chance(0.4)
    attempts = _draw_attempts(more, steps, has_two_optimizers)
    keeps = more.chance(0.5)
    resumes = ()
    if more.chance(0.25):
        moment = more.one_of(("after the backward of", "after"))
        resumes = ((more.whole(0, steps - 2), moment, more.one_of(BUCKET_CAPS_MB)),)
    if unused == "find" and bad is None and loss_scale is None and Draw(seed + 2**33).chance(0.4):
        zeroing = "used"
    jumps = draw.chance(0.4)
    elements = sum(layer.size for layer in layers)
    bucket_cap_mb, is_view = draw.one_of(BUCKET_CAPS_MB), draw.chance(0.5)
    threshold, density = _draw_threshold(draw, scale), draw.one_of((1.0, 0.5, 0.1, 0.01, 0.001))
    draw.whole(1, 3)  # so that later choices of a seed stay the same
    if is_view and keeps and not all(map(all, attempts)) and zeroing == "zeros":
        # All views of a bucket share a version, which tells whether gradients of zeros are untouched.
        zeroing = "none"
    case = Case(
        seed=seed,
        num_workers=num_workers,
        layers=layers,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=is_view,
        unused=unused,
        skips=skips,
        skips_late=skips_late,
        zeroing=zeroing,
        sparsifier=sparsifier,
        threshold=threshold,
        density=density,
        layer_thresholds=_draw_layer_thresholds(draw, layers, scale) if sparsifier != "top_k" else (),
        value_dtype=draw.one_of(("float32", "float32", "bfloat16", "bfloat16")),
        exchange=exchange,
        local_clip_norm=scale * math.sqrt(elements) * draw.number(-4, 3) if draw.chance(0.2) else None,
        micro_steps=micro_steps,
        step_scales=tuple(draw.one_of((1.0, 1.0, 1e4, 1e-4)) if jumps else 1.0 for _ in range(steps)),
        silent=tuple((step, worker) for step in range(steps) for worker in range(num_workers) if draw.chance(0.05)),
        bad=bad,
        loss_scale=loss_scale,
        growth_interval=draw.one_of((2, 1000)),
        rates=_draw_rates(draw, steps),
        edges=draw.chance(0.7),
        per_layer_stats=draw.chance(0.4),
        attempts=attempts,
        has_two_optimizers=has_two_optimizers,
        keeps=keeps,
        discards=tuple(step for step in range(steps) if more.chance(0.2)) if more.chance(0.35) else (),
        resumes=resumes,
    )
    if num_workers == 1:  # sends nothing, so its gradients pass unchanged
        return replace(case, sparsifier="threshold", threshold=0.0, layer_thresholds=(), value_dtype="float32")
    is_above_zero = case.density < 1 if sparsifier == "density" else 0 < case.threshold < HUGE
    if sparsifier != "top_k" and not case.layer_thresholds and is_above_zero and Draw(seed + 2**34).chance(0.3):
        return replace(case, value_dtype="float8")
    return case


def _draw_attempts(draw: Draw, steps: int, has_two_optimizers: bool) -> tuple[tuple[bool, bool], ...]:
    if draw.chance(0.6):
        return ((True, True),) * steps
    attempts = []
    for _ in range(steps):
        even = draw.chance(0.6)
        odd = (draw.chance(0.6) or not even) if has_two_optimizers else even
        attempts.append((even, odd))
    return tuple(attempts)


def _draw_layers(draw: Draw) -> tuple[Layer, ...]:
    dtype_choice = draw.one_of(("float32", "float32", "float64", "bfloat16", "mixed"))
    scale = math.ldexp(1.0, draw.whole(-10, 6))
    layers = []
    for index in range(draw.whole(1, 6)):
        size = draw.one_of(LARGE_SIZES) if draw.chance(0.2) else draw.one_of(SIZES)
        dtype = draw.one_of(tuple(DTYPES)) if dtype_choice == "mixed" else dtype_choice
        name = f"layers.{index}.{draw.one_of(('weight', 'weight', 'bias'))}"
        layers.append(Layer(name, size, dtype, scale if index == 0 else math.ldexp(scale, draw.whole(-2, 2))))
    return tuple(layers)


def _draw_skips(
    draw: Draw, num_layers: int, num_workers: int, steps: int
) -> tuple[str, tuple[tuple[int, int, int], ...]]:
    unused = draw.one_of(("never", "never", "find", "find", "static"))
    skips: list[tuple[int, int, int]] = []
    always_used = draw.whole(0, num_layers - 1)
    for layer in range(num_layers):
        if unused == "never" or layer == always_used:
            continue
        # DDP requires the same static graph on all workers.
        for step in [-1] if unused == "static" else range(steps):
            if draw.chance(0.35):
                everyone = range(num_workers)
                some = everyone if unused == "static" or draw.chance(0.5) else [draw.whole(0, num_workers - 1)]
                skips += [(step, worker, layer) for worker in some]
    return unused, tuple(skips)


def _draw_threshold(draw: Draw, scale: float) -> float:
    kind = draw.one_of(("zero", "tiny", "usual", "usual", "usual", "usual", "large", "huge"))
    return {"zero": 0.0, "huge": HUGE}.get(
        kind, scale * draw.number(*{"tiny": (-60, -20), "large": (4, 9)}.get(kind, (-3, 4)))
    )


def _draw_layer_thresholds(draw: Draw, layers: Sequence[Layer], scale: float) -> tuple[tuple[str, float], ...]:
    if draw.chance(0.6):
        return ()
    patterns = ["*.bias", "layers.[0-2].*", "nothing.*", *(layer.name for layer in layers)]
    return tuple({draw.one_of(patterns): _draw_threshold(draw, scale) for _ in range(draw.whole(1, 4))}.items())


def _draw_rates(draw: Draw, steps: int) -> tuple[tuple[float, float], ...]:
    rates = [(0.5, 0.25)]
    for _ in range(steps - 1):
        even, odd = (rate if draw.chance(0.5) else draw.one_of((0.5, 0.3, 0.125, 0.0)) for rate in rates[-1])
        rates.append((even, even if draw.chance(0.5) else odd))
    return tuple(rates)


def gradient_of(case: Case, step: int, micro: int, worker: int, index: int) -> Tensor:
    """Return the unscaled gradient of a layer in a backward of a worker, equal in every process."""
    layer = case.layers[index]
    dtype = DTYPES[layer.dtype]
    if (step, worker) in case.silent:
        return torch.zeros(layer.size, dtype=dtype)
    place = (((case.seed * 64 + step) * 4 + micro) * 4 + worker) * 8 + index
    values = torch.randn(layer.size, generator=torch.Generator().manual_seed(place)) * layer.scale
    if place % 3 == 0:
        values = values**3 / layer.scale**2  # a few values are much larger
    values = (values * case.step_scales[step]).to(dtype)
    is_last = micro == case.micro_steps - 1
    threshold = own_threshold(case, layer.name)
    if case.edges and threshold and threshold < HUGE:
        # After rounding, in this or the next step, the values are at λ or beside it.
        at = torch.tensor(threshold, dtype=dtype)
        above, below = (torch.nextafter(at, torch.tensor(limit, dtype=dtype)) for limit in (math.inf, 0.0))
        edge = torch.stack([at, -at, at / 2, below, -above, above])[: layer.size]
        values[: edge.numel()] = edge if is_last else 0.0
    if case.bad is not None and case.bad[:3] == (step, worker, index) and is_last:
        values[:: max(1, layer.size // 3)] = float(case.bad[3])
    return values


def own_threshold(case: Case, name: str) -> float | None:
    """Return the fixed λ of a layer, or None."""
    for pattern, threshold in case.layer_thresholds:
        if fnmatchcase(name, pattern):
            return threshold
    return case.threshold if case.sparsifier == "threshold" else None
