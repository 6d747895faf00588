"""What was broken once by who used local training in ways of their own: one program each."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_sparse import DriftOptions, HardThreshold, LocalHardThresholdStrategy, SparseModelAverager
from tests.integration.models import Classifier, adam, clones, quiet_trainer, sgd
from tests.integration.test_checkpoint import ResumableData, SaveAt
from tests.workers import run_workers

LAMBDA = 0.01


def strategy(**options: Any) -> LocalHardThresholdStrategy:
    return LocalHardThresholdStrategy(threshold=LAMBDA, **options)


def trainer_of(options: dict[str, Any], *callbacks: Callback, **trainer_options: Any) -> Trainer:
    os.environ["WORLD_SIZE"] = "2"  # Lightning takes it away when a Trainer has done
    return quiet_trainer(
        strategy(**options),
        num_workers=2,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **trainer_options,
    )


def flat(module: nn.Module) -> Tensor:
    tensors = [*module.parameters(), *module.buffers()]
    return torch.cat([one.detach().double().flatten() for one in tensors])


class Looks(Callback):
    """Which weights validation saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(flat(pl_module))


class WithRate(Classifier):
    def __init__(self) -> None:
        super().__init__(adam)
        self.lr = 0.01


class Target(Classifier):
    """Has a target network that code updates, as BYOL has, and buffers of which one is a constant beyond all sums."""

    def __init__(self) -> None:
        super().__init__(adam)
        self.target = nn.Linear(8, 40).requires_grad_(False)
        self.register_buffer("masked", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.target.weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)
        self.count += 1 + self.global_rank
        return super().training_step(batch, batch_idx)


class Turns(Classifier):
    """Buffers that differ between workers and from what they were, though their norms do not."""

    def __init__(self) -> None:
        super().__init__(adam)
        self.register_buffer("sign", torch.full((2,), 0.5))
        self.register_buffer("place", torch.eye(5)[0])
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("flags", torch.tensor([True, False, False]))
        self.register_buffer("of_first", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sign *= 1 if self.global_rank else -1  # only the first one's changes
        for one in (self.place, self.order, self.flags):
            one.copy_(one.roll(1 + self.global_rank))
        self.of_first += self.global_rank == 0
        return super().training_step(batch, batch_idx)


class Clamps(Classifier):
    """Keeps weights small, by a hook that comes before a batch."""

    def __init__(self) -> None:
        super().__init__(adam)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            for one in self.parameters():
                one.clamp_(-0.05, 0.05)


class Grows(Classifier):
    """A cache that is longer on one worker, and in validation."""

    def __init__(self) -> None:
        super().__init__(adam)
        self.register_buffer("cache", torch.zeros(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.cache = torch.ones(4 + batch_idx * self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.cache = torch.ones(20)
        super().validation_step(batch, batch_idx)


class Empty(Classifier):
    def __init__(self) -> None:
        super().__init__(adam)
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))


class Expert(Classifier):
    """A layer that lives on one worker, of a size of its own."""

    def __init__(self) -> None:
        super().__init__(adam)
        self.expert = nn.Linear(2 + int(os.environ["RANK"]), 3)
        nn.init.constant_(self.expert.weight, float(os.environ["RANK"]))
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]


def validated(make: Callable[[], Classifier], *callbacks: Any) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Fits with validations; returns what those saw, and what was left."""
    look, model = Looks(), make()
    made = [one() if callable(one) else one for one in callbacks]
    trainer = trainer_of({"every_n_steps": 2}, look, *made, max_steps=9, val_check_interval=3)
    trainer.fit(model, ResumableData(12), ResumableData(2))
    return look.seen, flat(model), clones([*model.named_parameters(), *model.named_buffers()])


def finder() -> LearningRateFinder:
    return LearningRateFinder(num_training_steps=5)


@pytest.mark.parametrize(
    ("make", "callbacks", "own"),
    [(WithRate, (finder,), ()), (Target, (), ("count",)), (Empty, (), ()), (Turns, (), ("order", "flags", "of_first"))],
    ids=["search for a learning rate", "target network and constants", "empty parameter", "buffers of equal norm"],
)
def test_all_see_the_same_to_the_end(make: Any, callbacks: Any, own: tuple[str, ...]) -> None:
    (one, after, named), (other, other_after, other_named) = run_workers(
        validated, 2, make, *callbacks, process_group=False
    )
    assert len(one) >= 4
    shared = slice(None, -sum(named[name].numel() for name in own)) if own else slice(None)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine[shared], theirs[shared])
    assert torch.equal(after[shared], other_after[shared])
    assert (one[-1] != one[0]).any()
    if "masked" in named:
        assert torch.equal(named["masked"], Target().masked)
        assert torch.equal(named["third"], Target().third)
        assert (named["count"], other_named["count"]) == (9, 18)


def test_buffers_that_grow_are_left_alone() -> None:
    for seen, _, _ in run_workers(validated, 2, Grows, process_group=False):
        assert len(seen) >= 4


def test_what_lives_on_one_worker_stays_there() -> None:
    for rank, (_, _, named) in enumerate(run_workers(validated, 2, Expert, process_group=False)):
        assert named["expert.weight"].shape == (3, 2 + rank)
        assert (named["expert.weight"] == rank).all()


def resumed(make: Callable[[], Classifier], folder: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Trains in one go, and again from a file; returns both ends, and what a finished run resumed once more leaves."""
    ends: list[dict[str, Tensor]] = []

    class End(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 12:
                ends.append(clones([*pl_module.named_parameters(), *pl_module.named_buffers()]))

    model = make()
    trainer = trainer_of(options, End(), SaveAt(8, f"{folder}/8.ckpt"), SaveAt(12, f"{folder}/12.ckpt"), max_steps=12)
    trainer.fit(model, ResumableData(4))
    trainer_of(options, End(), max_steps=12).fit(make(), ResumableData(4), ckpt_path=f"{folder}/8.ckpt")
    done = make()
    trainer_of(options, max_steps=12).fit(done, ResumableData(4), ckpt_path=f"{folder}/12.ckpt")
    return [*ends, clones([*done.named_parameters(), *done.named_buffers()])]


class Unfreezes(Classifier):
    def __init__(self) -> None:
        super().__init__(adam)
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 1:
            self.first.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return adam(self.parameters())


@pytest.mark.parametrize(
    "make", [Target, Unfreezes, Turns, Clamps], ids=["target network", "unfrozen by epoch", "equal norms", "clamped"]
)
def test_a_resume_is_exact_and_a_finished_one_leaves_what_is_in_the_file(make: Any, tmp_path: Path) -> None:
    results = run_workers(resumed, 2, make, str(tmp_path), {}, process_group=False)
    saved = torch.load(tmp_path / "12.ckpt", weights_only=True)["state_dict"]
    for straight, again, finished in results:
        for name, one in straight.items():
            assert torch.equal(one, again[name]), name
            if one.is_floating_point():
                assert torch.equal(finished[name], saved[name]), name


def _after_an_exception(where: str) -> list[Tensor]:
    class Fails(Callback):
        def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if where == "validation" and trainer.global_step:
                raise ZeroDivisionError

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if where == "training" and trainer.global_step == 5:
                raise ZeroDivisionError

    model, look = Classifier(adam), Looks()
    trainer = trainer_of({}, Fails(), look, max_steps=8, val_check_interval=4, num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, ResumableData(100), ResumableData(2))
    left = flat(model)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    plain = trainer_of({}, max_steps=8)
    plain.validate(model, ResumableData(2), verbose=False)
    return [left, flat(model)]


@pytest.mark.parametrize("where", ["validation", "training"])
def test_after_an_exception_all_have_the_same_and_what_the_user_writes_stays(where: str) -> None:
    (one, after), (other, other_after) = run_workers(_after_an_exception, 2, where, process_group=False)
    assert torch.equal(one, other)
    assert (after == 0.5).all()
    assert (other_after == 0.5).all()


def _saved_after_others_were_loaded(folder: str) -> None:
    model = Classifier(adam)
    trainer = trainer_of({}, SaveAt(3, f"{folder}/best.ckpt"), max_steps=6)
    trainer.fit(model, ResumableData(100))
    trainer.test(model, ResumableData(2), ckpt_path=f"{folder}/best.ckpt", verbose=False)
    trainer.save_checkpoint(f"{folder}/again.ckpt")


def test_weights_that_are_loaded_after_training_are_those_that_are_saved(tmp_path: Path) -> None:
    run_workers(_saved_after_others_were_loaded, 2, str(tmp_path), process_group=False)
    best, again = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("best", "again"))
    assert all(torch.equal(one, again["state_dict"][name]) for name, one in best["state_dict"].items())
    assert again["lightning_sparse"]["workers"] == []
    assert "were changed" in again["lightning_sparse"]["why_incomplete"]


def _saved_in_validation(folder: str, who_writes: list[int]) -> int:
    """Saves in a validation in which some have written to the weights; returns how many steps there were in the end."""

    class Writes(Callback):
        def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_rank in who_writes:
                with torch.no_grad():
                    next(pl_module.parameters()).fill_(0.5)
            trainer.save_checkpoint(f"{folder}/in.ckpt")

    trainer = trainer_of({}, Writes(), max_steps=6, val_check_interval=3, num_sanity_val_steps=0)
    trainer.fit(Classifier(adam), ResumableData(6), ResumableData(1))
    return trainer.global_step


@pytest.mark.parametrize("who_writes", [[], [0], [1], [0, 1]], ids=str)
def test_a_save_in_validation_is_alike_for_all_whoever_has_written_to_the_weights(
    who_writes: list[int], tmp_path: Path
) -> None:
    assert run_workers(_saved_in_validation, 2, str(tmp_path), who_writes, process_group=False) == [6, 6]
    saved = torch.load(tmp_path / "in.ckpt", weights_only=True)["lightning_sparse"]
    assert len(saved["workers"]) == (0 if who_writes else 2)
    assert ("were changed" in str(saved["why_incomplete"])) is bool(who_writes)


def _saved_before_backward(folder: str) -> int:
    class Saves(Callback):
        def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/{trainer.global_step}.ckpt")

    trainer = trainer_of({"overlap": True, "every_n_steps": 2}, Saves(), max_steps=6)
    trainer.fit(Classifier(adam), ResumableData(6))
    return trainer.global_step


def test_a_save_before_a_backward_leaves_it_alone_while_an_exchange_travels(tmp_path: Path) -> None:
    assert run_workers(_saved_before_backward, 2, str(tmp_path), process_group=False) == [6, 6]
    why = {step: torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["lightning_sparse"] for step in range(1, 6)}
    assert {step: one["why_incomplete"] for step, one in why.items()} == {
        1: None,
        2: "an exchange is still travelling",
        3: None,
        4: "an exchange is still travelling",
        5: None,
    }


def _nested() -> list[Tensor]:
    model = nn.Linear(3, 3)
    averager = SparseModelAverager(model, HardThreshold(threshold=1e9))
    with torch.no_grad():
        model.weight += torch.distributed.get_rank()
    with averager.averaged_weights():
        with averager.averaged_weights():
            inside = flat(model)
        after = flat(model)
    return [inside, after, flat(model)]


def test_blocks_of_averaged_weights_may_be_nested() -> None:
    (inside, after, own), (other_inside, _, other) = run_workers(_nested, 2)
    assert torch.equal(inside, after)
    assert torch.equal(inside, other_inside)
    assert not torch.equal(own, other)


def _kept(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []

    class Kept(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                found.append(trainer.strategy.averager.state_dict()["own"]["unsent"])

    options = {"keep_drift": False, "drift_checkpoint": "mean"}
    trainer_of(options, Kept(), SaveAt(6, f"{folder}/6.ckpt"), max_steps=7).fit(Classifier(adam), ResumableData(100))
    trainer_of(options, Kept(), max_steps=7).fit(Classifier(adam), ResumableData(100), ckpt_path=f"{folder}/6.ckpt")
    return found[0], found[1]


def test_what_is_kept_apart_is_saved_with_the_mean_alone_too(tmp_path: Path) -> None:
    for before, after in run_workers(_kept, 2, str(tmp_path), process_group=False):
        assert any(one.any() for one in before.values())
        assert all(torch.equal(one, after[name]) for name, one in before.items())


def _refused() -> str:
    class Sharded(Classifier):
        def configure_optimizers(self) -> Any:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)

    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as caught:
        trainer_of({}, max_steps=2).fit(Sharded(), ResumableData(4))
    return str(caught.value)


def test_an_optimizer_that_needs_averaged_gradients_is_refused() -> None:
    assert all("inside of it" in message for message in run_workers(_refused, 2, process_group=False))


class Outer:
    """As a command line makes it of a YAML file: an object that says nothing but where it is."""

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return sgd(parameters)


def _odd_ones() -> list[str]:
    said = []
    SparseModelAverager(nn.Linear(2, 2), HardThreshold(threshold=0.1), DriftOptions(outer_optimizer=Outer())).close()
    options = DriftOptions(outer_optimizer=partial(Outer.__call__, Outer()))
    SparseModelAverager(nn.Linear(2, 2), HardThreshold(threshold=0.1), options).close()
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    for module in (wrapped, nn.LazyLinear(3)):
        with pytest.raises(ValueError, match=r"\.") as caught:
            SparseModelAverager(module, HardThreshold(threshold=0.1))
        said.append(str(caught.value))
    return said


def test_outer_optimizers_of_a_command_line_and_modules_that_cannot_be() -> None:
    for wrapped, lazy in run_workers(_odd_ones, 2):
        assert "Unwrap" in wrapped
        assert "not initialised" in lazy
