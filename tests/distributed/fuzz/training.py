"""One worker's side of a case: DDP, the package, an optimizer."""

import math
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import HardThreshold, TopK, register_comm_hook
from tests.distributed.fuzz.case import DTYPES, Case, gradient_of
from tests.distributed.fuzz.checker import Checker, Difference
from tests.distributed.fuzz.simulation import error_dtype


class Model(torch.nn.Module):
    """y = Σ w · x, so that the gradient of w is x."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for layer in case.layers:
            module = torch.nn.Module()
            module.register_parameter(
                layer.name.split(".")[-1], torch.nn.Parameter(torch.ones(layer.size, dtype=DTYPES[layer.dtype]))
            )
            self.layers.append(module)

    def forward(self, inputs: list[Tensor | None]) -> Tensor:
        terms = [(w * x).sum().double() for w, x in zip(self.parameters(), inputs, strict=True) if x is not None]
        return torch.stack(terms).sum()


@dataclass
class Step:
    """What a worker saw of a step.

    Attributes:
        scale: S.
        gradients: what DDP left in ``.grad``.
        gradients_after: what was there after the optimizer: unscaled, where losses are scaled.
        has_stepped: whether the optimizer did.
        latest: all residuals after the backward, in the order of the layers, as float64: shape (d,).
        settled: those after the optimizer.
    """

    scale: float | None
    gradients: dict[str, Tensor | None]
    gradients_after: dict[str, Tensor | None]
    has_stepped: bool
    latest: Tensor
    settled: Tensor


class Training:
    """One worker's side of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.worker = dist.get_rank()
        os.environ["GROUP_RANK"] = str(self.worker // case.workers_per_node)
        self.model = DistributedDataParallel(
            Model(case),
            bucket_cap_mb=case.bucket_cap_mb,
            gradient_as_bucket_view=case.gradient_as_bucket_view,
            find_unused_parameters=case.unused == "find",
            static_graph=case.unused == "static",
        )
        self.parameters = dict(self.model.module.named_parameters())
        groups = [{"params": list(self.parameters.values())[first::2]} for first in (0, 1)]
        self.optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=0.5)
        self.scaler = None
        if case.loss_scale is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=case.loss_scale, growth_interval=case.growth_interval)
        self.state = register_comm_hook(
            self.model,
            TopK(case.density)
            if case.sparsifier == "top_k"
            else HardThreshold(
                case.threshold if case.sparsifier == "threshold" else None,
                case.density if case.sparsifier == "density" else None,
                case.calibration_steps,
                dict(case.layer_thresholds),
            ),
            error_feedback=case.error_feedback,
            local_clip_norm=case.local_clip_norm,
            value_dtype=case.value_dtype,
            exchange=case.exchange,
            optimizer=self.optimizer if case.error_feedback == "learning_rate" else None,
            grad_scaler=self.scaler,
            per_layer_stats=case.per_layer_stats,
        )

    def step(self, step: int) -> "Step":
        """Runs the backwards and the optimizer of a step."""
        case = self.case
        for group, rate in zip(self.optimizer.param_groups, case.rates[step], strict=False):
            group["lr"] = rate
        for index, parameter in enumerate(self.parameters.values()):
            will_be_used = any(case.uses(step, micro, self.worker, index) for micro in case.backwards(step))
            if parameter.grad is None or (case.zeroing == "used" and not will_be_used):
                continue
            if case.zeroing == "zeros":
                parameter.grad.zero_()
            else:
                parameter.grad = None
        for micro in case.backwards(step):
            inputs = [
                gradient_of(case, step, micro, self.worker, index)
                if case.uses(step, micro, self.worker, index)
                else None
                for index in range(len(case.layers))
            ]
            with self.model.no_sync() if micro < case.micro_steps - 1 else nullcontext():
                loss = self.model(inputs)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        scale = None if self.scaler is None else self.scaler.get_scale()
        gradients = self._gradients()
        latest = self._flat(self.state.residuals.latest())
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        has_stepped = scale is None or all(one is None or bool(one.isfinite().all()) for one in gradients.values())
        settled = self._flat(self.state.residuals.state_dict())
        return Step(scale, gradients, self._gradients(), has_stepped, latest, settled)

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}

    def _flat(self, residuals: dict[str, Tensor]) -> Tensor:
        return torch.cat([residuals[layer.name].double() for layer in self.case.layers])

    def checksums(self, gradients: dict[str, Tensor | None]) -> list[tuple[str, int]]:
        """What must be the same on all workers."""
        tensors = {f"gradient of {name}": one for name, one in gradients.items() if one is not None}
        tensors |= {f"weights of {name}": p.detach() for name, p in self.parameters.items()}
        sums = [(name, zlib.crc32(bits_of(one).numpy().tobytes())) for name, one in tensors.items()]
        return [*sums, (f"statistics: {self.state.last_step}", 0)]


def bits_of(values: Tensor) -> Tensor:
    """Returns the bits as integers; NaN is one value, whatever its bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.nan_to_num(123.0, math.inf, -math.inf).view(integers[values.itemsize])


def run_case(case: Case) -> tuple[str | None, Counter[str]]:
    """Runs a case as one worker of a process group. Collective.

    Returns:
        What went wrong first, None if nothing did, the same on every worker; and, on the first one, counts of what the
        steps had in them.
    """
    training = Training(case)
    checker = Checker(case)
    difference: str | None = None
    for step in range(case.steps):
        seen = training.step(step)
        flat = torch.stack([seen.latest, seen.settled])
        collected = [torch.empty_like(flat) for _ in range(case.num_workers)] if training.worker == 0 else None
        dist.gather(flat, collected)
        checksums: list[Any] = [None] * case.num_workers
        dist.all_gather_object(checksums, training.checksums(seen.gradients))
        verdict: list[str | None] = [None]
        if collected is not None:
            try:
                for worker, one in enumerate(checksums):
                    for mine, other in zip(checksums[0], one, strict=True):
                        if mine != other:
                            raise Difference(f"step {step}: workers 0 and {worker} differ in {mine[0]} ({other[0]})")
                assert training.state.last_step is not None
                checker.check(
                    step,
                    seen.scale,
                    [dict(_split(case, latest)) for latest, _ in collected],
                    seen.gradients,
                    training.state.last_step,
                    getattr(training.state.sparsifier, "threshold", None),
                )
                checker.check_settled(step, seen.has_stepped, [dict(_split(case, settled)) for _, settled in collected])
                checker.simulation.stale = seen.gradients_after
            except Difference as found:
                verdict = [str(found)]
        dist.broadcast_object_list(verdict)
        difference = verdict[0]
        if difference is not None:
            break
    training.state.close()
    return difference, checker.seen


def _split(case: Case, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts = torch.split(flat, [layer.size for layer in case.layers])
    for layer, part in zip(case.layers, parts, strict=True):
        yield layer.name, part.to(error_dtype(layer))
