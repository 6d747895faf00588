"""Programs without a Trainer: a loop around a DDP module."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integration.models import Classifier, nesterov
from tests.integration.programs.world import Run, World

BATCHES = 10
Batch = list[Tensor]
Body = Callable[[World, nn.Module, torch.optim.Optimizer, Batch, int], None]


def batches(num_batches: int = BATCHES) -> Iterator[Batch]:
    """Return the batches of this worker."""
    generator = torch.Generator().manual_seed(31 + dist.get_rank())
    for _ in range(num_batches):
        yield [torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)]


class Net(Classifier):
    """Has a layer that not every forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, 3)
        with torch.no_grad():
            for parameter in self.sometimes.parameters():
                parameter.copy_(torch.linspace(-0.4, 0.4, parameter.numel()).view_as(parameter))

    def forward(self, inputs: Tensor, is_used: bool = True) -> Tensor:
        outputs = super().forward(inputs)
        return outputs + self.sometimes(inputs) if is_used else outputs


def loss_of(module: nn.Module, batch: Batch, *arguments: Any) -> Tensor:
    return F.cross_entropy(module(batch[0], *arguments), batch[1])


def loops(
    body: Body,
    make_model: Callable[[], nn.Module] = Classifier,
    make_optimizer: Callable[..., torch.optim.Optimizer] = nesterov,
    **ddp_options: Any,
) -> Callable[[World], None]:
    """Return a program that calls the body with each batch and its number."""

    def program(world: World) -> None:
        module = world.wrap(make_model(), **ddp_options)
        optimizer = make_optimizer(module.parameters())
        world.watch(optimizer)
        for index, batch in enumerate(batches()):
            body(world, module, optimizer, batch, index)

    return program


def stepped(times: int, runs: list[Run]) -> None:
    for run in runs:
        assert len(run.stepped_on) == times
        assert run.kind == "ddp" or run.num_exchanges >= times
        assert all(run.moved(name) for name in run.initial)


def exchanged(times: int, steps: int, runs: list[Run]) -> None:
    stepped(steps, runs)
    for run in runs:
        assert run.kind == "ddp" or run.num_exchanges == times


every_batch = partial(stepped, BATCHES)


def usual(world: World, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, index: int) -> None:
    optimizer.zero_grad()
    world.backward(loss_of(module, batch))
    optimizer.step()


def two_backwards(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    world.backward(loss_of(module, batch))
    world.backward(loss_of(module, [-batch[0], batch[1]]))
    optimizer.step()
    optimizer.zero_grad()
