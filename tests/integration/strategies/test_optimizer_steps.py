"""Steps that bypass Lightning, optimizers without a learning rate, compiled steps, and callbacks with own weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from torch import Tensor

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    HardThreshold,
    LocalHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
)
from tests.integration.models import (
    Classifier,
    ManualClassifier,
    assert_equal,
    clones,
    data,
    quiet_trainer,
    warnings_of,
)
from tests.workers import of_all_workers, on_workers, run_workers


class Manual(ManualClassifier):
    """Steps with Lightning's or torch's optimizer, in hooks of parameters, or without an optimizer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_fit_start(self) -> None:
        if self.how == "in backward":
            self.each = {parameter: torch.optim.SGD([parameter], lr=1.0) for parameter in self.parameters()}
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def _step(self, parameter: Tensor) -> None:
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.how == "by hand":
            loss.backward()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                    parameter.grad = None
            return
        if self.how == "in backward":
            (self.manual_backward if self.global_step % 2 else torch.Tensor.backward)(loss)
            return
        optimizer: Any = self.optimizers(use_pl_optimizer=self.how == "Lightning's")
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if "'s" in self.how else None


def local_trainer(**options: Any) -> Any:
    strategy = LocalHardThresholdStrategy(threshold=0.02, every_n_steps=options.pop("every_n_steps", 1))
    return quiet_trainer(strategy, **{"max_steps": -1, "max_epochs": 1} | options)


@pytest.mark.parametrize("every_n_steps", [1, 3])
@on_workers(2, process_group=False)
def test_steps_that_bypass_lightning_cause_the_same_exchanges(every_n_steps: int) -> None:
    for how in ("Lightning's", "torch's", "in backward"):
        model, trainer = Manual(how), local_trainer(every_n_steps=every_n_steps)
        trainer.fit(model, data())
        assert trainer.strategy.state.num_steps == 8, how
        if how == "Lightning's":
            expected, _ = of_all_workers(clones(model.named_parameters()))
        assert_equal(dict(model.named_parameters()), expected, how)


@pytest.mark.parametrize(("batches", "period"), [(12, "in 12 batches"), (230, "in 200 batches")])
@on_workers(2, process_group=False)
def test_a_fit_without_any_exchange_causes_a_single_warning(batches: int, period: str) -> None:
    messages: list[str] = []
    with warnings_of(messages, "no torch.optim.Optimizer"):
        local_trainer().fit(Manual("by hand"), data(8 * batches))
    if dist.get_rank() == 0:
        [message] = messages
        assert period in message
        assert "strategy.state.step() after each update" in message


class WithoutRate(torch.optim.SGD):
    """Has no learning rate in its groups, as Hugging Face's Adafactor by default."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.param_groups[0]["lr"] = 0.1
        super().step()
        self.param_groups[0]["lr"] = None
        return loss


def compiled_step(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return optimizer


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPHardThresholdStrategy(density=0.1),
    "accordion": lambda: SparseDDPStrategy(Accordion(0.1, 0.5, 1)),
    "local": lambda: LocalHardThresholdStrategy(density=0.1),
    "simulated": lambda: SimulatedWorkersStrategy(HardThreshold(density=0.1), 2),
}


def _trains_all(make_optimizer: Any, names: list[str]) -> None:
    for name in names:
        torch.compiler.reset()
        model = Classifier(make_optimizer)
        before = clones(model.named_parameters())
        quiet_trainer(STRATEGIES[name](), max_steps=8).fit(model, data())
        assert all(not torch.equal(before[key], weight) for key, weight in model.named_parameters()), name


@pytest.mark.parametrize(
    ("make_optimizer", "names"),
    [
        (WithoutRate, ["ddp", "accordion", "local"]),
        pytest.param(compiled_step, ["ddp", "local"], marks=pytest.mark.slow),
    ],
)
def test_every_strategy_trains_with_an_unusual_optimizer(make_optimizer: Any, names: list[str]) -> None:
    run_workers(_trains_all, 2, make_optimizer, names, process_group=False)
    run_workers(_trains_all, 1, make_optimizer, ["simulated"], process_group=False)


CALLBACKS: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
    "WeightAveraging": {},
    "EMAWeightAveraging": {},
    "Timer": {},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not hasattr(callbacks, name), reason=f"no {name} in Lightning"))
        for name in CALLBACKS
    ],
)
@on_workers(2, process_group=False)
def test_callbacks_with_a_state_of_own_weights_cause_a_warning(name: str) -> None:
    messages: list[str] = []
    with warnings_of(messages, "lightning_sparse"):
        callback = getattr(callbacks, name)(**CALLBACKS[name])
        local_trainer(max_epochs=3, callbacks=[callback]).fit(Classifier(), data(16))
    if dist.get_rank() == 0:
        warned = [f"{name} averages each worker's own weights" in text for text in messages]
        assert warned == ([] if name == "Timer" else [True])
