"""Steps that bypass Lightning, optimizers without a learning rate, compiled steps, and callbacks with own weights."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
from tests.integration.models import Classifier, clones, data, quiet_trainer
from tests.workers import run_workers


class Manual(Classifier):
    """Steps in a way of its own: through Lightning's optimizer, torch's, in hooks of parameters, or by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def on_fit_start(self) -> None:
        if self.how == "in backward":
            self.each = {one: torch.optim.SGD([one], lr=1.0) for one in self.parameters()}
            for one in self.parameters():
                one.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def _step(self, parameter: Tensor) -> None:
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
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


def _trained(every_n_steps: int) -> dict[str, tuple[int, dict[str, Tensor]]]:
    environment, found = dict(os.environ), {}
    for how in ("Lightning's", "torch's", "in backward"):
        os.environ.update(environment)
        strategy = LocalHardThresholdStrategy(threshold=0.02, every_n_steps=every_n_steps)
        model = Manual(how)
        quiet_trainer(strategy, num_workers=2, max_steps=-1, max_epochs=1).fit(model, data())
        assert strategy.averager is not None
        found[how] = strategy.averager.num_steps, clones(model.named_parameters())
    return found


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_steps_that_bypass_lightning_are_followed_by_the_same_exchanges(every_n_steps: int) -> None:
    first, second = run_workers(_trained, 2, every_n_steps, process_group=False)
    steps, expected = first["Lightning's"]
    assert steps == 8
    for how in ("torch's", "in backward"):
        for found in (first, second):
            assert found[how][0] == 8, how
            torch.testing.assert_close(found[how][1], expected, rtol=0, atol=0)


def _warned_of(batches: int) -> list[str]:
    strategy = LocalHardThresholdStrategy(threshold=0.02)
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=-1, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Manual("by hand"), data(8 * batches))
    return [str(one.message) for one in caught if "no torch.optim.Optimizer" in str(one.message)]


@pytest.mark.parametrize(("batches", "said"), [(12, "in 12 batches"), (230, "in 200 batches")])
def test_a_fit_without_any_exchange_is_warned_of_once(batches: int, said: str) -> None:
    messages = run_workers(_warned_of, 2, batches, process_group=False)[0]
    assert len(messages) == 1
    assert said in messages[0]
    assert "strategy.state.step() after each update" in messages[0]


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
    "ddp, constant": lambda: DDPHardThresholdStrategy(threshold=0.02),
    "accordion": lambda: SparseDDPStrategy(Accordion(0.1, 0.5, 1)),
    "local": lambda: LocalHardThresholdStrategy(density=0.1),
    "simulated": lambda: SimulatedWorkersStrategy(HardThreshold(density=0.1), 2),
}


def _trains_all(make_optimizer: Any, names: list[str]) -> None:
    environment = dict(os.environ)
    for name in names:
        os.environ.update(environment)
        torch.compiler.reset()
        model = Classifier(make_optimizer)
        before = clones(model.named_parameters())
        quiet_trainer(STRATEGIES[name](), num_workers=1 if name == "simulated" else 2, max_steps=8).fit(model, data())
        assert all(not torch.equal(before[key], one) for key, one in model.named_parameters()), name


@pytest.mark.parametrize("make_optimizer", [WithoutRate, compiled_step])
def test_every_strategy_trains_with(make_optimizer: Any) -> None:
    run_workers(
        _trains_all, 2, make_optimizer, [name for name in STRATEGIES if name != "simulated"], process_group=False
    )
    run_workers(_trains_all, 1, make_optimizer, ["simulated"], process_group=False)


def _needs_a_rate() -> list[str]:
    environment, said = dict(os.environ), []
    for strategy, options in (
        (DDPHardThresholdStrategy(threshold=0.02, error_feedback="learning_rate"), {}),
        (DDPHardThresholdStrategy(threshold=0.02), {"callbacks": [ThresholdSchedule("learning_rate")]}),
    ):
        os.environ.update(environment)
        trainer = quiet_trainer(strategy, num_workers=2, **options)
        with pytest.raises(ValueError, match="lr=None") as raised:
            trainer.fit(Classifier(WithoutRate), data())
        said.append(str(raised.value))
    return said


def test_what_needs_a_learning_rate_says_so() -> None:
    of_feedback, of_schedule = run_workers(_needs_a_rate, 2, process_group=False)[0]
    assert "WithoutRate has a parameter group without a learning rate (lr=None). error_feedback=" in of_feedback
    assert of_schedule.startswith(
        "ThresholdSchedule('learning_rate') needs a learning rate, and WithoutRate has lr=None"
    )


def _with_callback(name: str) -> list[str]:
    made = {
        "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1),
        "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.1),
        "WeightAveraging": lambda: callbacks.WeightAveraging(),
        "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(),
        "Timer": lambda: callbacks.Timer(),
    }[name]()
    trainer = quiet_trainer(
        LocalHardThresholdStrategy(threshold=0.02), num_workers=2, max_steps=-1, max_epochs=3, callbacks=[made]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), data(16))
    return [str(one.message) for one in caught if "lightning_sparse" in str(one.message)]


@pytest.mark.parametrize(
    "name", ["StochasticWeightAveraging", "ModelPruning", "WeightAveraging", "EMAWeightAveraging", "Timer"]
)
def test_callbacks_that_keep_a_state_of_own_weights_are_warned_of(name: str) -> None:
    if not hasattr(callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    said = run_workers(_with_callback, 2, name, process_group=False)[0]
    assert [f"{name} keeps a state that follows from each worker's own weights" in one for one in said] == (
        [] if name == "Timer" else [True]
    )


def _ends_before_the_rename(path: str) -> None:
    trainer = quiet_trainer(SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2), num_workers=1)
    model = Classifier()
    trainer.fit(model, data())
    trainer.save_checkpoint(path)
    with torch.no_grad():
        model.first.weight.fill_(0.0)
    # A kill or a full disk: all bytes may be written, and the file has not its name yet.
    full = OSError("No space left")
    with (
        patch("lightning_sparse.checkpointing.whole_files.os.replace", side_effect=full),
        pytest.raises(OSError, match="space"),
    ):
        trainer.save_checkpoint(path)


def test_simulated_workers_that_fail_to_save_leave_the_checkpoint_before(tmp_path: Path) -> None:
    run_workers(_ends_before_the_rename, 1, str(tmp_path / "last.ckpt"), process_group=False)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["first.weight"].any()


def _forgets(path: str) -> tuple[list[str], float]:
    environment = dict(os.environ)
    first = quiet_trainer(DDPHardThresholdStrategy(threshold=0.5), num_workers=2, max_steps=4)
    first.fit(Classifier(), data())
    first.save_checkpoint(path)
    os.environ.update(environment)

    class Residuals(callbacks.Callback):
        largest = 1.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            held = trainer.strategy.state.residuals.state_dict()
            self.largest = max((float(one.abs().max()) for one in held.values()), default=0.0)

    found = Residuals()
    strategy = DDPHardThresholdStrategy(threshold=0.5, error_feedback="none")
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=6, callbacks=[found])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), data(), ckpt_path=path)
    return [str(one.message) for one in caught if "are lost" in str(one.message)], found.largest


def test_residuals_that_a_run_without_error_feedback_drops_are_named_with_their_norm(tmp_path: Path) -> None:
    path = tmp_path / "4.ckpt"
    said, largest = run_workers(_forgets, 2, str(path), process_group=False)[0]
    norm = torch.load(path, weights_only=True)["lightning_sparse"]["unsent_norm"]
    assert largest == 0
    assert len(said) == 1
    assert f"the saved residuals (norm {norm:.3g}) are lost: error_feedback='none' keeps none" in said[0]


class Replaces(Classifier):
    """Replaces its last layer in the fifth step, and tells the optimizer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            torch.manual_seed(self.trainer.global_rank)
            self.last = nn.Linear(40, 3)
            self.trainer.strategy.optimizers = [self.configure_optimizers()]


def _replaces_a_layer() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = LocalHardThresholdStrategy(threshold=0.02)
    own: dict[str, Tensor] = {}

    class Own(callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            own.update(clones(pl_module.named_parameters()))

    quiet_trainer(strategy, num_workers=2, max_steps=12, callbacks=[Own()]).fit(Replaces(), data(128))
    assert strategy.averager is not None
    return own, {name: one.clone() for name, one in strategy.averager.anchor().items()}


def test_a_layer_replaced_during_a_fit_is_exchanged() -> None:
    (weights, anchor), (other, other_anchor) = run_workers(_replaces_a_layer, 2, process_group=False)
    for name, one in weights.items():
        assert torch.equal(anchor[name], other_anchor[name]), name
        assert (one - other[name]).abs().max() < 2 * 0.02, name
