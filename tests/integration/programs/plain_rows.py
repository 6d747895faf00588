"""Custom loops around DistributedDataParallel: rare steps, dropped gradients, unsynchronized backwards."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.integration.models import Classifier, nesterov, sgd
from tests.integration.programs.loops import (
    BATCHES,
    Batch,
    Net,
    batches,
    every_batch,
    exchanged,
    loops,
    loss_of,
    stepped,
    two_backwards,
    usual,
)
from tests.integration.programs.world import Row, Run, World


def two_backwards_clipped(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    world.backward(loss_of(module, batch))
    world.run.seen["norms"].append(nn.utils.clip_grad_norm_(module.parameters(), 0.2))
    world.backward(loss_of(module, [-batch[0], batch[1]]))
    optimizer.step()
    optimizer.zero_grad(set_to_none=index % 2 == 0)


def second_leaves_out(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    world.backward(loss_of(module, batch))
    world.backward(loss_of(module, [-batch[0], batch[1]], dist.get_rank() == 0))
    optimizer.step()
    optimizer.zero_grad()


def drops_then_leaves_out(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    world.backward(loss_of(module, batch))
    if index % 2:
        optimizer.zero_grad()
        world.backward(loss_of(module, [-batch[0], batch[1]], False))
    optimizer.step()
    optimizer.zero_grad()


def all_leave_out(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    optimizer.zero_grad()
    world.backward(loss_of(module, batch, index % 5 == 0))
    optimizer.step()


def leave_out_and_keep(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Rarely zeroes gradients. One worker skips a layer, then the other, then both."""
    if index % 5 == 0:
        optimizer.zero_grad(set_to_none=index == 0)
    world.backward(loss_of(module, batch, index % 4 == 0 or index % 4 == 1 + dist.get_rank()))
    optimizer.step()


def zeroes_on_one_worker(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Drop a gradient on one worker only; both workers skip the layer in turn."""
    if index % 2 == dist.get_rank():
        optimizer.zero_grad()
    world.backward(loss_of(module, batch, index % 3 == 0 or index % 3 == 1 + dist.get_rank()))
    optimizer.step()


def measure_skipped_layer(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Call torch.autograd.grad, which is no backward, while an old gradient is present."""
    is_used = index % 2 == 0
    if is_used:
        optimizer.zero_grad()
    else:
        layer = module.sometimes if world.kind == "oracle" else module.module.sometimes
        [norm] = torch.autograd.grad(layer(batch[0]).square().mean(), [layer.weight])
        world.run.seen["norms"].append(norm.norm())
    world.backward(loss_of(module, batch, is_used))
    optimizer.step()


def measure_before_zeroing(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Call torch.autograd.grad while a gradient is present that is dropped later."""
    loss = loss_of(module, batch)
    parts = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    world.run.seen["norms"].append(torch.stack([part.norm() for part in parts]).norm())
    optimizer.zero_grad()
    world.backward(loss)
    if index % 2:
        optimizer.step()


def accumulates_between(drops: bool, world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Step after a synchronized, a local and a synchronized backward; ``drops`` the first gradient."""
    world.backward(loss_of(module, batch))
    if drops:
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    with world.no_sync(module):
        world.backward(loss_of(module, [-batch[0], batch[1]]))
    world.backward(loss_of(module, [2 * batch[0], batch[1]]))
    optimizer.step()
    optimizer.zero_grad()


def takes_back_bad_gradients(
    set_to_none: bool, world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int
) -> None:
    """Step nevertheless, on zeros or without gradients."""
    world.backward(loss_of(module, batch))
    if index % 3 == 1:
        optimizer.zero_grad(set_to_none)
    optimizer.step()
    optimizer.zero_grad()


def two_forwards(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    optimizer.zero_grad()
    world.backward(loss_of(module, batch) + loss_of(module, [-batch[0], batch[1]]))
    optimizer.step()


class Breaker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def continues_after_failure(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Fail in a backward before the first gradient, on all workers."""
    optimizer.zero_grad(set_to_none=index % 2 == 0)
    loss = loss_of(module, batch)
    try:
        world.backward(Breaker.apply(loss) if index % 3 == 1 else loss)
    except ZeroDivisionError:
        world.run.texts.append("failed")
        return
    optimizer.step()


def continues_after_local_failure(world: World, module: nn.Module, optimizer: Any, batch: Batch, index: int) -> None:
    """Fail in the middle of a local backward, and drop its gradients."""
    world.backward(loss_of(module, batch))
    if index % 3 == 1:
        optimizer.zero_grad()
        try:
            with world.no_sync(module):
                hidden = module(batch[0])
                model = module if world.kind == "oracle" else module.module
                hidden = Breaker.apply(model.first(batch[0]).tanh())
                world.backward(model.last(model.middle(hidden)).sum())
        except ZeroDivisionError:
            world.run.texts.append("failed")
        optimizer.zero_grad()
        return
    optimizer.step()
    optimizer.zero_grad()


def failed_and_continued(runs: list[Run]) -> None:
    stepped(BATCHES - 3, runs)
    for run in runs:
        assert run.texts == ["failed"] * 3


def updates_a_copy(world: World) -> None:
    """Give the optimizer copies of the weights, as a kind of mixed precision does."""
    model = Classifier()
    module = world.wrap(model)
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = nesterov(copies)
    world.watch(optimizer)
    for batch in batches():
        model.zero_grad()
        world.backward(loss_of(module, batch))
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = parameter.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, model.parameters(), strict=True):
                parameter.copy_(copy)
        world.commit()


def two_modules(world: World) -> None:
    """Run a backward through two DDP modules."""
    models = {"one.": Classifier(), "other.": Classifier()}
    modules = [world.wrap(model, name) for name, model in models.items()]
    optimizers = [nesterov(modules[0].parameters()), sgd(modules[1].parameters())]
    world.watch(*optimizers)
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        world.backward(loss_of(modules[0], batch) + loss_of(modules[1], [-batch[0], batch[1]]))
        for optimizer in optimizers:
            optimizer.step()


def clamps() -> nn.Module:
    model = Classifier()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


def without_the_last(parameters: Any) -> torch.optim.Optimizer:
    """Leave the last parameter without an optimizer: its gradient grows and is always sent."""
    return nesterov(list(parameters)[:-1])


def left_the_last(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.stepped_on) == BATCHES
        assert [name for name in run.initial if not run.moved(name)] == ["last.bias"]


def sharded(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


_unused = {"find_unused_parameters": True}
_views = {"gradient_as_bucket_view": True}
of_two_backwards = partial(exchanged, 2 * BATCHES, BATCHES)

ROWS = {
    "plain loop": Row(loops(usual), every_batch),
    "plain loop, one bucket": Row(loops(usual, bucket_cap_mb=25), every_batch),
    "plain loop, static graph": Row(loops(usual, static_graph=True), every_batch),
    "plain loop, fused": Row(loops(usual, make_optimizer=partial(torch.optim.Adam, lr=0.01, fused=True)), every_batch),
    "plain loop, sharded optimizer": Row(loops(usual, make_optimizer=sharded), every_batch),
    "plain loop, hooks that clamp": Row(loops(usual, clamps), every_batch),
    "plain loop, a parameter without optimizer": Row(loops(usual, make_optimizer=without_the_last), left_the_last),
    **{
        f"plain two backwards, {exchange}{words}": Row(
            loops(two_backwards, **views), of_two_backwards, exchange=exchange
        )
        for exchange in ("gather", "dense", "reduce_scatter")
        for words, views in (("", {}), (", bucket views", _views))
    },
    "plain two backwards, clipped between": Row(loops(two_backwards_clipped, **_views), of_two_backwards),
    **{
        f"plain second backward leaves out, {exchange}{words}": Row(
            loops(second_leaves_out, Net, **_unused, **views), of_two_backwards, exchange=exchange, leaves_out=True
        )
        for exchange in ("gather", "dense")
        for words, views in (("", {}), (", bucket views", _views))
    },
    "plain dropped, then left out": Row(
        loops(drops_then_leaves_out, Net, **_unused),
        partial(exchanged, BATCHES * 3 // 2, BATCHES),
        rolls_back=True,
        leaves_out=True,
    ),
    "plain layer that nobody uses for a while": Row(loops(all_leave_out, Net, **_unused), every_batch, leaves_out=True),
    **{
        f"plain layer left out and its gradient kept, {exchange}{words}": Row(
            loops(leave_out_and_keep, Net, sgd, **options), every_batch, exchange=exchange, leaves_out=True
        )
        for exchange in ("gather", "dense", "reduce_scatter")
        for words, options in (("", _unused), (", bucket views", _unused | _views))
    },
    "plain gradients kept by one worker": Row(
        loops(zeroes_on_one_worker, Net, sgd, **_unused), every_batch, leaves_out=True
    ),
    "plain autograd.grad of a skipped layer": Row(
        loops(measure_skipped_layer, Net, sgd, **_unused), every_batch, leaves_out=True
    ),
    "plain autograd.grad before zeroing": Row(
        loops(measure_before_zeroing), partial(exchanged, BATCHES, BATCHES // 2), rolls_back=True
    ),
    "plain accumulation between": Row(loops(partial(accumulates_between, False)), of_two_backwards),
    "plain accumulation after a drop": Row(
        loops(partial(accumulates_between, True)), of_two_backwards, rolls_back=True
    ),
    # With λ > 0, a step on a gradient that was zeroed in place counts as a step: docs/guides/reliability.md.
    "plain step on zeros": Row(loops(partial(takes_back_bad_gradients, False)), every_batch, threshold=None),
    "plain step on nothing": Row(loops(partial(takes_back_bad_gradients, True)), every_batch, rolls_back=True),
    "plain two forwards": Row(loops(two_forwards), every_batch),
    "plain failing backward": Row(loops(continues_after_failure), failed_and_continued),
    "plain failing local backward": Row(loops(continues_after_local_failure), failed_and_continued, rolls_back=True),
    "plain copies of the weights": Row(updates_a_copy, every_batch),
    "plain two modules": Row(two_modules, partial(stepped, 2 * BATCHES)),
}
