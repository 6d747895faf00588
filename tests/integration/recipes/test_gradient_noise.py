"""Callbacks of recipes that measure: the gradients' noise, from which the paper's threshold follows, and the lag."""

import io
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from lightning_sparse import Dense, HardThreshold, SimulatedWorkersStrategy
from lightning_sparse.theory import measured_noise, threshold_from_estimates
from recipes.gradient_noise import GradientNoise
from recipes.lag import Lag
from tests.integration.models import Classifier, data, quiet_trainer
from tests.workers import on_workers


class Observed(Classifier):
    """Records the averaged gradient of each step."""

    def on_fit_start(self) -> None:
        self.averages: list[torch.Tensor] = []

    def on_before_optimizer_step(self, _: Any) -> None:
        gradients = [parameter.grad.flatten() for parameter in self.parameters() if parameter.grad is not None]
        self.averages.append(torch.cat(gradients))


@on_workers(1, process_group=False)
def test_every_worker_adds_its_gradient_of_every_step() -> None:
    noise, model = GradientNoise(densities=(0.1,)), Observed(partial(torch.optim.SGD, lr=1e-12))
    strategy = SimulatedWorkersStrategy(Dense(), 2)
    with redirect_stdout(io.StringIO()) as printed:
        quiet_trainer(strategy, num_workers=1, max_steps=4, callbacks=[noise]).fit(model, data())
    draws = [torch.stack(of_worker) for of_worker in noise._draws]
    assert [tuple(of_worker.shape) for of_worker in draws] == [(4, model.averages[0].numel())] * 2
    assert not torch.equal(*draws)
    means = (draws[0] + draws[1]) / 2
    for mean, average in zip(means, model.averages, strict=True):
        assert float(mean.norm()) == pytest.approx(float(average.norm()), rel=1e-5)
        torch.testing.assert_close(mean.sort().values, average.sort().values)  # a bucket has its own order of layers
    sigma, zeta = measured_noise(draws)
    count = round(0.1 * means.shape[1])
    threshold = threshold_from_estimates(count, means.shape[1], sigma, max(0.0, zeta))
    assert f"σ² = {sigma:.4g}, ζ² = {zeta:.4g}" in printed.getvalue()
    assert f"k/d = 0.1: λ = {threshold:.4g}" in printed.getvalue()


class Slope(LightningModule):
    """Has the gradient (1/4, -1/2, 0) in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.weight * torch.tensor([0.25, -0.5, 0.0])).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_workers(1, process_group=False)
def test_the_lag_is_the_mean_residual_in_the_direction_of_the_gradient() -> None:
    lags: list[float] = []
    record = LambdaCallback(on_train_batch_end=lambda t, *_: lags.append(float(t.callback_metrics.get("lag", 0))))
    strategy = SimulatedWorkersStrategy(HardThreshold(threshold=1.0, overshoot=0.5), 2)
    options = {"max_steps": 7, "accumulate_grad_batches": 2, "callbacks": [Lag(), record]}
    quiet_trainer(strategy, num_workers=1, **options).fit(Slope(), data())
    # A coordinate has no direction until it is sent first, in steps 4 and 2. Its residual then restarts at -1/2.
    assert lags[1::2] == pytest.approx([0, -0.5 / 3, 0, 0, -0.75 / 3, 0, 0.75 / 3])


def test_each_gradient_counts_once_with_two_optimizers():
    module, lag = torch.nn.Linear(2, 1), Lag(window=4)
    module(torch.ones(2)).sum().backward()
    for parameter in module.parameters():
        lag.on_before_optimizer_step(None, module, torch.optim.SGD([parameter]))
    assert lag._means["weight"].tolist() == [[0.25, 0.25]]
