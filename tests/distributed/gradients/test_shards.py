"""Replicas of a model that FSDP2 shards against as many plain workers, each with the data of a replica."""

import random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from lightning_sparse import ExchangeOptions, HardThreshold, ShardGradientAverager, SparseModelAverager
from lightning_sparse.engine import grouping
from lightning_sparse.exchange.groups import replica_workers
from lightning_sparse.exchange.sharded_tensors import full_tensors, sharded_like
from tests.integration.strategies.hsdp_models import build_network, whole_weights
from tests.workers import on_workers, run_workers

THRESHOLD = 0.05
LAYOUTS = [(2, 2), (3, 1), (1, 2), (2, 1)]
ROUTES = ["auto", "gather", "reduce_scatter", "dense"]


def build_mesh(replicas, shards):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(model, mesh):
    for layer in model[:-1]:  # the root module owns the last layer and keeps it gathered after a forward
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_residuals(exchange):
    named = exchange.snapshot().own["unsent"].items()
    return {name: full_tensors(sharded_like(residual, exchange.parameters[name])) for name, residual in named}


FALLS_AT = 4
"""From this step on λ is lower, below values in the residuals, including those of unused parameters."""


def draw(seed):
    """Draw a training: layers, the layers used and stepped in each step, and the exchange."""
    dice = random.Random(seed)
    layers = [(dice.choice([1, 2, 3, 5, 8]), dice.random() < 0.5) for _ in range(dice.randint(1, 5))]
    replicas, shards = dice.choice(LAYOUTS)
    names = [
        f"{place}.{kind}" for place, (_, has_bias) in enumerate(layers) for kind in ("weight", "bias")[: 1 + has_bias]
    ]
    steps = []
    for _ in range(8):
        used = [[dice.random() < 0.8 for _ in layers] for _ in range(replicas)]
        if not any(map(any, used)):
            used[0][0] = True
        used = [of_replica if any(of_replica) else [True, *of_replica[1:]] for of_replica in used]
        steps.append((used, [name for name in names if dice.random() < 0.8] if dice.random() < 0.5 else names))
    return {
        "seed": seed,
        "layers": layers,
        "layout": (replicas, shards),
        "steps": steps,
        "threshold": dice.choice([0.0, 0.1, 0.5, 3.0]),
        "layer_thresholds": {"0.*": 0.2} if dice.random() < 0.3 else {},
        "exchange": dice.choice(ROUTES),
        "bucket": dice.choice([4, 20, 10**6]),
        "zeroes": dice.random() < 0.7,
        "momentum": dice.choice([0.0, 0.9]),
        "falls_to": dice.choice([1.0, 0.3]),
        "reloads_at": dice.randrange(8),
    }


def soak_model(plan):
    generator = torch.Generator().manual_seed(plan["seed"])
    model = nn.ModuleList(nn.Linear(3, width, bias=has_bias) for width, has_bias in plan["layers"]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def soak_loss(model, used, inputs):
    return sum((layer(inputs).sin().square().mean() for layer, is_used in zip(model, used, strict=True) if is_used))


def soak_inputs(plan):
    replicas, shards = plan["layout"]
    generator = torch.Generator().manual_seed(plan["seed"] + 1)
    shape = len(plan["steps"]), replicas, shards, 4, 3
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def soak(plan):
    grouping.BUCKET_ELEMENTS = plan["bucket"]
    replicas, shards = plan["layout"]
    mesh = build_mesh(replicas, shards)
    model = soak_model(plan)
    replica, shard = divmod(dist.get_rank(), shards)
    for parameter in model.parameters():
        parameter.data.add_(replica)  # the exchange must replace these by the weights of replica 0
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    named = dict(model.named_parameters())
    sparsifier = HardThreshold(threshold=plan["threshold"], layer_thresholds=plan["layer_thresholds"])
    options = ExchangeOptions(exchange=plan["exchange"])
    exchange = ShardGradientAverager(model, sparsifier, options, group=mesh["replicate"])
    optimizers = {name: torch.optim.SGD([weight], lr=0.1, momentum=plan["momentum"]) for name, weight in named.items()}
    for step, ((used, stepped), inputs) in enumerate(zip(plan["steps"], soak_inputs(plan), strict=True)):
        if step == FALLS_AT and replicas > 1:  # a single replica ignores λ
            exchange.set_threshold(plan["falls_to"] * plan["threshold"])
        if step == plan["reloads_at"]:
            state = exchange.state_dict()
            exchange.close()
            exchange = ShardGradientAverager(model, sparsifier, options, group=mesh["replicate"])
            exchange.load_state_dict(state)
        soak_loss(model, used[replica], inputs[replica, shard]).backward()
        exchange.average_gradients(named[name] for name in stepped)
        for name in stepped:
            optimizers[name].step()
        if plan["zeroes"]:
            model.zero_grad()
    result = whole_weights(model), whole_residuals(exchange), exchange.last_step
    exchange.close()
    return result


def soak_in_plain_tensors(plan):
    replicas, _ = plan["layout"]
    model = soak_model(plan)
    named = dict(model.named_parameters())
    errors = [{name: torch.zeros_like(parameter) for name, parameter in named.items()} for _ in range(replicas)]
    held = [dict.fromkeys(named) for _ in range(replicas)]  # gradients of each replica
    optimizers = {name: torch.optim.SGD([weight], lr=0.1, momentum=plan["momentum"]) for name, weight in named.items()}
    for step, ((used, stepped), inputs) in enumerate(zip(plan["steps"], soak_inputs(plan), strict=True)):
        usual = plan["threshold"] * (plan["falls_to"] if step >= FALLS_AT else 1.0)
        selected = 0
        for replica in range(replicas):
            model.zero_grad()
            soak_loss(model, used[replica], inputs[replica].flatten(0, 1)).backward()
            for name, parameter in named.items():
                if parameter.grad is not None:
                    before = held[replica][name]
                    held[replica][name] = parameter.grad.clone() if before is None else before + parameter.grad
        for name in stepped:
            who = [replica for replica in range(replicas) if held[replica][name] is not None]
            total = torch.zeros_like(named[name])
            for replica in who:
                whole = errors[replica][name] + held[replica][name]
                threshold = 0.2 if plan["layer_thresholds"] and name.startswith("0.") else usual
                is_sent = whole.abs() >= (threshold if replicas > 1 else 0.0)  # a single replica sends everything
                sent = torch.where(is_sent, whole, 0.0)
                selected += int(is_sent.sum())
                errors[replica][name] = whole - sent
                total += sent
            for of_replica in held:
                of_replica[name] = total / replicas if who else None
            named[name].grad = held[0][name]
            optimizers[name].step()
        if plan["zeroes"]:
            held = [dict.fromkeys(named) for _ in range(replicas)]
    return named, errors, selected


@pytest.mark.parametrize("seed", [22, 0, 2, 4, 6, 7, 9, 10, 11, 15, 16, 38])
def test_random_trainings_equal_plain_replicas(seed):
    plan = draw(seed)
    replicas, shards = plan["layout"]
    weights, errors, selected = soak_in_plain_tensors(plan)
    for rank, (found, residuals, last) in enumerate(run_workers(soak, replicas * shards, plan, new=True)):
        torch.testing.assert_close(found, dict(weights), rtol=0, atol=1e-11)
        torch.testing.assert_close(residuals, errors[rank // shards], rtol=0, atol=1e-11)
        assert last.selected == selected


@on_workers(4, new=True)
def test_averagers_of_shards_raise_on_misuse():
    mesh, model, sparsifier = build_mesh(2, 2), build_network(), HardThreshold(threshold=0.1)
    with torch.device("meta"):
        empty = sharded(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)), mesh["shard"])
    for make, message in (
        (lambda: ShardGradientAverager(model, sparsifier, group=mesh), "Must be the dimension of replicas alone"),
        (lambda: ShardGradientAverager(model, sparsifier, group=mesh["replicate"]), "0.weight is not sharded"),
        (
            lambda: ShardGradientAverager(sharded(build_network(), mesh["shard"]), sparsifier, group=mesh["shard"]),
            "and the mesh of replicas, ",
        ),
        (lambda: ShardGradientAverager(model, 0.1, group=mesh["replicate"]), "Expected a sparsifier"),
        (lambda: ShardGradientAverager(empty, sparsifier, group=mesh["replicate"]), "is on the meta device"),
        (lambda: SparseModelAverager(sharded(build_network(), mesh["shard"]), sparsifier), "use SparseModelAverager"),
        (
            lambda: SparseModelAverager(model, sparsifier, group=mesh),
            "Invalid group=.* of replicas alone",
        ),
        (lambda: SparseModelAverager(model, sparsifier, group="replicate"), "Invalid group='replicate'. Must be"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            make()
    single = init_device_mesh("cpu", (4, 1), mesh_dim_names=("shard", "rest"))
    with pytest.raises(ValueError, match="sharded over one rank, but a replica has 4"):
        ShardGradientAverager(sharded(build_network(), single["rest"]), sparsifier, group=single["rest"])
    crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
    with pytest.raises(RuntimeError, match=r"replicas of ascending ranks: .* \[\(0, 3\), \(1, 2\)\]"):
        ShardGradientAverager(sharded(build_network(), crossed["shard"]), sparsifier, group=crossed["replicate"])
    other_dimension = nn.Linear(4, 4, bias=False)
    fully_shard(other_dimension, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(dist.get_rank() // 2))
    with pytest.raises(RuntimeError, match=r"shard of weight: rank 0: '\[2, 4\], .* rank 2: '\[4, 2\]"):
        ShardGradientAverager(other_dimension, sparsifier, group=mesh["replicate"])
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    exchange = ShardGradientAverager(model, sparsifier, group=alone["replicate"])
    sharded(model, alone["shard"])
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match="Call fully_shard first"):
        exchange.average_gradients()
    exchange.close()
    with pytest.raises(RuntimeError, match="The exchange was closed"):
        exchange.average_gradients()


@on_workers(2)
def test_an_interrupted_exchange_of_shards_does_not_count_gradients_twice():
    mesh = build_mesh(2, 1)
    model = sharded(build_network(), mesh["shard"])
    exchange = ShardGradientAverager(model, HardThreshold(threshold=THRESHOLD), group=mesh["replicate"])
    model(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
    with patch.object(exchange._engine, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        exchange.average_gradients()
    with pytest.raises(RuntimeError, match="An exception interrupted an exchange of gradients"):
        exchange.average_gradients()
    exchange.reset()
    exchange.average_gradients()
    exchange.close()


@on_workers(2, new=True)
def test_groups_of_a_destroyed_world_are_not_reused(tmp_path):
    sums = []
    for world in range(2):
        if world:
            rank, size = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/second", rank=rank, world_size=size)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        for _ in range(2):
            replica = replica_workers(alone)
            sums.append(replica.gather_numbers([1.0], torch.device("cpu")).sum(0).tolist())
    assert sums == [[2.0]] * 4
