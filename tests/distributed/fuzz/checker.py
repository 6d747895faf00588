"""Compares a step of real workers with the simulation."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse import StepStats
from tests.distributed.fuzz.case import DTYPES, Case, Layer
from tests.distributed.fuzz.simulation import Sent, Simulation, error_dtype, precision_of, squared, squared_slack

SMALLEST_SQUARE = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
DTYPE_ROUNDING = {name: torch.finfo(dtype).eps for name, dtype in DTYPES.items()}


class Difference(AssertionError):
    """A step that differs from the simulation."""


@dataclass
class Checker:
    """Checks steps of all workers against the simulation, on rank 0."""

    case: Case
    simulation: Simulation = field(init=False)
    exchanges: int = 0
    shared: tuple[int, float | None, float | None] = field(init=False)
    partial_steps: int = 0

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.case)
        self.note_shared()

    def note_shared(self) -> None:
        """Remember the shared state of the last optimizer step, which a checkpoint contains."""
        self.shared = (self.exchanges, self.simulation.measured, self.simulation.threshold)

    def resume(self) -> None:
        """Restore the saved state."""
        self.exchanges, self.simulation.measured, self.simulation.threshold = self.shared
        self.simulation.drop_pending()

    def check(
        self,
        step: int,
        scale: float | None,
        residuals: list[dict[str, Tensor]],
        gradients: dict[str, Tensor | None],
        stats: StepStats,
        threshold_after: float | None,
    ) -> None:
        """Raise a Difference unless the step equals the simulation.

        Args:
            step: its number.
            scale: S of the step.
            residuals: residuals of every worker by name, after the backward.
            gradients: ``.grad`` after the backward, equal on every worker.
            stats: statistics of the step, equal on every worker.
            threshold_after: λ of the sparsifier after the step, None during calibration.
        """
        case, simulation = self.case, self.simulation
        if case.sparsifier == "density" and simulation.threshold and stats.threshold:
            # The simulation takes over the controller's λ, which is bounded. A resume may undo the last changes.
            if not 0.2 < stats.threshold / simulation.threshold < 10:
                raise Difference(f"step {step}: λ is {stats.threshold} after {simulation.threshold}")
            simulation.threshold = stats.threshold
        workers, squared_gradient_norm = simulation.step(step, scale, residuals)
        non_finite = sum(int((~result.sent.isfinite()).sum()) for worker in workers for result in worker.values())
        for index, layer in enumerate(case.layers):
            of_workers = [worker[layer.name] for worker in workers]
            is_used = [case.is_used(step, worker, index) for worker in range(case.num_workers)]
            gradient = gradients[layer.name]
            if not any(is_used):
                self._check_untouched(step, index, gradient)
            elif gradient is None:
                raise Difference(f"step {step}, {layer.name}: no gradient, though a worker used it")
            else:
                self._check_conservation(
                    step, index, of_workers, [of_worker[layer.name] for of_worker in residuals], gradient, scale
                )
            for worker, result in enumerate(of_workers):
                actual = residuals[worker][layer.name]
                where = f"step {step}, worker {worker}, residual of {layer.name}"
                if is_used[worker]:
                    self._check_bound(where, layer, actual)
                quantum = torch.where(result.rounding > 0, result.quantum, 0.0)
                require_close(where, actual, result.kept, result.rounding + quantum)
            if any(is_used) and gradient is not None:
                self._check_average(step, index, of_workers, gradient, scale)
        self._check_stats(step, stats, workers, squared_gradient_norm, non_finite)
        self._check_calibration(step, squared_gradient_norm, threshold_after)
        simulation.latest = residuals
        simulation.end_backward()
        self.exchanges += 1
        self.partial_steps += 0 < stats.density < 1

    def check_discarded(self, step: int, scale: float | None, threshold_after: float | None) -> None:
        """Raise a Difference if calibration differs after a backward with dropped gradients."""
        squared_gradient_norm = self.simulation.discard(step, scale)
        self._check_calibration(step, squared_gradient_norm, threshold_after)
        self.exchanges += 1

    def check_committed(
        self, step: int, has_stepped: tuple[bool, bool], residuals: list[dict[str, Tensor]], what: str = "committed"
    ) -> None:
        """Raise a Difference unless the residuals after steps of optimizers (even, odd layers) equal the simulation."""
        self.simulation.commit(has_stepped)
        if any(has_stepped):
            self.note_shared()
        for worker, (actual, expected) in enumerate(zip(residuals, self.simulation.errors, strict=True)):
            for name, residual in expected.items():
                where = f"step {step}, worker {worker}, {what} residual of {name}"
                require_close(where, actual[name], residual, torch.zeros_like(residual))

    def _check_untouched(self, step: int, index: int, gradient: Tensor | None) -> None:
        """Raise a Difference if the gradient of a layer that no worker used has changed."""
        name = self.case.layers[index].name
        had = None if self.case.is_zeroed(step, 0, index) else self.simulation.stale.get(name)
        actual, expected = ((torch.zeros(1) if value is None else value).double() for value in (gradient, had))
        if not torch.allclose(actual, expected, rtol=0, atol=0, equal_nan=True):
            raise Difference(f"step {step}, {name}: has {gradient} instead of {had}, though no worker used it")

    def _check_conservation(
        self, step: int, index: int, workers: list[Sent], residuals: list[Tensor], gradient: Tensor, scale: float | None
    ) -> None:
        """Check e + g/S = out + e', summed over the workers, with their real residuals."""
        layer, n = self.case.layers[index], self.case.num_workers
        sent = [term.compensated.double() - actual.double() for term, actual in zip(workers, residuals, strict=True)]
        average = sum(sent[1:], sent[0]) / n
        tolerance = sum_rounding(sent, n, layer) + sum(term.rounding.double() for term in workers) / n
        # p − out is exact except for values far beyond the range of bfloat16.
        tolerance += torch.finfo(workers[0].kept.dtype).eps * sum(term.compensated.double().abs() for term in workers)
        is_finite = torch.stack([term.compensated.isfinite() for term in workers]).all(0)
        factor = 1.0 if scale is None else scale
        average *= factor
        old = self.simulation.old_gradient(step, index)
        if old is not None:
            average += old.double()
            is_finite &= old.isfinite()
            tolerance += 2 * torch.finfo(old.dtype).eps * old.double().abs() / factor
        tolerance = tolerance * factor + DTYPE_ROUNDING[layer.dtype] * average.abs()
        require_close(
            f"step {step}, conservation in {layer.name}",
            torch.where(is_finite, gradient.double(), 0.0),
            torch.where(is_finite, average, 0.0),
            tolerance.nan_to_num(0.0),
        )

    def _check_bound(self, where: str, layer: Layer, actual: Tensor) -> None:
        if self.case.sparsifier == "top_k" or self.case.value_dtype != "float32":
            return
        threshold = self.simulation.threshold_of(layer.name)
        beyond = (~(actual.abs().double() < threshold) & (actual != 0)).nonzero().flatten()
        if beyond.numel():
            index = int(beyond[0])
            raise Difference(f"{where}[{index}]: {actual[index].item()!r} is not below λ = {threshold!r}")

    def _check_average(self, step: int, index: int, workers: list[Sent], gradient: Tensor, scale: float | None) -> None:
        case, n, layer = self.case, self.case.num_workers, self.case.layers[index]
        sent = [term.sent for term in workers]
        average = sum(sent, torch.zeros_like(sent[0])) / n
        # The sum of two terms is unique. An all-reduce of more terms, as in calibration, has its own order.
        adds_in_order = case.exchange in ("gather", "reduce_scatter") and not self.simulation.is_calibrating
        is_exact = n <= 2 or adds_in_order
        off = torch.zeros_like(average, dtype=torch.float64)
        for term in workers:
            quantum = torch.where(term.rounding > 0, term.quantum, 0.0)
            off += (term.rounding + quantum).double() / n
        # An error in the last bits of a term also changes the rounding of sums with larger terms.
        rounding = sum_rounding([values.double() for values in sent], n, layer)
        rounding += DTYPE_ROUNDING[layer.dtype] * average.double().abs()
        tolerance = torch.where((off > 0) | (not is_exact), off + rounding, 0.0)
        if scale is not None:
            average, tolerance = average * torch.tensor(scale, dtype=average.dtype), tolerance * scale
        old = self.simulation.old_gradient(step, index)
        if old is not None:
            average = average + old
            if bool((tolerance > 0).any()):
                tolerance = tolerance + (torch.finfo(old.dtype).eps + DTYPE_ROUNDING[layer.dtype]) * old.double().abs()
        is_known = ~torch.stack([term.is_open for term in workers]).any(0)
        require_close(
            f"step {step}, averaged gradient of {layer.name}",
            torch.where(is_known, gradient, 0.0),
            torch.where(is_known, average.to(gradient.dtype), 0.0),
            tolerance,
        )

    def _check_stats(
        self, step: int, stats: StepStats, workers: list[dict[str, Sent]], squared_gradient_norm: float, non_finite: int
    ) -> None:
        case, n = self.case, self.case.num_workers
        is_clipped = any(bool((result.rounding > 0).any()) for worker in workers for result in worker.values())
        tolerance = 4 * self._norm_tolerance(is_clipped)
        counts = {layer.name: sum(worker[layer.name].count for worker in workers) for layer in case.layers}
        open_counts = {layer.name: 0 for layer in case.layers}
        if case.sparsifier != "top_k":
            open_counts = {name: sum(int(worker[name].is_open.sum()) for worker in workers) for name in open_counts}
        errors = {layer.name: sum(squared(worker[layer.name].kept) for worker in workers) / n for layer in case.layers}
        slack = {
            layer.name: sum(squared_slack(worker[layer.name], case) for worker in workers) / n for layer in case.layers
        }
        # Squares are float32, and the smallest are subnormal.
        slack = {layer.name: slack[layer.name] + layer.size * SMALLEST_SQUARE for layer in case.layers}
        is_calibrated = case.sparsifier == "density" and case.density < 1  # a density of 1 is λ = 0
        has_layers = case.per_layer_stats or (is_calibrated and bool(case.layer_thresholds))
        for name, value, expected in (
            ("step", stats.step, self.exchanges),
            ("num_workers", stats.num_workers, n),
            ("num_elements", stats.num_elements, case.num_elements),
            ("non_finite", stats.non_finite, non_finite),
            ("threshold", stats.threshold, self.simulation.threshold),
            ("dense_bytes", stats.dense_bytes, sum(layer.size * DTYPES[layer.dtype].itemsize for layer in case.layers)),
            ("layers", sorted(stats.layers), sorted(counts) if has_layers else []),
        ):
            if value != expected:
                raise Difference(f"step {step}, statistics: {name} is {value!r} instead of {expected!r}")
        measured = squared_gradient_norm if self.simulation.is_calibrating else 0.0
        self._require_near(step, "squared_gradient_norm", stats.squared_gradient_norm, measured, tolerance)
        self._require_near(
            step, "squared_error", stats.squared_error, sum(errors.values()), tolerance, sum(slack.values())
        )
        self._require_count(step, "selected", stats.selected, sum(counts.values()), sum(open_counts.values()))
        self._require_near(step, "error_norm", stats.error_norm, math.sqrt(stats.squared_error), 1e-12)
        for name, layer in stats.layers.items():
            self._require_count(step, f"selected of {name}", layer.selected, counts[name], open_counts[name])
            self._require_near(
                step, f"density of {name}", layer.density, layer.selected / n / layer.num_elements, 1e-12
            )
            self._require_near(
                step, f"squared_error of {name}", layer.squared_error, errors[name], tolerance, slack[name]
            )

    def _check_calibration(self, step: int, squared_gradient_norm: float, threshold_after: float | None) -> None:
        simulation, case = self.simulation, self.case
        if not simulation.is_calibrating:
            return
        if 0 < squared_gradient_norm < math.inf:
            simulation.measured = squared_gradient_norm
        expected = None
        if simulation.measured is not None:
            expected = math.sqrt(simulation.measured / (case.density * case.num_elements))
        if (threshold_after is None) != (expected is None):
            raise Difference(f"step {step}: λ is {threshold_after} after calibration instead of {expected}")
        if expected is not None and threshold_after is not None:
            self._require_near(step, "calibrated λ", threshold_after, expected, self._norm_tolerance(True))
            simulation.threshold = threshold_after
            # A checkpoint contains λ at once, also if the backward is dropped.
            self.shared = (self.shared[0], simulation.measured, simulation.threshold)

    def _norm_tolerance(self, is_clipped: bool) -> float:
        has_few_bits = is_clipped and self.case.local_clip_norm is not None and self.case.dtype in ("bfloat16", "mixed")
        return 0.05 if has_few_bits else precision_of(self.case)

    def _require_near(
        self, step: int, name: str, value: float, expected: float, relative_tolerance: float, slack: float = 0.0
    ) -> None:
        is_near = math.isclose(value, expected, rel_tol=relative_tolerance, abs_tol=slack)
        if not is_near and not (math.isnan(value) and math.isnan(expected)):
            raise Difference(f"step {step}, statistics: {name} is {value!r} instead of {expected!r}")

    def _require_count(self, step: int, name: str, value: int, expected: int, open_count: int) -> None:
        if abs(value - expected) > open_count:
            raise Difference(f"step {step}, statistics: {name} is {value} instead of {expected}")


def sum_rounding(sent: list[Tensor], n: int, layer: Layer) -> Tensor:
    """Return the largest difference between two ways to compute (1/n) Σ_i out_i.

    Each has at most n − 1 additions and n divisions, and each of those is off by eps/2 of at most Σ_i |out_i|.
    """
    eps = torch.finfo(error_dtype(layer)).eps
    return 2 * (n + 1) * eps * sum(values.abs() for values in sent) / n


def require_close(where: str, actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Raise a Difference that names the first coordinate that is off by more than the tolerance, 0 for equality."""
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    is_near = (actual.double() - expected.double()).abs() <= tolerance
    wrong = (~(is_same | is_near)).nonzero().flatten()
    if wrong.numel():
        index = int(wrong[0])
        raise Difference(
            f"{where}[{index}]: {actual[index].item()!r} instead of {expected[index].item()!r}, "
            f"tolerance {tolerance[index].item():.3g}; {wrong.numel()} of {actual.numel()} differ"
        )
