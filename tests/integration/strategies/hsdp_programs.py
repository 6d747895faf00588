"""Training programs for sharded replicas, to be compared with torch's own HSDP."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from tests.integration.strategies.hsdp_models import Manual, Sharded, Unfreezing, build_network, make_optimizer


class Discarding(Manual):
    """Drops every other gradient before an optimizer sees it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        optimizer: Any = self.optimizers()
        self.manual_backward(100 * self.loss(batch))
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class TwoOptimizers(Manual):
    """Steps on the first layer and on the others in turn; each backward computes all gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *others = [layer for layer in self.network if isinstance(layer, nn.Linear)]
        rest = [parameter for layer in others for parameter in layer.parameters()]
        return [make_optimizer(first.parameters()), make_optimizer(rest)]


class WithNorm(Sharded):
    """Has buffers and an unused layer."""

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
            self.unused = nn.Linear(2, 2, dtype=torch.float64)
            nn.init.ones_(self.unused.weight)
            nn.init.ones_(self.unused.bias)
            for module in (self.norm, self.unused):
                fully_shard(module, mesh=self.network[0].weight.device_mesh)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(self.norm(batch[0])), batch[1])


class Checkpointed(Sharded):
    """Recomputes activations in backward."""

    def make_network(self) -> nn.Sequential:
        network = build_network()
        network[0] = checkpoint_wrapper(network[0])
        return network


class Compiled(Sharded):
    """Has a compiled layer."""

    def configure_model(self) -> None:
        is_new = self.network is None
        super().configure_model()
        if is_new:
            self.network[2].compile(backend="aot_eager")


class HalfPrecision(Sharded):
    """Computes in bfloat16 and reduces in float32."""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)

    def make_network(self) -> nn.Sequential:
        return build_network().float()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch[0].float()).float(), batch[1].float())


class InHalf(HalfPrecision):
    """Has weights in bfloat16."""

    policy = MixedPrecisionPolicy()

    def make_network(self) -> nn.Sequential:
        return build_network().bfloat16()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch[0].bfloat16()).float(), batch[1].float())


class Late(Manual):
    """Creates its optimizer when training starts, after a first validation, unknown to the Trainer."""

    def configure_optimizers(self) -> None:
        return None

    def on_train_start(self) -> None:
        self.own = make_optimizer(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        self.own.zero_grad()
        self.manual_backward(self.loss(batch))
        self.own.step()


PROGRAM_STEPS = 6  # for momentum, layers that unfreeze at the fourth step, and a validation in between
UNCOUNTED = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": PROGRAM_STEPS}
"""Options for optimizers whose steps a Trainer does not count."""

PROGRAMS: dict[str, tuple[Callable[..., Sharded], dict[str, Any], float]] = {
    "plain": (Sharded, {}, 1e-12),
    "clipping by norm": (Sharded, {"gradient_clip_val": 0.5}, 1e-12),
    "accumulation": (Sharded, {"accumulate_grad_batches": 2}, 1e-12),
    "validation in between": (Sharded, {"val_check_interval": 3}, 1e-12),
    "manual, a closure": (partial(Manual, uses_closure=True), {}, 1e-12),
    "manual, a closure for torch's": (partial(Manual, uses_raw=True, uses_closure=True), UNCOUNTED, 1e-12),
    "an optimizer of its own": (Late, UNCOUNTED, 1e-12),
    "discarded backwards": (Discarding, {}, 1e-12),
    "two optimizers": (TwoOptimizers, {}, 1e-12),
    "unfrozen later": (Unfreezing, {}, 1e-12),
    "buffers and an unused layer": (WithNorm, {}, 1e-12),
    "activation checkpointing": (Checkpointed, {}, 1e-12),
    "a compiled layer": (Compiled, {}, 1e-12),
    "precision bf16-mixed": (HalfPrecision, {"precision": "bf16-mixed"}, 1e-5),
    "weights in bfloat16": (InHalf, {}, 0.05),
}

AS_PLAIN = (
    *("validation in between", "manual, a closure", "manual, a closure for torch's"),
    *("an optimizer of its own", "discarded backwards", "a compiled layer"),
)
"""Programs that compute what "plain" does, which torch's HSDP trains for all; torch's own validation would leave the
last layer gathered, so that "an optimizer of its own" stepped on parameters without gradients."""
