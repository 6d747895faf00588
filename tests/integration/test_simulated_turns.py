"""What is each simulated worker's own in its turn, and what Lightning sees between turns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_sparse import Accordion, HardThreshold, SimulatedWorkersStrategy
from tests.integration.models import Classifier, assert_equal, data, quiet_trainer
from tests.integration.test_simulated import _processes, _simulated
from tests.workers import run_workers


def test_a_sparsifier_has_seen_what_that_of_processes_has(tmp_path: Path) -> None:
    sparsifier, found = Accordion(0.02, 0.2, interval=1, relative_change=0.3), []
    for kind, num_processes in ((_processes, 2), (_simulated, 1)):
        path = str(tmp_path / f"{kind.__name__}.ckpt")
        case = {"sparsifier": sparsifier, "trainer": {"max_steps": 8}, "saves": path}
        run_workers(kind, num_processes, case, 2, process_group=False)
        found.append(torch.load(path, weights_only=True)["lightning_sparse"]["histories"][0]["sparsifier"])
    assert all(one.any() for one in found[0]["sums"].values())
    assert_equal(*(one.pop("sums") for one in found))
    assert found[0] == found[1]


class InPart(Classifier):
    """Nobody uses one of its layers, and only the second worker one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.of_second = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
        self.ranks: list[tuple[int, int]] = []
        self.without_gradient: list[tuple[bool, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ranks.append((self.trainer.global_rank, self.trainer.world_size))
        loss = super().training_step(batch, batch_idx)
        return loss + self.of_second.sum() if self.trainer.global_rank == 1 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.without_gradient.append((self.idle.weight.grad is None, self.of_second.grad is None))


def _in_part() -> Any:
    module = InPart()
    trainer = quiet_trainer(SimulatedWorkersStrategy(HardThreshold(threshold=0.01), 3), num_workers=1, max_steps=2)
    trainer.fit(module, data(60, 3))
    return module.without_gradient, module.ranks


def test_only_what_no_worker_has_used_has_no_gradient_and_the_first_is_one_of_all_too() -> None:
    ((without_gradient, ranks),) = run_workers(_in_part, 1, process_group=False)
    assert without_gradient == [(True, False)] * 2
    assert ranks == [(2, 3), (1, 3), (0, 3)] * 2


class Sizes(Callback):
    """How large the batches of validation are."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen.append([len(one) for one in batch])


def _validated() -> Any:
    sizes = Sizes()
    options = {"max_steps": 2, "val_check_interval": 1, "num_sanity_val_steps": 0, "callbacks": [sizes]}
    trainer = quiet_trainer(SimulatedWorkersStrategy(HardThreshold(threshold=0.01), 2), num_workers=1, **options)
    trainer.fit(Classifier(), data(60, 3), data(10, 5))
    return sizes.seen


def test_validation_has_batches_of_its_own_and_all_of_them() -> None:
    assert run_workers(_validated, 1, process_group=False) == [[[5, 5]] * 4]


class LaterPastLightning(Classifier):
    """Makes its first step with Lightning's optimizer, and those after it without."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
            optimizer.optimizer.step()


def _later() -> None:
    trainer = quiet_trainer(SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2), num_workers=1, max_steps=4)
    with pytest.raises(ValueError, match="steps that go past Lightning"):
        trainer.fit(LaterPastLightning(), data())
    assert trainer.global_step == 1


def test_a_step_past_lightning_is_refused_also_after_one_that_is_not() -> None:
    run_workers(_later, 1, process_group=False)


def _payload(exchange: Any) -> int:
    strategy = SimulatedWorkersStrategy(HardThreshold(threshold=0.05), 2, exchange=exchange)
    quiet_trainer(strategy, num_workers=1, max_steps=1).fit(Classifier(), data())
    assert strategy.state is not None
    assert strategy.state.last_step is not None
    return strategy.state.last_step.payload_bytes - strategy.state.last_step.dense_bytes


def test_they_exchange_as_they_are_told() -> None:
    assert run_workers(_payload, 1, "dense", process_group=False)[0] >= 0
    assert run_workers(_payload, 1, "gather", process_group=False)[0] < 0
