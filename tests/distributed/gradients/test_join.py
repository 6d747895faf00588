"""Workers with unequal numbers of batches in torch's Join: nothing is lost or counts twice, and all workers agree."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import (
    Accordion,
    Dense,
    GradientOptions,
    HardThreshold,
    RandomK,
    StochasticRounding,
    TopK,
    register_comm_hook,
)
from tests.distributed.training import Weights
from tests.workers import on_workers, run_workers


def _epochs(kind, num_epochs, *, drops=False):
    """Train on 10 + 15 r batches per epoch on worker r. With ``drops`` the last worker skips three steps."""
    sparsifier, options = KINDS[kind]
    options = dict(options)
    module = DistributedDataParallel(
        Weights(weight=torch.zeros(40)), find_unused_parameters=options.pop("find_unused_parameters", False)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    state = register_comm_hook(module, sparsifier, GradientOptions(**options), optimizer=optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    total, numbers = torch.zeros(40), []
    for epoch in range(num_epochs):
        state.begin_epoch(epoch, [1.0])
        with module.join():
            num_batches = 10 + 15 * dist.get_rank()
            for batch in range(num_batches):
                optimizer.zero_grad()
                gradient = 1 + 0.1 * torch.randn(40, generator=generator)
                module(gradient).backward()
                is_last = dist.get_rank() == dist.get_world_size() - 1
                if drops and is_last and num_batches - batch in (1, 2, 5):
                    continue
                optimizer.step()
                total += gradient
        numbers.append(
            {"λ": state.sparsifier.current_threshold, **state.snapshot().numbers, **state.snapshot().history}
        )
    (residual,) = state.state_dict()["own"]["unsent"].values()
    return {"total": total, "pending": residual.view(-1), "weight": module.module.weight.detach(), "numbers": numbers}


KINDS = {
    "everything": (Dense(), {}),
    "top k": (TopK(0.2), {}),
    "top k of the model": (TopK(0.2, granularity="model"), {}),
    "top k, unused": (TopK(0.2), {"find_unused_parameters": True}),
    "top k, learning rates": (TopK(0.2), {"error_feedback": "learning_rate"}),
    "top k by slices": (TopK(0.2), {"exchange": "reduce_scatter"}),
    "top k, dense": (TopK(0.2), {"exchange": "dense"}),
    "random k": (RandomK(0.2), {}),
    "accordion": (Accordion(0.1, 0.3, interval=1), {}),
    "rounding": (StochasticRounding(8.0), {}),
    "threshold": (HardThreshold(threshold=4.5), {}),
    "threshold, bfloat16": (HardThreshold(threshold=4.5), {"value_dtype": "bfloat16"}),
    "density": (HardThreshold(density=0.3, calibration_steps=2), {}),
    "density, float8": (HardThreshold(density=0.3, calibration_steps=2), {"value_dtype": "float8"}),
    "density of each layer": (HardThreshold(density=0.3, calibration_steps=2, granularity="layer"), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sent_and_pending_gradients_add_up_under_join(kind):
    workers = run_workers(_epochs, 3, kind, 4 if kind == "accordion" else 2)
    mean = torch.stack([worker["total"] - worker["pending"] for worker in workers]).mean(0)
    for worker in workers:
        torch.testing.assert_close(-worker["weight"], mean, rtol=1e-4, atol=1e-3)
        assert repr(worker["numbers"]) == repr(workers[0]["numbers"])


@pytest.mark.parametrize("kind", ["random k", "density, float8", "density of each layer", "accordion"])
def test_joined_workers_agree_after_dropped_gradients(kind):
    """Workers without batches cannot see that an exchange does not train."""
    workers = run_workers(partial(_epochs, drops=True), 2, kind, 3)
    for worker in workers:
        assert repr(worker["numbers"]) == repr(workers[0]["numbers"])
        torch.testing.assert_close(worker["weight"], workers[0]["weight"], rtol=0, atol=0)


@on_workers(2)
def test_join_rejects_averages_over_fewer_workers():
    module = DistributedDataParallel(Weights(weight=torch.zeros(40)))
    register_comm_hook(module, TopK(0.2))
    with pytest.raises(ValueError, match="Invalid divide_by_initial_world_size=False"):
        module.join(divide_by_initial_world_size=False)
