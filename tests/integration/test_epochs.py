"""Strategies tell the sparsifier of epochs and learning rates, in both kinds of training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_sparse import Accordion, SparseDDPStrategy, SparseLocalStrategy
from lightning_sparse.strategies.sparse_strategy import tell_epoch
from tests.integration.models import Classifier, data, forgets_a_search, quiet_trainer
from tests.workers import run_workers

STRATEGIES = {"ddp": SparseDDPStrategy, "local": SparseLocalStrategy}
LOW, HIGH = 0.05, 0.3


class Epochs(Callback):
    """The density of every step, epoch by epoch."""

    def __init__(self) -> None:
        self.densities: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.densities.append([])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.densities[-1].append(trainer.strategy.state.last_step.density)


class Module(Classifier):
    """Two groups of parameters, one of which slows down in epoch 3."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": others, "lr": 0.05}])
        falls = [lambda epoch: 1.0, lambda epoch: 0.5 if epoch >= 3 else 1.0]
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, falls)]


def _fit(door: str, searches: bool) -> Any:
    epochs = Epochs()
    # So large a change never happens: after the second comparison layers are calm until the learning rate falls.
    strategy = STRATEGIES[door](Accordion(LOW, HIGH, interval=1, relative_change=1e9))
    searching = [LearningRateFinder(num_training_steps=6)] if searches else []
    trainer = quiet_trainer(strategy, max_steps=-1, max_epochs=6, callbacks=[*searching, epochs])
    trainer.fit(Module(), data(32))
    return epochs.densities[-6:]


@pytest.mark.parametrize("searches", [False, True])
@pytest.mark.parametrize("door", STRATEGIES)
def test_a_layer_is_sent_densely_at_first_and_where_the_learning_rate_has_fallen(door: str, searches: bool) -> None:
    if searches and (reason := forgets_a_search()):
        pytest.skip(reason)
    for densities in run_workers(_fit, 2, door, searches, process_group=False):
        assert [len(one) for one in densities] == [4] * 6
        is_high = [[density > (LOW + HIGH) / 2 for density in one] for one in densities]
        assert is_high == [[expected] * 4 for expected in (True, True, False, True, False, False)]


def test_the_rates_of_all_groups_of_all_optimizers_are_told() -> None:
    told: list[Any] = []
    holder = SimpleNamespace(epoch=None, begin_epoch=lambda *what: told.append(what))
    optimizers = [
        SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": torch.tensor(0.5)}]),
        SimpleNamespace(param_groups=[{"lr": 2}, {"step_size": 0.3}]),
    ]
    tell_epoch(holder, 4, optimizers)  # type: ignore[arg-type]
    holder.epoch = 4
    tell_epoch(holder, 4, optimizers)  # type: ignore[arg-type]
    assert told == [(4, [0.1, 0.5, 2.0])]
