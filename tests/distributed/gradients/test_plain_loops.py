"""Messages for loops without a Trainer that call a function too rarely or at the wrong place."""

import copy
import datetime
import pickle
import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import (
    HardThreshold,
    ShardGradientAverager,
    SparseModelAverager,
    register_comm_hook,
)
from lightning_sparse.drift.step_observer import DriftStepObserver
from tests.integration.models import OptimizerWrapper, messages_of, warnings_of
from tests.workers import on_workers


def build(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def local(kind: str) -> None:
    net = build()
    averager = SparseModelAverager(net, HardThreshold(threshold=0.02))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "two optimizers":
        optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.1)]
    else:
        optimizers = [OptimizerWrapper(optimizer) if kind == "wrapped" else optimizer]
    for batch in batches(50):
        net(batch).square().mean().backward()
        if kind == "step within averaged_weights":
            with averager.averaged_weights():
                optimizer.step()
        for stepping in optimizers:
            stepping.step()
            stepping.zero_grad()
        if kind != "no call":
            averager.step()


def hooked(kind: str) -> None:
    net, head = build(), nn.Linear(8, 64)
    ddp = DistributedDataParallel(nn.ModuleList([net, head]), find_unused_parameters=kind == "a layer replaced")
    ddp.module.forward = lambda inputs: net(inputs).square().mean() + (head(inputs) - 1).square().mean()
    register_comm_hook(ddp, HardThreshold(density=0.1))
    optimizer = torch.optim.SGD((net if kind == "a head in no optimizer" else ddp).parameters(), lr=0.05)
    for step, batch in enumerate(batches(30)):
        if kind == "a layer replaced" and step == 5:
            net[2] = nn.Linear(16, 1)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        ddp(batch).backward()
        if kind != "no step":
            optimizer.step()
        optimizer.zero_grad()


def sharded(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net = build()
    fully_shard(net, mesh=mesh["shard"])
    exchange = ShardGradientAverager(net, HardThreshold(threshold=0.02), group=mesh["replicate"])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        exchange.average_gradients()
        return loss

    for batch in batches(3):
        if kind == "in a closure":
            optimizer.step(closure)
            continue
        net(batch).square().mean().backward()
        if kind == "after zero_grad":
            optimizer.zero_grad()
        if kind not in ("after the step", "no call"):
            exchange.average_gradients()
        if kind == "after zero_grad":
            net(batch).square().mean().backward()
        optimizer.step()
        if kind == "after the step":
            exchange.average_gradients()
        optimizer.zero_grad()


ROWS: dict[tuple[Any, str], str | None] = {
    (local, "one call"): None,
    (local, "two optimizers"): None,
    (local, "wrapped"): None,
    (local, "no call"): r"SGD took 20 steps without a call of averager.step\(\)",
    (local, "step within averaged_weights"): "An optimizer's step while the model has the mean of all workers' weights",
    (hooked, "all in one optimizer"): None,
    (hooked, "a head in no optimizer"): (
        r"2 parameters get gradients, but no optimizer stepped on them in 20 steps \(1.bias, 1.weight\)"
    ),
    (hooked, "a layer replaced"): "an optimizer steps on '0.2.weight', which DDP does not exchange",
    (hooked, "no step"): "the gradients of 20 backwards were dropped, and no torch.optim.Optimizer has stepped",
    (sharded, "one call"): None,
    (sharded, "in a closure"): None,
    (sharded, "no call"): r"Adam stepped on 4 gradients that average_gradients\(\) had not averaged",
    (sharded, "after zero_grad"): r"Adam stepped on 4 gradients",
    (sharded, "after the step"): r"Adam stepped on 4 gradients",
}
"""The expected message for each loop; None for correct loops."""


@on_workers(2)
def test_a_loop_gets_a_single_message_about_its_mistake() -> None:
    for (loop, kind), expected in ROWS.items():
        messages: list[str] = []
        try:
            with warnings_of(messages, "lightning_sparse:"):
                loop(kind)
        except RuntimeError as error:
            messages.append(str(error))
        if dist.get_rank() == 0:
            assert len(messages) == (expected is not None), (loop, kind, messages)
            assert expected is None or re.search(expected, messages[0]), (loop, kind, messages)


def test_an_optimizers_step_counts_after_that_of_another_has_failed() -> None:
    weight, steps = nn.Parameter(torch.ones(1)), list[torch.optim.Optimizer]()
    observer = DriftStepObserver([weight], SimpleNamespace(is_loaded=False))
    observer.on_step = steps.append
    failed, other = (torch.optim.SGD([weight]) for _ in range(2))
    weight.register_post_accumulate_grad_hook(lambda _: other.step())
    for count, step in enumerate([other.step, failed.step, OptimizerWrapper(failed).step, weight.sum().backward], 1):
        with pytest.raises(ZeroDivisionError):
            failed.step(lambda: 1 / 0)
        step()
        assert len(steps) == count


@pytest.mark.parametrize("same", [True, False])
@on_workers(2, process_group=False, new=True)
def test_averagers_in_different_order_raise_an_error_naming_the_rank(same: bool) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    averagers = [SparseModelAverager(nn.Linear(8, size), HardThreshold(threshold=0.0)) for size in (8, 50)]
    if not same and dist.get_rank() == 1:
        averagers.reverse()
    words = f"Exchange 0 failed: rank {1 - dist.get_rank()} ended, stopped or took another step: "
    with nullcontext() if same else pytest.raises(RuntimeError, match=words):
        for _ in range(3):
            for averager in averagers:
                averager.step()
    if same:
        for averager in averagers:
            averager.close()
        SparseModelAverager(nn.Linear(3, 3), HardThreshold(threshold=0.0)).step()


@on_workers(2, new=True)
def test_states_can_be_saved_after_the_process_group_ends() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    nets = [build() for _ in range(4)]
    for net in nets[:2]:
        fully_shard(net, mesh=mesh["shard"])
    wrapped = DistributedDataParallel(nets[2])
    holders = [
        ShardGradientAverager(nets[0], HardThreshold(threshold=0.1), group=mesh["replicate"]),
        SparseModelAverager(nets[1], HardThreshold(threshold=0.1), group=mesh["replicate"]),
        register_comm_hook(wrapped, HardThreshold(threshold=0.1)),
        SparseModelAverager(nets[3], HardThreshold(threshold=0.1)),
    ]
    for copies in (copy.deepcopy, pickle.dumps):
        for holder in holders:
            with pytest.raises(TypeError, match=f"{type(holder).__name__} cannot be copied or pickled"):
                copies(holder)
    dist.destroy_process_group()
    for holder in holders:
        assert {"rank", "world_size", "shared"} <= holder.state_dict().keys()
        holder.close()


@on_workers(2)
def test_dropped_gradients_cause_a_message_but_not_those_of_a_line_search() -> None:
    net = build()
    ddp = DistributedDataParallel(net)
    register_comm_hook(ddp, HardThreshold(threshold=0.0))
    optimizer: Any = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    other: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    messages: list[str] = []

    def closure(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        loss.backward()
        other.step()  # of other parameters
        return loss

    with messages_of(messages):
        for batch in batches(4):
            optimizer.step(partial(closure, batch))
    dropped = "gradients were dropped before an optimizer stepped on them"
    assert not [message for message in messages if dropped in message]
    with messages_of(messages):
        for batch in batches(2):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
    if dist.get_rank() == 0:
        assert len([message for message in messages if dropped in message]) == 1
