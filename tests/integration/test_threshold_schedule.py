"""λ that changes by step; resumes, and configurations that are refused."""

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lightning_sparse import (
    DDPHardThresholdStrategy,
    HardThreshold,
    LocalHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    ThresholdSchedule,
    TopK,
)
from tests.integration.models import Classifier, TwoPlayers, data, messages_of, quiet_trainer
from tests.workers import on_workers, run_workers


def collects(seen: list[float]) -> Callback:
    """Returns a callback that collects the λ of every exchange."""
    return LambdaCallback(
        on_fit_start=lambda trainer, _: trainer.strategy.state.subscribe(lambda step: seen.append(step.threshold))
    )


HALVED = ThresholdSchedule({1: 1.0, 2: 0.5})
CASES: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "in jumps": (ThresholdSchedule({1: 1.0, 2: 0.5, 3: 0.5, 4: 0.0}), {}, [1, 1, 0.5, 0.5, 0, 0]),
    "linearly": (ThresholdSchedule({4: 1.0, 0: 0.0}), {}, [0, 0.25, 0.5, 0.75, 1, 1]),
    "a single factor": (ThresholdSchedule({3: 0.5}), {}, [0.5] * 6),
    "accumulated": (HALVED, {"accumulate_grad_batches": 2, "max_steps": 3}, [1, 1, 0.5]),
    "drifts": (HALVED, {"strategy": LocalHardThresholdStrategy(threshold=0.2)}, [1, 1, 0.5, 0.5, 0.5, 0.5]),
    "two optimizers": (
        HALVED,
        {"model": TwoPlayers(), "strategy": DDPHardThresholdStrategy(threshold=0.2, find_unused_parameters=True)},
        [1, 1, 0.5, 0.5, 0.5, 0.5],
    ),
    "simulated": (
        HALVED,
        {"strategy": SimulatedWorkersStrategy(HardThreshold(threshold=0.2), 3, device="cpu"), "num_workers": 1},
        [1, 1, 0.5, 0.5, 0.5, 0.5],
    ),
    "a single simulated worker": (
        HALVED,
        {"strategy": SimulatedWorkersStrategy(HardThreshold(threshold=0.2), 1, device="cpu"), "num_workers": 1},
        [1, 1, 0.5, 0.5, 0.5, 0.5],
    ),
    "alone": (HALVED, {"num_workers": 1}, [0] * 6),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_sets_the_threshold_of_each_step(name: str) -> None:
    expected = [pytest.approx(0.2 * factor) for factor in CASES[name][2]]
    for seen in run_workers(_train, CASES[name][1].get("num_workers", 2), name, process_group=False):
        assert seen == expected


def _train(name: str) -> list[float]:
    schedule, given, _ = CASES[name]
    options = {"strategy": DDPHardThresholdStrategy(threshold=0.2), "num_workers": 2, "max_steps": 6} | given
    seen, model = [], options.pop("model", Classifier())
    quiet_trainer(options.pop("strategy"), callbacks=[collects(seen), schedule], **options).fit(model, data())
    return seen


@on_workers(2, process_group=False)
def test_a_resumed_run_continues_the_schedule(tmp_path: Any) -> None:
    def train(
        max_steps: int, threshold: float = 0.2, is_scheduled: bool = True, **options: Any
    ) -> tuple[Trainer, list[float]]:
        seen, strategy = [], DDPHardThresholdStrategy(threshold=threshold)
        callbacks = [collects(seen), *([ThresholdSchedule({0: 0.1, 5: 1.0})] if is_scheduled else [])]
        trainer = quiet_trainer(strategy, num_workers=2, max_steps=max_steps, callbacks=callbacks)
        trainer.fit(Classifier(), data(), **options)
        return trainer, seen

    _, whole = train(6)
    trainer, first = train(3)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    _, second = train(6, ckpt_path=path)
    _, other = train(6, threshold=0.5, ckpt_path=path)
    messages: list[str] = []
    with messages_of(messages):
        _, unscheduled = train(6, is_scheduled=False, ckpt_path=path)
    assert unscheduled == [0.2] * 3
    message = "λ is threshold=0.2 again. In the checkpoint it was 0.092, which"
    assert any(message in text for text in messages) == (dist.get_rank() == 0)
    assert first + second == whole
    assert other == [pytest.approx(0.5 * threshold / 0.2) for threshold in whole[3:]]  # a strategy with another λ


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DDPHardThresholdStrategy(density=0.1), r"with density=0\.1, which already determines λ"),
        (SparseDDPStrategy(TopK(0.1)), "but TopK has none"),
        ("ddp", "but DDPStrategy has none"),
    ],
    ids=["density", "top k", "ddp"],
)
@on_workers(1, process_group=False)
def test_a_schedule_needs_a_constant_threshold(strategy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(strategy, num_workers=1, callbacks=[ThresholdSchedule({5: 2.0})]).fit(Classifier(), data())


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        ({0: -1.0}, ValueError, r"Invalid factor=-1\.0 of λ"),
        ({0: float("nan")}, ValueError, "Invalid factor=nan of λ"),
        ({0: "1"}, ValueError, "Invalid factor='1' of λ"),
        ({-1: 1.0}, ValueError, "steps from 0 on"),
        ({0.5: 1.0}, ValueError, "steps from 0 on"),
        ({}, ValueError, "steps from 0 on"),
        ("lr", TypeError, "Invalid factors='lr'"),
        (0.5, TypeError, "Invalid factors=0.5"),
    ],
)
def test_an_invalid_schedule_raises(factors: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ThresholdSchedule(factors)
