"""Kinds of layers and wrappers of models."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.integration.models import Classifier, WithEmbedding, sgd
from tests.integration.programs.loops import BATCHES, every_batch, loops, two_backwards, usual
from tests.integration.programs.world import Row, Run, World


def seeded(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 2, padding=1)
        self.second = nn.Conv2d(6, 8, 2)
        self.last = nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.last(self.second(self.first(images).tanh()).tanh().flatten(1))


def channels_last() -> nn.Module:
    return seeded(Convolutional()).to(memory_format=torch.channels_last)


def laid_out_differently(runs: list[Run]) -> None:
    every_batch(runs)
    for run in runs:
        assert not run.state["second.weight"].is_contiguous()
        assert not run.stepped_on[0][2].is_contiguous()


class Transposed(nn.Module):
    """Has a column-major parameter and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 3).t().contiguous().t())
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs @ self.weight


class Tied(nn.Module):
    """Uses a matrix twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.decode.weight = self.encode.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.decode(self.encode(inputs).tanh()).tanh())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(8, 12, dtype=torch.cfloat))
        self.last = nn.Parameter(torch.zeros(12, 3, dtype=torch.cfloat))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs.to(torch.cfloat) @ self.first).tanh() @ self.last).abs()


def parts_sent_apart(runs: list[Run]) -> None:
    every_batch(runs)
    for run in runs:
        if run.kind in ("oracle", "sparse"):
            sent = torch.view_as_real(run.stepped_on[0][0]) != 0
            assert (sent[..., 0] != sent[..., 1]).any()


class Penalized(Classifier):
    """Returns a function of the gradient of its outputs, so that backward differentiates a backward."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        outputs = super().forward(inputs)
        [slope] = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        return outputs + slope.square().mean()


class Checkpointed(Classifier):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.times_in_the_middle = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        return self.last(checkpoint(self._middle, hidden, use_reentrant=self.use_reentrant))

    def _middle(self, hidden: Tensor) -> Tensor:
        self.times_in_the_middle += 1
        return self.middle(hidden).tanh()


def checkpointing(world: World, module: nn.Module, optimizer: Any, batch: Any, index: int) -> None:
    usual(world, module, optimizer, batch, index)
    model = module if world.kind == "oracle" else module.module
    world.run.seen["times in the middle"].append(model.times_in_the_middle)


def computed_twice(runs: list[Run]) -> None:
    every_batch(runs)
    for run in runs:
        assert run.seen["times in the middle"] == [2 * step for step in range(1, BATCHES + 1)]


class WithPrivateLayer(Classifier):
    """Has a layer with a different shape on each worker, which DDP ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.private = seeded(nn.Linear(8, 3 + 2 * dist.get_rank()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["private.weight", "private.bias"])

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.private(inputs).square().mean(1, keepdim=True) * torch.arange(3)


def private_and_trained(runs: list[Run]) -> None:
    every_batch(runs)
    assert [tuple(run.state["private.weight"].shape) for run in runs] == [(3, 8), (5, 8)]
    assert not any(name.startswith("private") for run in runs for name in run.residuals)


@cache
def complex_is_missing() -> str | None:
    """Return why complex numbers are missing: Gloo sends them since torch's pull request 156633 (September 2025)."""
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    try:
        alone.broadcast(torch.zeros(1, dtype=torch.cfloat), 0).wait()
    except RuntimeError as error:
        return f"This torch's Gloo sends no complex numbers: {error}"
    return None


def own(model: Callable[[], nn.Module], **options: Any) -> Callable[[World], None]:
    return loops(usual, lambda: seeded(model()), **options)


ROWS = {
    "channels_last": Row(loops(usual, channels_last), laid_out_differently),
    "channels_last, two backwards": Row(loops(two_backwards, channels_last), laid_out_differently),
    "column-major": Row(own(Transposed), every_batch),
    "tied weights": Row(own(Tied), every_batch),
    "complex parameters": Row(own(Complex), parts_sent_apart, 0.02, missing=complex_is_missing),
    "gradient penalty": Row(loops(usual, Penalized, sgd), every_batch),
    "reentrant checkpointing": Row(loops(checkpointing, partial(Checkpointed, True)), computed_twice),
    "checkpointing": Row(loops(checkpointing, partial(Checkpointed, False)), computed_twice),
    "private layer": Row(loops(usual, WithPrivateLayer), private_and_trained),
    "embedding": Row(own(WithEmbedding), every_batch, 0.02),
}
