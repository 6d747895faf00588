"""Manual optimization: steps at different times, on different gradients, and dropped gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.integration.models import nesterov, sgd
from tests.integration.programs.loops import Net, loss_of
from tests.integration.programs.trainer import (
    BATCHES,
    ManualStudent,
    commit,
    fail_to_fit,
    fit_without_validation,
    left_frozen,
    moved,
    recorder_of,
    trains,
)
from tests.integration.programs.world import Row, Run


class TwoOptimizers(ManualStudent):
    """Runs a backward for two optimizers; the second steps in every other batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        often, seldom = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in (often, seldom)[: 1 + batch_idx % 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return nesterov(self.first.parameters()), sgd([*self.middle.parameters(), *self.last.parameters()])


def stepped_once_per_batch(runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 2 * BATCHES
        assert run.kind == "ddp" or run.num_exchanges == 4 * BATCHES


class WaitingLayerSkipper(Net, ManualStudent):
    """Skips a layer on one worker while its gradient waits for an optimizer that steps rarely."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        is_used = batch_idx % 2 == 0 or self.global_rank == 0
        recorder_of(self).texts.append("used" if is_used else "left out")
        often, seldom = self.optimizers()
        self.manual_backward(loss_of(partial(self, is_used=is_used), batch))
        for optimizer in (often, seldom)[: 1 + batch_idx % 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        main = [*self.first.parameters(), *self.middle.parameters(), *self.last.parameters()]
        return nesterov(main), sgd(self.sometimes.parameters())


def left_out_by_one_worker(runs: list[Run]) -> None:
    assert "left out" not in runs[0].texts
    assert runs[1].texts.count("left out") == runs[1].texts.count("used") == len(runs[1].texts) // 2 > 0
    assert all(run.moved("sometimes.weight") for run in runs)


class GradientProjection(ManualStudent):
    """Projects conflicting gradients of two tasks (PCGrad), which it reads from ``.grad``."""

    def __init__(self, commits: bool) -> None:
        super().__init__()
        self.commits = commits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        gradients = []
        for loss in (self.loss(batch), self(batch[0]).square().mean()):
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.commits:
                commit(self.trainer.strategy)
            gradients.append([parameter.grad for parameter in self.parameters()])
        for parameter, gradient, other in zip(self.parameters(), *gradients, strict=True):
            overlap = (gradient * other).sum().clamp(max=0)
            recorder_of(self).seen["conflicts"].append(float(overlap))
            parameter.grad = gradient - overlap / (other.square().sum() + 1e-12) * other + other
        optimizer.step()


class GradientDetacher(ManualStudent):
    """Adds the gradients of two tasks, and calls ``detach_`` on the first."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for loss in (self.loss(batch), self(batch[0]).square().mean()):
            self.manual_backward(loss)
            for parameter in self.parameters():
                parameter.grad.detach_()
        optimizer.step()


def had_conflicts(runs: list[Run]) -> None:
    stepped_once_per_batch(runs)
    for run in runs:
        assert min(run.seen["conflicts"]) < 0


class EpochEndStepper(ManualStudent):
    """Accumulates three synchronized backwards, and steps on the remainder at the end of an epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 3 == 2:
            self._step()

    def on_train_epoch_end(self) -> None:
        has_gradients = any(parameter.grad is not None for parameter in self.parameters())
        recorder_of(self).texts.append(f"left over: {has_gradients}")
        self._step()

    def _step(self) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()


def stepped_on_remainder(runs: list[Run]) -> None:
    for run in runs:
        assert run.texts == ["left over: True"] * 2
        assert run.global_step == 2  # Lightning does not count the steps at the end
        assert len(run.stepped_on) == 2 * 2


class WithTorchsOwnOptimizer(ManualStudent):
    """Steps without Lightning, which then counts no steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert type(optimizer) is torch.optim.SGD
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_train_end(self) -> None:
        log: Any = getattr(self.trainer.strategy, "step_log", None)
        recorder_of(self).texts.append(f"waiting to be logged: {0 if log is None else len(log._steps)}")


def logged_without_lightning_steps(runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 0
        assert len(run.stepped_on) == 2 * BATCHES
        assert run.texts == ["waiting to be logged: 0"]
        if run.kind in ("zero", "sparse"):
            assert run.metrics["sparse/density"] == pytest.approx(run.densities[-1])


class SharedLayer(ManualStudent):
    """Gives the first layer to two optimizers, which both step on the same gradient."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        shared = list(self.first.parameters())
        return sgd([*shared, *self.middle.parameters()]), nesterov([*shared, *self.last.parameters()])


def stepped_with_each(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.stepped_on) == 2 * 2 * BATCHES


class FrozenAtFitStart(ManualStudent):
    """Freezes a layer after DDP has registered it."""

    def on_fit_start(self) -> None:
        self.middle.requires_grad_(False)


class Constant(LightningModule):
    """Two parameters with constant gradients, trained by a function of the module and the number of the batch."""

    def __init__(self, train: Callable[["Constant", Any, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.train_batch = train

    def backward_of(self, a: float, b: float) -> None:
        self.manual_backward(a * self.a.sum() + b * self.b.sum())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.train_batch(self, self.optimizers(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


def every_second(module: Constant, optimizer: Any, index: int) -> None:
    module.backward_of(0.5, 0.25)
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()


def copies_between(module: Constant, optimizer: Any, index: int) -> None:
    if index % 2:
        for parameter in module.parameters():
            parameter.grad = parameter.grad.clone()
    every_second(module, optimizer, index)


def hides_from_one_step(module: Constant, optimizer: Any, index: int) -> None:
    module.backward_of(0.5, 0.25)
    hidden, module.b.grad = module.b.grad, None
    optimizer.step()
    module.b.grad, module.a.grad = hidden, None
    module.backward_of(0.5, 0.25)
    optimizer.step()
    optimizer.zero_grad()


def drops_zeros_in_place(module: Constant, optimizer: Any, index: int) -> None:
    module.backward_of(2.0, -2.0)
    optimizer.zero_grad(set_to_none=False)
    module.backward_of(0.5, 0.25)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


class Convolution(LightningModule):
    """Changes to ``channels_last`` after two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.to(memory_format=torch.channels_last)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0].view(-1, 2, 2, 2)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def refused_with_strides(runs: list[Run]) -> None:
    for run in runs:
        if run.kind != "ddp":
            assert "'layer.weight' has strides (8, 1, 4, 2), and had (8, 4, 2, 1)" in run.texts[0]
            assert "configure_model" in run.texts[0]


_unused = {"find_unused_parameters": True}
_plain = {"drive": fit_without_validation}

ROWS = {
    "two optimizers": Row(
        trains(TwoOptimizers), partial(moved, 2 * (BATCHES + BATCHES // 2), ("first.weight", "last.weight"))
    ),
    "left out while it waits": Row(
        trains(WaitingLayerSkipper, **_plain, **_unused), left_out_by_one_worker, leaves_out=True
    ),
    "gradients kept aside": Row(trains(partial(GradientProjection, False), **_plain), had_conflicts, rolls_back=True),
    "gradients kept aside and committed": Row(trains(partial(GradientProjection, True), **_plain), had_conflicts),
    "detached gradients": Row(trains(GradientDetacher, **_plain), stepped_once_per_batch),
    "step at the end of an epoch": Row(trains(EpochEndStepper, **_plain), stepped_on_remainder),
    "torch's own optimizer": Row(trains(WithTorchsOwnOptimizer, **_plain), logged_without_lightning_steps),
    "layer of two optimizers": Row(trains(SharedLayer, **_plain), stepped_with_each),
    **{
        name: Row(trains(partial(Constant, train), **_plain, **options), partial(moved, steps, ("a", "b")), 0.4)
        for name, train, steps, options in (
            ("a step every second backward", every_second, BATCHES, {}),
            ("a step every second backward, static graph", every_second, BATCHES, {"static_graph": True}),
            ("copies of gradients between two backwards", copies_between, BATCHES, {}),
            ("a gradient hidden from one step", hides_from_one_step, 4 * BATCHES, {}),
        )
    },
    "zeros dropped in place": Row(
        trains(partial(Constant, drops_zeros_in_place), **_plain),
        partial(moved, 2 * BATCHES, ("a", "b")),
        1.25,
        rolls_back=True,
    ),
    "memory format changed after wrapping": Row(
        trains(Convolution, drive=fail_to_fit), refused_with_strides, None, is_refused=True
    ),
    "frozen at fit start": Row(trains(FrozenAtFitStart, **_plain, **_unused), left_frozen, leaves_out=True),
}
