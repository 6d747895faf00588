"""Replicas of a model that FSDP2 shards, against as many plain workers with as much data as a replica has."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sparse import HardThreshold, shard_exchange
from tests.distributed.simulation import Plan, simulate
from tests.workers import run_workers

THRESHOLD = 0.05
STEPS = 12
LAYOUTS = [(2, 2), (3, 1), (1, 2), (2, 1)]


def build_model():
    generator = torch.Generator().manual_seed(3)
    # Uneven on two ranks, and a layer of which the second rank has nothing.
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 1))
    for one in model.parameters():
        with torch.no_grad():
            one.copy_(torch.randn(one.shape, generator=generator))
    return model.double()


def build_batches(num_ranks, steps=STEPS):
    generator = torch.Generator().manual_seed(5)

    def batch():
        inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        return inputs, inputs.sum(1, keepdim=True).sin() + torch.randn(4, 1, generator=generator, dtype=torch.float64)

    return [[batch() for _ in range(num_ranks)] for _ in range(steps)]


def build_mesh(replicas, shards):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(model, mesh):
    for one in model:
        if isinstance(one, nn.Linear):
            fully_shard(one, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def whole_weights(model):
    return {name: one.detach().full_tensor() for name, one in model.named_parameters()}


def whole_residuals(exchange):
    from lightning_sparse.shards.whole_tensors import like_parameter, whole

    named = exchange.residuals().items()
    return {name: whole(like_parameter(exchange.parameters[name], one)) for name, one in named}


def train(layout, sparsifier, options=None, clip=None):
    mesh = build_mesh(*layout)
    model = build_model()
    if dist.get_rank() // layout[1]:  # replicas that begin apart
        for one in model.parameters():
            one.data.add_(1.0)
    sharded(model, mesh["shard"])
    optimizer = make_optimizer(model.parameters())
    exchange = shard_exchange(model, mesh["replicate"], sparsifier, per_layer_stats=True, **(options or {}))
    seen = []
    exchange.subscribe(seen.append)
    for batches in build_batches(dist.get_world_size()):
        inputs, targets = batches[dist.get_rank()]
        nn.functional.mse_loss(model(inputs), targets).backward()
        exchange.average_gradients()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    result = whole_weights(model), whole_residuals(exchange), seen
    exchange.close()
    return result


def as_plain_workers(layout, threshold):
    replicas, shards = layout
    batches = [
        [tuple(map(torch.cat, zip(*step[r * shards : (r + 1) * shards], strict=True))) for r in range(replicas)]
        for step in build_batches(replicas * shards)
    ]
    model = build_model()
    threshold = 0.0 if replicas == 1 else threshold  # one replica has nobody to exchange with
    plan = Plan(lambda layer, whole: ~(whole.abs() < threshold))
    return model, simulate(model, make_optimizer(model.parameters()), batches, plan)


@pytest.mark.parametrize(
    ("layout", "exchange"),
    [
        *((layout, "auto") for layout in LAYOUTS),
        *(((2, 2), route) for route in ("gather", "reduce_scatter", "dense", "hierarchical")),
    ],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.0, THRESHOLD])
def test_replicas_train_as_so_many_workers(layout, exchange, threshold):
    sparsifier = HardThreshold(threshold=threshold)
    results = run_workers(train, layout[0] * layout[1], layout, sparsifier, {"exchange": exchange}, new=True)
    model, records = as_plain_workers(layout, threshold)
    for weights, _, seen in results:
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=1e-12)
        assert [one.density for one in seen] == pytest.approx([one.density for one in records])
        assert [one.error_norm for one in seen] == pytest.approx([one.error_norm for one in records])
        assert seen[-1].num_elements == sum(one.numel() for one in model.parameters())
        for name, one in seen[-1].layers.items():
            assert one.density == pytest.approx(records[-1].layer_density[name])
    assert threshold == 0 or layout[0] == 1 or 0.1 < records[-1].density < 0.9
