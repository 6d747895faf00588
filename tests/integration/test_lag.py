"""The lag of residuals behind a constant gradient, whose direction is known."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from lightning_sparse import HardThreshold, SimulatedWorkersStrategy
from recipes.lag import Lag
from tests.integration.models import data, quiet_trainer
from tests.workers import on_workers

GRADIENT = torch.tensor([0.25, -0.25, 0.5, 0.0])
THRESHOLD, STEPS = 1.0, 7


class Slope(LightningModule):
    """Has the same gradient in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.weight * GRADIENT).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("overshoot", [0.0, 0.5])
@on_workers(1, process_group=False)
def test_the_lag_is_the_mean_residual_in_the_direction_of_the_gradient(overshoot: float) -> None:
    lags: list[float] = []
    record = LambdaCallback(on_train_batch_end=lambda trainer, *_: lags.append(float(trainer.callback_metrics["lag"])))
    strategy = SimulatedWorkersStrategy(HardThreshold(threshold=THRESHOLD, overshoot=overshoot), 2)
    trainer = quiet_trainer(strategy, num_workers=1, max_steps=STEPS, callbacks=[Lag(), record])
    trainer.fit(Slope(), data())
    residual, sent, expected = torch.zeros(4), torch.zeros(4), []
    for _ in range(STEPS):
        residual = residual + GRADIENT
        leaves = residual.abs() >= THRESHOLD
        residual = torch.where(leaves, -overshoot * THRESHOLD * residual.sign(), residual)
        sent = sent.logical_or(leaves)
        expected.append(float((residual * GRADIENT.sign() * sent).mean()))
    assert lags == pytest.approx(expected)
    assert max(expected) > 0
