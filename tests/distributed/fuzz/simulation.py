"""Simulates n workers in plain tensors from all gradients by parameter name; shares no code with the package."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.distributed.fuzz.case import DISCARDED, WIRES, Case, Layer, gradient_of, own_threshold
from tests.distributed.simulation import through_float8


@dataclass
class Sent:
    """One worker's layer in one step of the simulation.

    Attributes:
        compensated: p.
        sent: out, zeros where nothing is sent.
        kept: e'.
        is_open: mask of elements whose selection is unknown.
        rounding: error bound of p: 0, or the effect of the last bits of a clipping factor.
        count: k.
        quantum: largest difference of two nearby values of p after rounding.
    """

    compensated: Tensor
    sent: Tensor
    kept: Tensor
    is_open: Tensor
    rounding: Tensor
    count: int
    quantum: Tensor


@dataclass
class Simulation:
    """The state of n workers.

    Attributes:
        errors: e after the last optimizer step, by worker and name.
        latest: e' after the last backward, by worker and name; the checker sets it.
        stale: the gradient of every parameter after the last optimizer step, skipped or not.
        threshold: λ of layers without their own λ; 0 during calibration, None for Top-k.
        measured: (1/n) Σ_i ‖g_i‖² from which λ follows; None until it was measured.
    """

    case: Case
    errors: list[dict[str, Tensor]] = field(init=False)
    latest: list[dict[str, Tensor]] = field(default_factory=list)
    stale: dict[str, Tensor | None] = field(default_factory=dict)
    threshold: float | None = field(init=False)
    measured: float | None = None

    def __post_init__(self) -> None:
        self.errors = [
            {layer.name: torch.zeros(layer.size, dtype=error_dtype(layer)) for layer in self.case.layers}
            for _ in range(self.case.num_workers)
        ]
        self.threshold = {"threshold": self.case.threshold, "density": 0.0, "top_k": None}[self.case.sparsifier]
        workers = range(self.case.num_workers)
        # Residuals that wait for an optimizer step, by worker and name.
        self._pending: list[dict[str, Tensor]] = [{} for _ in workers]
        self._reached: list[set[str]] = [set() for _ in workers]

    @property
    def is_calibrating(self) -> bool:
        return self.case.sparsifier == "density" and self.case.density < 1 and self.measured is None

    def step(
        self, step: int, scale: float | None, actual: list[dict[str, Tensor]]
    ) -> tuple[list[dict[str, Sent]], float]:
        """Return the sent values of every worker by name, and (1/n) Σ_i ‖g_i‖².

        Args:
            step: its number.
            scale: S.
            actual: the workers' residuals after the step, used only where the selection is ambiguous: equal
                magnitudes in Top-k, or λ closer than the last bits of a clipping factor.
        """
        self._drop_what_is_zeroed(step)
        compensated: list[list[tuple[Tensor, Tensor, bool]]] = []
        squared_norm = 0.0
        for worker in range(self.case.num_workers):
            gradients = self._gradients(step, worker, scale)
            precision = self._clip(gradients, scale)
            squared_norm += sum(squared(gradient) for gradient in gradients.values()) / (scale or 1.0) ** 2
            errors = self.errors[worker] | self._pending[worker]
            compensated.append(
                [
                    (
                        *_compensate(layer, errors[layer.name], gradients.get(layer.name), scale, precision),
                        layer.name in gradients,
                    )
                    for layer in self.case.layers
                ]
            )
            self._reached[worker] = set(gradients)
        workers = [
            {
                layer.name: self._send(layer, *inputs, residuals[layer.name])
                for layer, inputs in zip(self.case.layers, of_worker, strict=True)
            }
            for of_worker, residuals in zip(compensated, actual, strict=True)
        ]
        return workers, squared_norm / self.case.num_workers

    def threshold_of(self, name: str) -> float:
        own = own_threshold(self.case, name)
        return (self.threshold or 0.0) if own is None else own

    def discard(self, step: int, scale: float | None) -> float:
        """Simulate a backward with dropped gradients, which changes only the calibration; return (1/n) Σ_i ‖g_i‖²."""
        self.drop_pending()
        norms = []
        for worker in range(self.case.num_workers):
            gradients = self._of_one_backward(step, DISCARDED, worker, scale)
            self._clip(gradients, scale)
            norms.append(sum(squared(gradient) for gradient in gradients.values()) / (scale or 1.0) ** 2)
        self.drop_pending()
        return sum(norms) / self.case.num_workers

    def drop_pending(self) -> None:
        """Drop gradients and the pending changes of residuals."""
        for held in self._pending:
            held.clear()
        self.stale = {}

    def end_backward(self) -> None:
        """Mark the residuals of reached layers as pending until an optimizer step."""
        for worker, latest in enumerate(self.latest):
            for name, residual in latest.items():
                if name in self._reached[worker] or name in self._pending[worker]:
                    self._pending[worker][name] = residual
                else:  # the backward did not reach the layer
                    self.errors[worker][name] = residual

    def commit(self, has_stepped: tuple[bool, bool]) -> None:
        """Commit pending residuals of even and odd layers whose optimizer has stepped."""
        for index, layer in enumerate(self.case.layers):
            if not has_stepped[index % 2]:
                continue
            name = layer.name
            for worker in range(self.case.num_workers):
                if name in self._pending[worker]:
                    self.errors[worker][name] = self._pending[worker].pop(name)

    def _drop_what_is_zeroed(self, step: int) -> None:
        for worker in range(self.case.num_workers):
            for index, layer in enumerate(self.case.layers):
                if self.case.is_zeroed(step, worker, index) or self.stale.get(layer.name) is None:
                    self._pending[worker].pop(layer.name, None)

    def _gradients(self, step: int, worker: int, scale: float | None) -> dict[str, Tensor]:
        """Return the gradients that DDP exchanges: sums of S · g over backwards, plus stale gradients."""
        gradients: dict[str, Tensor] = {}
        for index, layer in enumerate(self.case.layers):
            stale = self.stale.get(layer.name)
            is_kept = stale is not None and not self.case.is_zeroed(step, worker, index)
            if is_kept and self.case.is_used(step, worker, index):
                gradients[layer.name] = stale.clone()
        for micro in self.case.backwards(step):
            for name, gradient in self._of_one_backward(step, micro, worker, scale).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def old_gradient(self, step: int, index: int) -> Tensor | None:
        """Return the mean of stale gradients of workers that skip a layer which others use, or None."""
        layer, n = self.case.layers[index], self.case.num_workers
        stale = self.stale.get(layer.name)
        is_used = [self.case.is_used(step, worker, index) for worker in range(n)]
        leave_out = [worker for worker in range(n) if not is_used[worker]]
        kept = sum(not self.case.is_zeroed(step, worker, index) for worker in leave_out)
        if stale is None or not kept or not any(is_used):
            return None
        old = stale.to(error_dtype(layer))
        return sum([old] * (kept - 1), old) / n

    def _of_one_backward(self, step: int, micro: int, worker: int, scale: float | None) -> dict[str, Tensor]:
        gradients = {}
        for index, layer in enumerate(self.case.layers):
            if self.case.uses(step, micro, worker, index):
                g = gradient_of(self.case, step, micro, worker, index)
                gradients[layer.name] = g if scale is None else g * torch.tensor(scale, dtype=g.dtype)
        return gradients

    def _clip(self, gradients: dict[str, Tensor], scale: float | None) -> float:
        """Clip in place; return the relative error, because a norm depends on the order of summation."""
        if self.case.local_clip_norm is None:
            return 0.0
        norm = math.sqrt(sum(squared(gradient) for gradient in gradients.values())) / (scale or 1.0)
        factor = self.case.local_clip_norm / (norm + 1e-6)
        if factor > 1.001:
            return 0.0
        for gradient in gradients.values():
            gradient.mul_(min(factor, 1.0) if math.isfinite(norm) else 0.0)
        return precision_of(self.case)

    def _send(self, layer: Layer, p: Tensor, rounding: Tensor, is_used: bool, actual: Tensor) -> Sent:
        is_sent = is_open = torch.zeros(layer.size, dtype=torch.bool)
        count = 0
        if is_used:
            is_sent, is_open, count = self._select(layer, p, rounding)
        threshold = self.threshold_of(layer.name)
        rounded = round_values(p, self.case.value_dtype, threshold)
        quantum = wire_quantum(p, self.case.value_dtype, threshold)
        # The worker's residual resolves an open selection: a residual near p was kept.
        was_sent = (actual - (p - rounded)).abs() < (actual - p).abs()
        # A value that rounds to zero leaves the same residual in both cases.
        tells = is_open & (rounded != 0)
        followed = torch.where(tells, was_sent, is_sent)
        if self.case.sparsifier != "top_k":
            count += int(followed.sum()) - int(is_sent.sum())
        is_sent, is_open = followed, is_open & ~tells
        rest = p - rounded
        kept = torch.where(is_sent, torch.where(rest.isfinite(), rest, 0.0), p)
        sent = torch.where(is_sent, rounded, torch.zeros_like(p))
        return Sent(p, sent, kept, is_open, rounding, count, quantum)

    def _select(self, layer: Layer, p: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor, int]:
        magnitude = p.abs().double()
        if self.case.sparsifier != "top_k":
            threshold = self.threshold_of(layer.name)
            is_sent = ~(magnitude < threshold)
            return is_sent, ((magnitude - threshold).abs() <= rounding) & (rounding > 0), int(is_sent.sum())
        is_bad = ~magnitude.isfinite()
        room = max(1, int(self.case.density * layer.size)) - int(is_bad.sum())
        if room <= 0:
            return is_bad, torch.zeros_like(is_bad), int(is_bad.sum())
        finite = magnitude.masked_fill(is_bad, -1.0)
        smallest = finite.sort(descending=True).values[room - 1]
        is_sent = is_bad | (finite >= smallest)
        slack = 2 * rounding.double().amax()
        is_open = (finite - smallest).abs() <= slack
        if not slack and int(is_sent.sum()) == room + int(is_bad.sum()):
            is_open = torch.zeros_like(is_bad)  # no ties at the smallest magnitude
        return is_sent, is_open, room + int(is_bad.sum())


def squared(values: Tensor) -> float:
    return float(values.double().square().sum())


def _compensate(
    layer: Layer, error: Tensor, gradient: Tensor | None, scale: float | None, precision: float
) -> tuple[Tensor, Tensor]:
    """Return p and its error bound."""
    if gradient is None:
        return error, torch.zeros_like(error)
    g = gradient.to(error.dtype)
    g = g if scale is None else g / torch.tensor(scale, dtype=g.dtype)
    p = error + g
    if not precision:
        return p, torch.zeros_like(p)
    ulps = 2 * torch.finfo(error.dtype).eps * (p.abs() + error.abs())
    share = 2.0**-6 if layer.dtype == "bfloat16" else precision  # a clipped bfloat16 and its factor have 8 bits
    return p, (share * g.abs() + ulps).nan_to_num(0.0, 0.0)


def squared_slack(result: Sent, case: Case) -> float:
    """Return the error bound of ‖e'‖²: |‖e + δ‖² − ‖e‖²| <= 2 ‖e‖ ‖δ‖ + ‖δ‖²."""
    off = torch.where(result.rounding > 0, result.rounding + result.quantum, 0.0)
    off += torch.where(result.is_open, result.compensated.abs(), 0.0)
    return 2 * math.sqrt(squared(result.kept) * squared(off)) + squared(off)


def error_dtype(layer: Layer) -> torch.dtype:
    return torch.float64 if layer.dtype == "float64" else torch.float32


def precision_of(case: Case) -> float:
    """Return the relative error of squared norms: sums of 1,024 float32 squares, or of float64."""
    return 1e-12 if case.dtype == "float64" else 1e-5


def float8_scale(threshold: float) -> float:
    """Return 64 times the largest power of two up to λ."""
    return 64 * 2.0 ** math.floor(math.log2(threshold))


def round_values(values: Tensor, value_dtype: str, threshold: float) -> Tensor:
    """Return the values after the wire; finite values stay finite."""
    if value_dtype == "float8" and threshold:
        rounded = through_float8(values, float8_scale(threshold)).to(values.dtype)
        return torch.where(values.isfinite(), rounded, torch.nan)
    if value_dtype not in WIRES:
        return values
    largest = torch.finfo(WIRES[value_dtype]).max
    limited = torch.where(values.isinf(), values, values.clamp(-largest, largest))
    return limited.to(WIRES[value_dtype]).to(values.dtype)


def wire_quantum(values: Tensor, value_dtype: str, threshold: float) -> Tensor:
    """Return the largest difference of two nearby values after rounding."""
    if value_dtype == "float8" and threshold:
        scale = float8_scale(threshold)
        return (values.abs().clamp(max=448 * scale) / 8 + scale / 512).nan_to_num(0.0)
    if value_dtype not in WIRES:
        return torch.zeros_like(values)
    info = torch.finfo(WIRES[value_dtype])
    return (info.eps * values.abs().clamp(max=info.max) + info.smallest_normal * info.eps).nan_to_num(0.0)
