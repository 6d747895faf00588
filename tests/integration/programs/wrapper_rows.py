"""Wrappers of models and custom sparsifiers: compilers, Fabric, default dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Sparsifier
from lightning_sparse.sparsifiers.protocol import LayerLayout, Selection
from tests.integration.models import Classifier, compiled, nesterov, sgd
from tests.integration.programs.loops import BATCHES, batches, every_batch, loops, loss_of, usual
from tests.integration.programs.world import Row, Run, World


class PartlyCompiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []
        self.middle = compiled(self.middle, self.graphs)


def compiled_part(world: World) -> None:
    with fresh_compiler():
        model = PartlyCompiled()
        loops(usual, lambda: model, bucket_cap_mb=25)(world)  # with tiny buckets torch does not compile under DDP
        world.run.texts.append(f"graphs were compiled: {bool(model.graphs)}")


def compiled_ddp(world: World) -> None:
    """Compile the whole DDP module, and register the hook on the result."""
    graphs: list[int] = []
    with fresh_compiler():
        # With tiny buckets, torch's DDP optimizer refuses to compile.
        loops(usual, make_ddp=lambda model: compiled(DistributedDataParallel(model, bucket_cap_mb=25), graphs))(world)
        world.run.texts.append(f"graphs were compiled: {bool(graphs) or world.kind == 'oracle'}")


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
    world.run.texts.append(f"graphs were compiled: {bool(graphs)}")


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_and_trained(runs: list[Run]) -> None:
    every_batch(runs)
    assert [run.texts for run in runs] == [["graphs were compiled: True"]] * 2


class AtTheThreshold(nn.Module):
    """Has the same gradients in every step, and one of them equals λ."""

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
            # 0.7 in float32 is slightly less than 0.7.
            assert run.stepped_on[0][0].bool().tolist() == [is_sent_at_once] * 2 + [False, True, False]


@dataclass
class Share:
    """A rule that a sparsifier stores as an object."""

    part: float

    def of(self, elements: int) -> int:
        return int(self.part * elements)


class LargestFirst(Sparsifier):
    """Selects by size and in order of size; stores a tensor and an object."""

    def __init__(self) -> None:
        self.weights, self.rule = torch.full((3,), 2.0), Share(0.25)

    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        indices = compensated.abs().mul(self.weights[0]).topk(self.rule.of(len(compensated))).indices
        assert bool((indices.diff() < 0).any())
        return Selection(indices, compensated[indices])


def largest(compensated: Tensor) -> Tensor:
    is_sent = torch.zeros(compensated.shape, dtype=torch.bool)
    is_sent[compensated.abs().topk(int(0.25 * len(compensated))).indices] = True
    return is_sent


ROWS = {
    "compiled part": Row(compiled_part, compiled_and_trained),
    "compiled DDP": Row(compiled_ddp, compiled_and_trained),
    "Fabric with a compiled model": Row(fabric_with_compiled_model, compiled_and_trained),
    "float64 by default, at the threshold": Row(
        partial(in_double, torch.float64), partial(sent_at_the_threshold, True), 0.7
    ),
    "float32 in float64 by default, at the threshold": Row(
        partial(in_double, torch.float32), partial(sent_at_the_threshold, False), 0.7
    ),
    "sparsifier that does not sort, with a tensor and an object": Row(
        loops(usual, bucket_cap_mb=25), every_batch, make_sparsifier=LargestFirst, select=largest
    ),
}
