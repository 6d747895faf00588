"""Sharded replicas with their own optimizers against as many plain workers, each with the data of a replica."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager
from lightning_sparse.exchange.sharded_tensors import full_tensors, like_parameter
from tests.distributed.drift import drift_simulation
from tests.distributed.drift.drift_simulation import CASES, Simulation, at_least, flat
from tests.distributed.gradients.test_shards import LAYOUTS, STEPS, build_batches, build_mesh, sharded
from tests.integration.strategies.hsdp_models import adam, build_network, loss_of
from tests.workers import run_workers

THRESHOLD = 0.02
LOOKS_AT = (0, 4, 7)
"""Steps after which a forward without backward uses the mean of all replicas' weights."""


def train(layout, options):
    """Return the full weights and anchor of a replica after each step, and its final statistics."""
    mesh, model = build_mesh(*layout), build_network()
    if dist.get_rank() // mesh["shard"].size():  # replicas start with different weights
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    sharded(model, mesh["shard"])
    sparsifier = HardThreshold(threshold=THRESHOLD)
    averager = SparseModelAverager(
        model, sparsifier, DriftOptions(**options), group=mesh["replicate"], per_layer_stats=True
    )
    optimizer = adam(model.parameters())
    history, looks = [], []
    batches = build_batches(dist.get_world_size())
    for step in range(STEPS):
        loss_of(model, batches[step][dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.step()
        history.append((weights_of(averager), anchor_of(averager), averager.exchange.largest_drift))
        if step in LOOKS_AT:
            with averager.averaged_weights(), torch.no_grad():
                looks.append((weights_of(averager), model(batches[0][0][0])))
    with averager.averaged_weights():
        mean = weights_of(averager)
    own = weights_of(averager)
    averager.close()
    return history, looks, mean, own, averager.last_step


def weights_of(averager):
    return torch.cat([full_tensors(parameter.detach()).flatten() for parameter in averager.parameters.values()])


def anchor_of(averager):
    parameters = averager.parameters
    named = averager.anchor().items()
    return torch.cat(
        [full_tensors(like_parameter(parameters[name], tensor.reshape(-1))).flatten() for name, tensor in named]
    )


def simulated(layout, options):
    replicas, shards = layout
    models = [build_network() for _ in range(replicas)]
    select = at_least(THRESHOLD if replicas > 1 else 0.0)  # a single replica does not exchange
    optimizers = [adam(model.parameters()) for model in models]
    simulation = Simulation(models, optimizers, select, **drift_simulation.simulated(options))
    history, looks = [], []
    steps = build_batches(replicas * shards)
    for step, ranks in enumerate(steps):
        of_replicas = [ranks[r * shards : (r + 1) * shards] for r in range(replicas)]
        whole_batches = [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in of_replicas]
        simulation.step([partial(loss_of, batch=batch) for batch in whole_batches])
        history.append(([flat(model) for model in models], simulation.anchor))
        if step in LOOKS_AT:
            double = build_network()
            mean = simulation.mean()
            nn.utils.vector_to_parameters(mean, double.parameters())
            with torch.no_grad():
                looks.append((mean, double(steps[0][0][0])))
    return simulation, history, looks


ROWS = [((2, 2), case) for case in CASES if case != "back to the anchor"]  # other rows combine it
ROWS += [(layout, "every third step") for layout in LAYOUTS if layout != (2, 2)]


@pytest.mark.parametrize(("layout", "case"), ROWS, ids=str)
def test_sharded_replicas_train_as_plain_workers(layout, case):
    ranks = run_workers(train, layout[0] * layout[1], layout, CASES[case], new=True)
    simulation, expected, expected_looks = simulated(layout, CASES[case])
    for rank, (history, looks, mean, own, last) in enumerate(ranks):
        for (weights, anchor, _), (all_weights, expected_anchor) in zip(history, expected, strict=True):
            torch.testing.assert_close(weights, all_weights[rank // layout[1]], rtol=0, atol=1e-12)
            torch.testing.assert_close(anchor, expected_anchor, rtol=0, atol=1e-12)
        torch.testing.assert_close(looks, expected_looks, rtol=0, atol=1e-12)
        torch.testing.assert_close(mean, simulation.mean(), rtol=0, atol=1e-12)
        torch.testing.assert_close(own, flat(simulation.models[rank // layout[1]]), rtol=0, atol=1e-12)
        assert last.num_elements == sum(layer.num_elements for layer in last.layers.values()) == mean.numel()
        assert simulation.sent[-1] == last.selected
        assert layout[0] == 1 or 0.02 < last.density < 0.98
    largest = [[drift for *_, drift in history] for history, *_ in ranks]
    assert all(drifts == largest[0] for drifts in largest)  # of all shards
