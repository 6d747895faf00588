"""Layers and buffers that are added, replaced or removed during training."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager
from tests.distributed.gradients.test_plain_loops import batches, build
from tests.workers import of_all_workers, on_workers

LAMBDA, STEPS, CHANGE = 0.02, 20, 5


def replace_layer(net: nn.Sequential) -> None:
    net[2] = nn.Linear(16, 4)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "replaced": replace_layer,
    "resized": lambda net: setattr(net, "2", nn.Linear(16, 7)),
    "removed": lambda net: setattr(net, "2", nn.Identity()),
    "renamed": lambda net: prune.l1_unstructured(net[0], "weight", amount=0.3),
}


@on_workers(2)
def test_a_replaced_renamed_or_removed_layer_raises_at_the_next_exchange() -> None:
    for change in CHANGES.values():
        net = build(4)
        averager = SparseModelAverager(net, HardThreshold(threshold=LAMBDA))
        averager.step()
        change(net)
        with pytest.raises(RuntimeError, match="was replaced, renamed or removed"):
            averager.step()
        averager.close()


@on_workers(2)
def test_an_added_layer_starts_from_its_mean_and_stays_within_the_threshold() -> None:
    net = build(4)
    averager = SparseModelAverager(net, HardThreshold(threshold=LAMBDA), DriftOptions(every_n_steps=3))
    for step, batch in enumerate(batches(STEPS)):
        if step in (0, CHANGE):
            if step:
                torch.manual_seed(dist.get_rank())  # each worker draws different weights
                net.append(nn.Linear(4, 4))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.step()
        if step == CHANGE:
            torch.testing.assert_close(*of_all_workers(net[3].weight.detach()), rtol=0, atol=LAMBDA)
        if step >= CHANGE and (step + 1) % 3 == 0:  # an exchange has ended
            assert (net[3].weight - averager.anchor()["3.weight"]).abs().max() < LAMBDA * (1 + 1e-5)
    weights, anchor = dict(net.named_parameters()), averager.anchor()
    assert weights.keys() == anchor.keys()
    torch.testing.assert_close(*of_all_workers(dict(anchor)), rtol=0, atol=0)
    averager.close()


class Statistic(nn.Module):
    """A layer that starts to track the mean of its inputs during training."""

    def forward(self, inputs: Tensor) -> Tensor:
        if hasattr(self, "mean"):
            self.mean += inputs.detach().mean(0)
        return inputs


@pytest.mark.parametrize("every_n_steps", [1, 3, 100])
@on_workers(2)
def test_a_buffer_registered_later_is_averaged_and_saved(every_n_steps: int) -> None:
    net = build(4).append(Statistic())
    averager = SparseModelAverager(net, HardThreshold(threshold=LAMBDA), DriftOptions(every_n_steps=every_n_steps))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, batch in enumerate(batches(STEPS)):
        if step == CHANGE:
            net[3].register_buffer("mean", torch.zeros(4))
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.step()
    own = net[3].mean.clone()
    with averager.averaged_weights():
        shared = net[3].mean.clone()
    saved = averager.state_dict()["extra"]["buffers"]["3.mean"]
    assert torch.equal(*of_all_workers(shared))
    torch.testing.assert_close(shared, sum(of_all_workers(own)) / 2)
    assert torch.equal(saved, own)
