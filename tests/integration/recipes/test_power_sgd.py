"""``recipes.power_sgd`` against workers that compress their own gradients, in plain tensors."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from lightning_sparse import Dense, SimulatedWorkersStrategy, TopK
from recipes.power_sgd import PowerSGD
from tests.integration.models import data, quiet_trainer
from tests.workers import on_workers

NUM_WORKERS, RANK, STEPS = 3, 2, 5


def slope(rank: int, step: int) -> torch.Tensor:
    return torch.randn(20, 5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


class Slopes(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.small = torch.nn.Parameter(torch.zeros(20, 5, 6)), torch.nn.Parameter(torch.zeros(3, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.weight * slope(self.trainer.global_rank, self.trainer.global_step)).sum() + self.small.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@on_workers(1, process_group=False)
def test_compressing_the_mean_equals_workers_that_compress_their_own_gradients() -> None:
    module, sent = Slopes(), []
    record = LambdaCallback(on_train_batch_end=lambda t, *_: sent.append(t.callback_metrics.get("compressed_bytes")))
    options = {"max_steps": STEPS, "callbacks": [PowerSGD(RANK), record]}
    quiet_trainer(SimulatedWorkersStrategy(Dense(), NUM_WORKERS), num_workers=1, **options).fit(module, data())
    errors = [torch.zeros(20, 30)] * NUM_WORKERS
    right, weight = torch.randn(30, RANK, generator=torch.Generator().manual_seed(0)), torch.zeros(20, 30)
    for step in range(STEPS):
        matrices = [slope(rank, step).flatten(1) + error for rank, error in enumerate(errors)]
        left = torch.linalg.qr(sum(matrix @ right for matrix in matrices) / NUM_WORKERS).Q
        right = sum(matrix.T @ left for matrix in matrices) / NUM_WORKERS
        errors = [matrix - left @ right.T for matrix in matrices]
        weight -= left @ right.T
    torch.testing.assert_close(module.weight.detach().flatten(1), weight, rtol=1e-4, atol=1e-4)
    assert torch.equal(module.small, torch.full((3, 3), -float(STEPS)))
    assert float(sent[-1]) == 4 * (RANK * (20 + 30) + 9)
    with pytest.raises(ValueError, match="PowerSGD got the sparsifier TopK"):
        quiet_trainer(SimulatedWorkersStrategy(TopK(0.1), 2), num_workers=1, **options).fit(module, data())
