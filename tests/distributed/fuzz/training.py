"""A worker of a case: DDP, the package, optimizers."""

import copy
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import GradientOptions, HardThreshold, TopK, register_comm_hook
from tests.distributed.fuzz.case import DISCARDED, DTYPES, Case, draw_case, gradient_of
from tests.distributed.fuzz.checker import Checker, Difference
from tests.distributed.fuzz.simulation import error_dtype


class Model(torch.nn.Module):
    """y = Σ w · x, so that the gradient of w is x."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({layer.name.split(".")[-1]: torch.ones(layer.size, dtype=DTYPES[layer.dtype])})
            for layer in case.layers
        )

    def forward(self, inputs: list[Tensor | None]) -> Tensor:
        terms = [(w * x).sum().double() for w, x in zip(self.parameters(), inputs, strict=True) if x is not None]
        return torch.stack(terms).sum()


@dataclass
class Step:
    """The tensors of a step on a worker.

    Attributes:
        scale: S.
        gradients: ``.grad`` after the backward.
        gradients_after: ``.grad`` after the optimizer, unscaled if losses are scaled.
        has_stepped: whether the optimizers of even and odd layers stepped.
        latest: all residuals after the backward, in the order of the layers, as float64: shape (d,).
        committed: residuals after the optimizers.
        saved: the state between backward and optimizers.
    """

    scale: float | None
    gradients: dict[str, Tensor | None]
    gradients_after: dict[str, Tensor | None]
    has_stepped: tuple[bool, bool]
    latest: Tensor
    committed: Tensor
    saved: dict[str, Any]


class Training:
    """A worker of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.worker = dist.get_rank()
        self.scaler = None
        if case.loss_scale is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=case.loss_scale, growth_interval=case.growth_interval)
        self._start(case.bucket_cap_mb)

    def _start(self, bucket_cap_mb: float) -> None:
        case = self.case
        self.model = DistributedDataParallel(
            Model(case),
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=case.gradient_as_bucket_view,
            find_unused_parameters=case.unused == "find",
            static_graph=case.unused == "static",
        )
        self.parameters = dict(self.model.module.named_parameters())
        groups = [{"params": list(self.parameters.values())[first::2]} for first in (0, 1)]
        groups = [group for group in groups if group["params"]]
        of_optimizers = [[group] for group in groups] if case.has_two_optimizers else [groups]
        self.optimizers = [torch.optim.SGD(own_groups, lr=0.5) for own_groups in of_optimizers]
        self.state = register_comm_hook(
            self.model,
            TopK(case.density)
            if case.sparsifier == "top_k"
            else HardThreshold(
                threshold=case.threshold if case.sparsifier == "threshold" else None,
                density=case.density if case.sparsifier == "density" else None,
                layer_thresholds=dict(case.layer_thresholds),
            ),
            GradientOptions(
                local_clip_norm=case.local_clip_norm,
                value_dtype=case.value_dtype,
                exchange=case.exchange,
            ),
            grad_scaler=self.scaler,
            per_layer_stats=case.per_layer_stats,
        )

    @property
    def threshold(self) -> float | None:
        """λ, or None during calibration."""
        return getattr(self.state.sparsifier, "threshold", None)

    def scale(self) -> float | None:
        """Return S, or None without a scaler."""
        return None if self.scaler is None else self.scaler.get_scale()

    def discard(self, step: int) -> None:
        """Run a backward without an optimizer step and drop all gradients."""
        self._zero(lambda index: True)
        self._set_rates(step)
        self._backward(step, DISCARDED)

    def resume(self, saved: dict[str, Any], bucket_cap_mb: float) -> None:
        """Resume from a state in a new DDP module."""
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        self.state.close()
        self._start(bucket_cap_mb)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        self.state.load_state_dict(saved)

    def step(self, step: int) -> "Step":
        """Run the backwards and the optimizers of a step."""
        case = self.case
        self._set_rates(step)
        self._zero(lambda index: case.is_zeroed(step, self.worker, index))
        for micro in case.backwards(step):
            with self.model.no_sync() if micro < case.micro_steps - 1 else nullcontext():
                self._backward(step, micro)
        scale = self.scale()
        gradients = self._gradients()
        residuals = copy.deepcopy(self.state.residuals)
        residuals.commit(set(self.parameters))
        latest = self._flat(residuals.layers())
        saved = copy.deepcopy(self.state.state_dict())
        has_stepped = self._step_optimizers(case.attempts[step])
        committed = self._flat(self.state.residuals.state_dict())
        return Step(scale, gradients, self._gradients(), has_stepped, latest, committed, saved)

    def _set_rates(self, step: int) -> None:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.case.rates[step], strict=False):
            group["lr"] = rate

    def _zero(self, is_zeroed: Callable[[int], bool]) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            if parameter.grad is None or not is_zeroed(index):
                continue
            if self.case.zeroing == "zeros":
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def _backward(self, step: int, micro: int) -> None:
        inputs = [
            gradient_of(self.case, step, micro, self.worker, index)
            if self.case.uses(step, micro, self.worker, index)
            else None
            for index in range(len(self.case.layers))
        ]
        loss = self.model(inputs)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _step_optimizers(self, attempts: tuple[bool, bool]) -> tuple[bool, bool]:
        has_stepped = [False, False]
        for first, optimizer in enumerate(self.optimizers):
            groups = [first] if self.case.has_two_optimizers else [0, 1]
            if not attempts[groups[0]]:
                continue
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            is_finite = all(grad is None or bool(grad.isfinite().all()) for grad in gradients)
            if self.scaler is None:
                optimizer.step()
            elif any(grad is not None for grad in gradients):
                self.scaler.step(optimizer)
            for group in groups:
                has_stepped[group] = self.scaler is None or (is_finite and any(grad is not None for grad in gradients))
        if self.scaler is not None and any(
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] for optimizer in self.optimizers
        ):
            self.scaler.update()
        return has_stepped[0], has_stepped[1]

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}

    def _flat(self, residuals: dict[str, Tensor]) -> Tensor:
        return torch.cat([residuals[layer.name].double() for layer in self.case.layers])

    def checksums(self, gradients: dict[str, Tensor | None]) -> list[tuple[str, int]]:
        """Return checksums that must agree on all workers."""
        tensors = {f"gradient of {name}": gradient for name, gradient in gradients.items() if gradient is not None}
        tensors |= {f"weights of {name}": p.detach() for name, p in self.parameters.items()}
        sums = [(name, zlib.crc32(bits_of(tensor).numpy().tobytes())) for name, tensor in tensors.items()]
        return [*sums, (f"statistics: {self.state.last_step}", 0)]


def bits_of(values: Tensor) -> Tensor:
    """Return the bits as integers; all NaNs have the same bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.nan_to_num(123.0, math.inf, -math.inf).view(integers[values.itemsize])


def run_seed(seed: int) -> tuple[str | None, int]:
    """Run the case of a seed as a worker; see ``run_case``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_case(draw_case(seed))


def run_case(case: Case) -> tuple[str | None, int]:
    """Run a case as a worker of a process group. Collective.

    Returns:
        The first difference or None, equal on every worker; and how many steps sent a part, on rank 0 only.
    """
    training = Training(case)
    checker = Checker(case)
    difference: str | None = None
    for step in range(case.steps):
        difference = _run_step(step, training, checker)
        if difference is not None:
            break
    training.state.close()
    return difference, checker.partial_steps


def _run_step(step: int, training: Training, checker: Checker) -> str | None:
    """Run a step as a worker; return the difference or None, equal on every worker. Collective."""
    case = training.case
    after_discard = None
    if step in case.discards:
        training.discard(step)
        after_discard = training.scale(), training.threshold
    seen = training.step(step)
    threshold_after, stats = training.threshold, training.state.last_step
    assert stats is not None
    resumed = None
    for at, moment, bucket_cap_mb in case.resumes:
        if at == step:
            saved = seen.saved if moment == "after the backward of" else copy.deepcopy(training.state.state_dict())
            training.resume(saved, bucket_cap_mb)
            resumed = training._flat(training.state.residuals.layers())
            seen.has_stepped = (False, False) if saved is seen.saved else seen.has_stepped
            seen.committed = resumed
    flat = torch.stack([seen.latest, seen.committed])
    collected = [torch.empty_like(flat) for _ in range(case.num_workers)] if training.worker == 0 else None
    dist.gather(flat, collected)
    checksums: list[Any] = [None] * case.num_workers
    dist.all_gather_object(checksums, training.checksums(seen.gradients))
    verdict: list[str | None] = [None]
    if collected is not None:
        try:
            for worker, sums in enumerate(checksums):
                for mine, other in zip(checksums[0], sums, strict=True):
                    if mine != other:
                        raise Difference(f"step {step}: workers 0 and {worker} differ in {mine[0]} ({other[0]})")
            if after_discard is not None:
                checker.check_discarded(step, *after_discard)
            checker.check(
                step,
                seen.scale,
                [dict(_split(case, latest)) for latest, _ in collected],
                seen.gradients,
                stats,
                threshold_after,
            )
            if resumed is not None and seen.has_stepped == (False, False):
                checker.resume()
            committed = [dict(_split(case, committed)) for _, committed in collected]
            checker.check_committed(step, seen.has_stepped, committed, "committed" if resumed is None else "resumed")
            checker.simulation.stale = seen.gradients_after
            if resumed is not None:
                checker.resume()
        except Difference as found:
            verdict = [str(found)]
    dist.broadcast_object_list(verdict)
    return verdict[0]


def _split(case: Case, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts = torch.split(flat, [layer.size for layer in case.layers])
    for layer, part in zip(case.layers, parts, strict=True):
        yield layer.name, part.to(error_dtype(layer))
