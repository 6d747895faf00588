"""What a model may be made of, and what may wrap it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_sparse import Sparsifier
from lightning_sparse.sparsifiers import LayerLayout, Selection
from tests.integration.models import Classifier, nesterov, sgd
from tests.integration.programs.plain_rows import BATCHES, batches, every_batch, loops, loss_of, two_backwards, usual
from tests.integration.programs.world import Row, Run, World


def seeded(module: nn.Module, scale: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
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
    """One parameter lies in memory by columns, and one is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 3).t().contiguous().t())
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs @ self.weight


class Tied(nn.Module):
    """One matrix takes part twice, and has two names."""

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
    """The gradient of its outputs is part of what it returns, so that a backward goes through a backward."""

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


class PartlyCompiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []
        self.middle = compiled(self.middle, self.graphs)


def compiled(module: nn.Module, graphs: list[int]) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    return torch.compile(module, backend=backend)


def compiled_part(world: World) -> None:
    with fresh_compiler():
        model = PartlyCompiled()
        loops(usual, lambda: model, bucket_cap_mb=25)(world)  # with tiny buckets torch does not compile under DDP
        world.run.said.append(f"graphs were compiled: {bool(model.graphs)}")


def compiled_ddp(world: World) -> None:
    """The whole DDP module is compiled, and the hook is given to what comes of it."""
    graphs: list[int] = []
    with fresh_compiler():
        # With tiny buckets torch's own DDP optimizer refuses to compile.
        loops(usual, make_ddp=lambda model: compiled(DistributedDataParallel(model, bucket_cap_mb=25), graphs))(world)
        world.run.said.append(f"graphs were compiled: {bool(graphs) or world.kind == 'oracle'}")


def fabric_with_compiled_model(world: World) -> None:
    graphs: list[int] = []
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    with fresh_compiler():
        model = compiled(Classifier(), graphs)
        module = world.wrap(model, make_ddp=fabric.setup_module)
        optimizer = nesterov(model.parameters())
        world.watch(optimizer)
        stepping = fabric.setup_optimizers(optimizer)
        for batch in batches():
            stepping.zero_grad()
            with world.backwards():
                fabric.backward(loss_of(module, batch))
            stepping.step()
    world.run.said.append(f"graphs were compiled: {bool(graphs)}")


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_and_trained(runs: list[Run]) -> None:
    every_batch(runs)
    assert [run.said for run in runs] == [["graphs were compiled: True"]] * 2


class WithPrivateLayer(Classifier):
    """A layer of another shape on each worker, which DDP is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.private = seeded(nn.Linear(8, 3 + 2 * dist.get_rank()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["private.weight", "private.bias"])

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.private(inputs).mean()


class WithPrivateLoss(WithPrivateLayer):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.private(inputs).square().mean(1, keepdim=True) * torch.arange(3)


def private_and_trained(runs: list[Run]) -> None:
    every_batch(runs)
    assert [tuple(run.state["private.weight"].shape) for run in runs] == [(3, 8), (5, 8)]
    assert not any(name.startswith("private") for run in runs for name in run.residuals)


class Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6, sparse=sparse)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.words((10 * inputs).long().remainder(40)).mean(1))


def refused(world: World) -> None:
    try:
        loops(usual, lambda: seeded(Embedded(True)), sgd)(world)
    except ValueError as error:
        world.run.said.append(str(error))


def refused_with_advice(runs: list[Run]) -> None:
    for run in runs:
        if run.kind == "ddp":
            assert not run.said
            assert len(run.stepped_on) == BATCHES
        else:
            assert "'words' is Embedding(sparse=True)" in run.said[0]
            assert "sparse=False" in run.said[0]


class AtTheThreshold(nn.Module):
    """Its gradients are the same in every step, and one of them is λ."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.slopes = torch.tensor([0.7, -0.7, 0.5, 1.5, 0.1], dtype=dtype)

    def forward(self) -> Tensor:
        return (self.weight * self.slopes).sum()


def in_double(dtype: torch.dtype, world: World) -> None:
    usual_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = world.wrap(AtTheThreshold(dtype))
        optimizer = sgd(module.parameters())
        world.watch(optimizer)
        for _ in range(BATCHES):
            optimizer.zero_grad()
            world.backward(module())
            optimizer.step()
    finally:
        torch.set_default_dtype(usual_dtype)


def sent_at_the_threshold(is_sent_at_once: bool, runs: list[Run]) -> None:
    every_batch(runs)
    for run in runs:
        if run.kind in ("oracle", "sparse"):
            # In float32 0.7 is a little less than 0.7.
            assert [bool(one) for one in run.stepped_on[0][0]] == [is_sent_at_once, is_sent_at_once, False, True, False]


@dataclass
class Share:
    """A rule that a sparsifier may hold as an object."""

    part: float

    def of(self, elements: int) -> int:
        return int(self.part * elements)


class LargestFirst(Sparsifier):
    """Selects by size, and in that order; holds a tensor and an object."""

    def __init__(self, weights: Tensor | None = None, rule: Any = None) -> None:
        self.weights = torch.ones(2) if weights is None else weights
        self.rule = rule or Share(0.25)

    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        indices = compensated.abs().mul(self.weights[0]).topk(self.rule.of(len(compensated))).indices
        assert bool((indices.diff() < 0).any())
        return Selection(indices, compensated[indices])


def largest(compensated: Tensor) -> Tensor:
    is_sent = torch.zeros(compensated.shape, dtype=torch.bool)
    is_sent[compensated.abs().topk(int(0.25 * len(compensated))).indices] = True
    return is_sent


def own(model: Callable[[], nn.Module], **options: Any) -> Callable[[World], None]:
    return loops(usual, lambda: seeded(model()), **options)


ROWS = {
    "channels_last": Row(loops(usual, channels_last), laid_out_differently),
    "channels_last, two backwards": Row(loops(two_backwards, channels_last), laid_out_differently),
    "by columns": Row(own(Transposed), every_batch),
    "tied weights": Row(own(Tied), every_batch),
    "complex parameters": Row(own(Complex), parts_sent_apart, 0.02),
    "gradient penalty": Row(loops(usual, Penalized, sgd), every_batch),
    "reentrant checkpointing": Row(loops(checkpointing, partial(Checkpointed, True)), computed_twice),
    "checkpointing": Row(loops(checkpointing, partial(Checkpointed, False)), computed_twice),
    "compiled part": Row(compiled_part, compiled_and_trained),
    "compiled DDP": Row(compiled_ddp, compiled_and_trained),
    "Fabric with a compiled model": Row(fabric_with_compiled_model, compiled_and_trained),
    "private layer": Row(loops(usual, WithPrivateLoss), private_and_trained),
    "embedding": Row(own(partial(Embedded, False)), every_batch, 0.02),
    "embedding with sparse gradients": Row(refused, refused_with_advice, None, is_refused=True),
    "float64 by default, at the threshold": Row(
        partial(in_double, torch.float64), partial(sent_at_the_threshold, True), 0.7
    ),
    "float32 in float64 by default, at the threshold": Row(
        partial(in_double, torch.float32), partial(sent_at_the_threshold, False), 0.7
    ),
    "sparsifier that does not sort": Row(
        own(Classifier, bucket_cap_mb=25), every_batch, make_sparsifier=LargestFirst, select=largest
    ),
    "sparsifier with a tensor and an object": Row(
        own(Classifier, bucket_cap_mb=25),
        every_batch,
        make_sparsifier=partial(LargestFirst, torch.full((3,), 2.0), Share(0.25)),
        select=largest,
    ),
}
