"""Steps that bypass Lightning, optimizers without a learning rate, compiled steps, and callbacks with own weights."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    HardThreshold,
    LocalHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    ThresholdSchedule,
)
from tests.integration.models import Classifier, ManualClassifier, assert_equal, clones, data, quiet_trainer
from tests.workers import run_workers


@contextmanager
def warnings_with(words: str, told: list[str]) -> Iterator[None]:
    """Collects within it the warnings that have these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told += [str(warning.message) for warning in caught if words in str(warning.message)]


class Manual(ManualClassifier):
    """Steps in a way of its own: through Lightning's optimizer, torch's, in hooks of parameters, or by hand."""

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


def _trained(every_n_steps: int) -> dict[str, tuple[int, dict[str, Tensor]]]:
    found = {}
    for how in ("Lightning's", "torch's", "in backward"):
        model, trainer = Manual(how), local_trainer(every_n_steps=every_n_steps)
        trainer.fit(model, data())
        found[how] = trainer.strategy.averager.num_steps, clones(model.named_parameters())
    return found


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_steps_that_bypass_lightning_are_followed_by_the_same_exchanges(every_n_steps: int) -> None:
    workers = run_workers(_trained, 2, every_n_steps, process_group=False)
    for found in workers:
        for how, (steps, weights) in found.items():
            assert steps == 8, how
            assert_equal(weights, workers[0]["Lightning's"][1], how)


def _warned_of(batches: int) -> list[str]:
    told: list[str] = []
    with warnings_with("no torch.optim.Optimizer", told):
        local_trainer().fit(Manual("by hand"), data(8 * batches))
    return told


@pytest.mark.parametrize(("batches", "said"), [(12, "in 12 batches"), (230, "in 200 batches")])
def test_a_fit_without_any_exchange_is_warned_of_once(batches: int, said: str) -> None:
    [message] = run_workers(_warned_of, 2, batches, process_group=False)[0]
    assert said in message
    assert "strategy.state.step() after each update" in message


class WithoutRate(torch.optim.SGD):
    """As Hugging Face's Adafactor by default: its groups have no learning rate, which follows from its own state."""

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
    ("make_optimizer", "names"), [(WithoutRate, ["ddp", "accordion", "local"]), (compiled_step, ["ddp", "local"])]
)
def test_every_strategy_trains_with(make_optimizer: Any, names: list[str]) -> None:
    run_workers(_trains_all, 2, make_optimizer, names, process_group=False)
    run_workers(_trains_all, 1, make_optimizer, ["simulated"], process_group=False)


def _needs_a_rate() -> list[str]:
    said = []
    for strategy, options in (
        (DDPHardThresholdStrategy(threshold=0.02, error_feedback="learning_rate"), {}),
        (DDPHardThresholdStrategy(threshold=0.02), {"callbacks": [ThresholdSchedule("learning_rate")]}),
    ):
        with pytest.raises(ValueError, match="lr=None") as raised:
            quiet_trainer(strategy, **options).fit(Classifier(WithoutRate), data())
        said.append(str(raised.value))
    return said


def test_what_needs_a_learning_rate_says_so() -> None:
    of_feedback, of_schedule = run_workers(_needs_a_rate, 2, process_group=False)[0]
    assert "WithoutRate has a parameter group without a learning rate (lr=None). error_feedback=" in of_feedback
    needs = "ThresholdSchedule('learning_rate') needs a learning rate, but WithoutRate has lr=None"
    assert of_schedule.startswith(needs)


CALLBACKS: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.1},
    "WeightAveraging": {},
    "EMAWeightAveraging": {},
    "Timer": {},
}


def _with_callback(name: str) -> list[str]:
    told: list[str] = []
    with warnings_with("lightning_sparse", told):
        callback = getattr(callbacks, name)(**CALLBACKS[name])
        local_trainer(max_epochs=3, callbacks=[callback]).fit(Classifier(), data(16))
    return told


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_keep_a_state_of_own_weights_are_warned_of(name: str) -> None:
    if not hasattr(callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    said = run_workers(_with_callback, 2, name, process_group=False)[0]
    warned = [f"{name} keeps a state that follows from each worker's own weights" in message for message in said]
    assert warned == ([] if name == "Timer" else [True])


def _forgets(path: str) -> tuple[list[str], dict[str, Tensor]]:
    first = quiet_trainer(DDPHardThresholdStrategy(threshold=0.5), max_steps=4)
    first.fit(Classifier(), data())
    first.save_checkpoint(path)
    told, found = list[str](), list[dict[str, Tensor]]()
    look = callbacks.LambdaCallback(
        on_train_start=lambda trainer, _: found.append(trainer.strategy.state.residuals.state_dict())
    )
    strategy = DDPHardThresholdStrategy(threshold=0.5, error_feedback="none")
    with warnings_with("are lost", told):
        quiet_trainer(strategy, max_steps=6, callbacks=[look]).fit(Classifier(), data(), ckpt_path=path)
    return told, found[0]


def test_residuals_that_a_run_without_error_feedback_drops_are_named_with_their_norm(tmp_path: Path) -> None:
    path = tmp_path / "4.ckpt"
    [said], residuals = run_workers(_forgets, 2, str(path), process_group=False)[0]
    norm = torch.load(path, weights_only=True)["lightning_sparse"]["unsent_norm"]
    assert not any(residual.any() for residual in residuals.values())
    assert f"the saved residuals (norm {norm:.3g}) are lost: error_feedback='none' keeps none" in said


class Replaces(Classifier):
    """Replaces its last layer in the fifth step, and tells the optimizer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            torch.manual_seed(self.trainer.global_rank)
            self.last = nn.Linear(40, 3)
            self.trainer.strategy.optimizers = [self.configure_optimizers()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.own = clones(self.named_parameters())


def _replaces_a_layer() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, trainer = Replaces(), local_trainer(max_steps=12, max_epochs=None)
    trainer.fit(model, data(128))
    return model.own, clones(trainer.strategy.averager.anchor().items())


def test_a_layer_replaced_during_a_fit_is_exchanged() -> None:
    (weights, anchor), (other, other_anchor) = run_workers(_replaces_a_layer, 2, process_group=False)
    assert_equal(anchor, other_anchor)
    for name, weight in weights.items():
        assert (weight - other[name]).abs().max() < 2 * 0.02, name
