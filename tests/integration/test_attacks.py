"""Programs with which the exchange was attacked: what is trained and what is held back make up plain ddp's training.

All numbers are dyadic, so that sums are exact: weights − lr · mean residual must be plain ddp's weights, bit by bit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse import DDPHardThresholdStrategy
from tests.integration.models import quiet_trainer
from tests.workers import run_workers

RATE = 0.125
BATCHES = 4


class Constant(LightningModule):
    """Two parameters with constant gradients, trained by a function of the module and the number of the batch."""

    def __init__(self, train: Callable[["Constant", int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.train_batch = train

    def backward_of(self, a: float, b: float) -> None:
        self.manual_backward(a * self.a.sum() + b * self.b.sum())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.train_batch(self, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def every_second(module: Constant, index: int) -> None:
    optimizer: Any = module.optimizers()
    module.backward_of(0.5, 0.25)
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()


def copies_between(module: Constant, index: int) -> None:
    if index % 2:
        for parameter in module.parameters():
            parameter.grad = parameter.grad.clone()
    every_second(module, index)


def hides_from_one_step(module: Constant, index: int) -> None:
    optimizer: Any = module.optimizers()
    module.backward_of(0.5, 0.25)
    hidden, module.b.grad = module.b.grad, None
    optimizer.step()
    module.b.grad, module.a.grad = hidden, None
    module.backward_of(0.5, 0.25)
    optimizer.step()
    optimizer.zero_grad()


def drops_in_place(module: Constant, index: int) -> None:
    optimizer: Any = module.optimizers()
    module.backward_of(2.0, -2.0)
    optimizer.zero_grad(set_to_none=False)
    module.backward_of(0.5, 0.25)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


PROGRAMS = {
    "a step every second backward": (every_second, {}),
    "a step every second backward of a static graph": (every_second, {"static_graph": True}),
    "copies of gradients between two backwards": (copies_between, {}),
    "a gradient hidden from one step": (hides_from_one_step, {}),
    "gradients of nothing but zeros dropped in place": (drops_in_place, {}),
}


def _fit(name: str) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    train, options = PROGRAMS[name]
    found = {}
    for threshold in (None, 0.0, 0.4, 0.9, 3.0):
        kind = DDPStrategy if threshold is None else DDPHardThresholdStrategy
        strategy = kind(**options) if threshold is None else kind(threshold=threshold, **options)
        module = Constant(train)
        quiet_trainer(strategy, num_workers=2, max_steps=-1, max_epochs=1).fit(module, DataLoader(range(2 * BATCHES)))
        residuals = {} if threshold is None else strategy.state.residuals.state_dict()
        weights = [parameter.detach() for parameter in module.parameters()]
        found[str(threshold)] = weights, [residuals.get(key, torch.zeros(4)) for key in ("a", "b")]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_trained_and_what_is_held_back_make_up_what_ddp_trains(name: str) -> None:
    workers = run_workers(_fit, 2, name, process_group=False)
    for kind in workers[0]:
        residuals = [sum(worker[kind][1][index] for worker in workers) / 2 for index in (0, 1)]
        for worker in workers:
            for weight, residual, wanted in zip(worker[kind][0], residuals, worker["None"][0], strict=True):
                assert torch.equal(weight - RATE * residual, wanted), kind
        limit = 0.0 if kind == "None" else float(kind)
        assert all((one.abs() < limit).all() or not one.any() for worker in workers for one in worker[kind][1])


class Convolution(LightningModule):
    """Goes to ``channels_last`` when DDP has wrapped it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3)

    def on_train_start(self) -> None:
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def _changes_its_memory_format() -> str:
    trainer = quiet_trainer(DDPHardThresholdStrategy(threshold=0.0), num_workers=2)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Convolution(), DataLoader(torch.randn(8, 2, 5, 5)))
    return str(raised.value)


def test_a_memory_format_that_changes_after_wrapping_is_refused_with_advice() -> None:
    for message in run_workers(_changes_its_memory_format, 2, process_group=False):
        assert "'layer.weight' has strides (18, 1, 6, 2), and had (18, 9, 3, 1)" in message
        assert "configure_model" in message
