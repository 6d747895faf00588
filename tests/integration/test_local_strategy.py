"""``Trainer(strategy="local_hardthreshold")``: what a Trainer can do with local training, and what it saves."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from lightning_sparse import (
    Accordion,
    DensityMonitor,
    ErrorMonitor,
    LocalHardThresholdStrategy,
    SparseLocalStrategy,
    TopK,
)
from lightning_sparse.checkpointing import together
from tests.integration.models import Classifier, TwoPlayers, adam, assert_equal, clones, data, nesterov, quiet_trainer
from tests.integration.test_checkpoint import END, STOP, ResumableData, SaveAt, WithSchedule
from tests.workers import run_workers

THRESHOLD = 0.01
LOGGED = {
    "sparse/density",
    "sparse/error_norm",
    "sparse/threshold",
    "sparse/payload_bytes",
    "sparse/largest_drift",
}


class Norm(Classifier):
    """Has buffers, and says which weights validation and test saw."""

    def __init__(self, make_optimizer: Any = adam) -> None:
        super().__init__(make_optimizer)
        self.norm = nn.BatchNorm1d(8)
        self.seen: dict[str, list[Tensor]] = {"validation": [], "test": []}

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))

    def on_validation_batch_start(self, *_: Any) -> None:
        self.seen["validation"].append(weights_of(self))

    def on_test_batch_start(self, *_: Any) -> None:
        self.seen["test"].append(weights_of(self))


def weights_of(module: nn.Module) -> Tensor:
    tensors = [one.detach() for one in (*module.parameters(), *module.buffers())]
    return torch.cat([one.flatten().double() for one in tensors])


@pytest.mark.parametrize("options", [{}, {"keep_drift": False}, {"every_n_steps": 3, "value_dtype": "float8"}])
def test_a_single_worker_holds_nothing_back(options: dict[str, Any]) -> None:
    [(weights, plain, density)] = run_workers(_train_alone, 1, options, process_group=False)
    assert density == 1
    torch.testing.assert_close(weights, plain)


def _train_alone(options: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    weights = []
    for strategy in (LocalHardThresholdStrategy(threshold=100.0, **options), "ddp"):
        model = Classifier(adam)
        quiet_trainer(strategy, num_workers=1, max_steps=6).fit(model, data())
        weights.append(weights_of(model))
        if strategy != "ddp":
            density = strategy.averager.last_step.density
    return *weights, density


class Witness(Callback):
    """Notes what a training came to, while the strategy is still set up."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.metrics: dict[str, float] = {}
        self.steps: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.averager.subscribe(self.steps.append)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.own.append(weights_of(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}


def everything(folder: str) -> dict[str, Any]:
    """Fit with validation, callbacks and checkpoints, then test."""
    witness = Witness()
    model = Norm()
    trainer = quiet_trainer(
        LocalHardThresholdStrategy(threshold=THRESHOLD, every_n_steps=2),
        num_workers=2,
        max_steps=-1,
        max_epochs=2,
        val_check_interval=4,
        callbacks=[witness, DensityMonitor(), ErrorMonitor(), ModelCheckpoint(folder, save_last=True)],
        enable_checkpointing=True,
    )
    trainer.fit(model, data(), data(32))
    after_fit = weights_of(model)
    trainer.test(model, data(32), verbose=False)
    return {
        "own": witness.own,
        "metrics": witness.metrics,
        "steps": witness.steps,
        "validation": model.seen["validation"],
        "test": model.seen["test"],
        "after fit": after_fit,
        "after test": weights_of(model),
        "global step": trainer.global_step,
    }


def test_all_look_at_the_same_weights_and_train_their_own(tmp_path: Path) -> None:
    one, other = run_workers(everything, 2, str(tmp_path), process_group=False)
    assert one["global step"] == 16
    assert len(one["steps"]) == 8
    assert one["steps"] == other["steps"]
    own = {"sparse/exchange_wait_ms", "sparse/average_density", "sparse/total_error", "val_loss"}
    assert LOGGED | own <= one["metrics"].keys()
    assert {name: one["metrics"][name] for name in LOGGED} == {name: other["metrics"][name] for name in LOGGED}
    for name in ("validation", "test"):
        assert len(one[name]) > 1
        for mine, theirs in zip(one[name], other[name], strict=True):
            assert torch.equal(mine, theirs)
    # In between each has its own, which validation has not changed.
    assert all((mine != theirs).any() for mine, theirs in zip(one["own"], other["own"], strict=True))
    mean = (one["own"][3] + other["own"][3]) / 2
    floating = torch.arange(mean.numel()) < mean.numel() - 1  # the last is a counter
    torch.testing.assert_close(one["validation"][4][floating], mean[floating], rtol=1e-6, atol=1e-7)
    for mine, theirs in ((one["after fit"], other["after fit"]), (one["after fit"], one["after test"])):
        assert torch.equal(mine, theirs)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    flat = torch.cat(
        [saved[name].flatten().double() for name in [*dict(Norm().named_parameters()), "norm.running_mean"]]
    )
    expected = one["after fit"][: flat.numel()]
    torch.testing.assert_close(flat, expected, rtol=0, atol=0)


CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": adam},
    "every third step": {"strategy": {"every_n_steps": 3}},
    "applied late": {"strategy": {"overlap": True, "every_n_steps": 3}},
    "back to the anchor": {"strategy": {"keep_drift": False, "drift_decay": 0.9}},
    "outer optimizer": {"strategy": {"outer_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)}},
    "density": {"strategy": {"density": 0.2, "calibration_steps": 3}},
    "share of each layer": {"strategy": {"density": 0.2, "calibration_steps": 3, "granularity": "layer"}},
    "middle of calibration": {"strategy": {"density": 0.2, "calibration_steps": 12}},
    "bfloat16": {"strategy": {"value_dtype": "bfloat16"}},
    "accumulation": {"accumulate": 2},
    "middle of an epoch": {"batches_per_epoch": 5},
    "accordion": {"batches_per_epoch": 5, "sparsifier": Accordion(0.05, 0.3, interval=1)},
    "scaled, one worker overflows": {"overflows": True},
}


class OverflowsOnOne(WithSchedule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        bad = batch_idx == 3 and self.global_rank == 1
        return super().training_step(batch, batch_idx) * (float("inf") if bad else 1.0)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def strategy_of(case: dict[str, Any], **options: Any) -> SparseLocalStrategy:
    if "sparsifier" in case:
        return SparseLocalStrategy(case["sparsifier"], **options)
    given = case.get("strategy", {})
    threshold = {} if "density" in given else {"threshold": THRESHOLD}
    return LocalHardThresholdStrategy(**(threshold | given | options))


def fit(
    case: dict[str, Any],
    max_steps: int,
    save: str | None = None,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    strategy: Any = None,
) -> dict[str, Any]:
    ends: dict[str, Any] = {}

    class End(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == max_steps:  # on_train_end comes when all have taken the mean
                ends["weights"] = clones(pl_module.named_parameters())
                ends["optimizer"] = trainer.optimizers[0].state_dict()
                ends["scale"] = getattr(trainer.precision_plugin, "scaler", None) and (
                    trainer.precision_plugin.scaler.get_scale()
                )
                averager = getattr(trainer.strategy, "averager", None)
                if averager is not None:
                    ends["anchor"] = clones(averager.anchor().items())
                    ends["step"], ends["threshold"] = averager.last_step, averager.sparsifier.current_threshold

    trainer = quiet_trainer(
        strategy or strategy_of(case, **(options or {})),
        num_workers=int(os.environ["WORLD_SIZE"]),
        max_steps=max_steps,
        accumulate_grad_batches=case.get("accumulate", 1),
        callbacks=[End(), *([SaveAt(STOP, save)] if save else [])],
        use_distributed_sampler=False,
        plugins=[scaled()] if case.get("overflows") else None,
    )
    model = (OverflowsOnOne if case.get("overflows") else WithSchedule)(case.get("optimizer", adam))
    trainer.fit(model, ResumableData(case.get("batches_per_epoch", 1000)), ckpt_path=resume)
    return ends | {"after": clones(model.named_parameters())}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    case, path = CASES[name], str(tmp_path / "stop.ckpt")
    straight = run_workers(fit, 2, case, END, path, process_group=False)
    resumed = run_workers(fit, 2, case, END, None, path, process_group=False)
    for one, other in zip(straight, resumed, strict=True):
        assert_equal(one["weights"], other["weights"])
        assert_equal(one["anchor"], other["anchor"])
        assert_equal(one["optimizer"], other["optimizer"])
        assert one["scale"] == other["scale"]
        assert (one["step"], one["threshold"]) == (other["step"], other["threshold"])
    assert straight[0]["step"].squared_error > 0
    assert (straight[0]["scale"] != straight[1]["scale"]) == case.get("overflows", False)
    is_kept = case.get("strategy", {}).get("keep_drift", True)
    pairs = zip(straight[0]["weights"].values(), straight[1]["weights"].values(), strict=True)
    assert any((one != other).any() for one, other in pairs) == is_kept
    assert_equal(straight[0]["anchor"], straight[1]["anchor"])


@pytest.mark.parametrize(
    "words",
    [{"drift_checkpoint": "mean"}, {"optimizer_checkpoint": "first"}, {"optimizer_checkpoint": "mean"}],
    ids=lambda words: "-".join(*words.items()),
)
def test_a_smaller_checkpoint_begins_with_the_mean(words: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run_workers(fit, 2, {}, STOP, str(path), None, words, process_group=False)
    saved = torch.load(path, weights_only=True)
    content = saved["lightning_sparse"]
    has_weights = "drift_checkpoint" not in words
    assert [list(worker) for worker in content["workers"]] == ([["weights"]] * 2 if has_weights else [])
    assert all(("optimizer_states" in extra) == ("optimizer_checkpoint" not in words) for extra in content["extras"][0])
    for one in run_workers(fit, 2, {}, END, None, str(path), words, process_group=False):
        assert one["step"].step > STOP


def test_optimizers_are_the_mean_of_all_or_the_first_workers(tmp_path: Path) -> None:
    moments = {}
    for word in ("full", "mean", "first"):
        path = tmp_path / f"{word}.ckpt"
        run_workers(fit, 2, {}, STOP, str(path), None, {"optimizer_checkpoint": word}, process_group=False)
        saved = torch.load(path, weights_only=True)
        own = [extra["optimizer_states"] for extra in saved["lightning_sparse"]["extras"][0] if word == "full"]
        moments[word] = [
            torch.cat([one["exp_avg"].flatten() for one in states[0]["state"].values()])
            for states in (saved["optimizer_states"], *own)
        ]
    [_, *of_workers] = moments["full"]
    assert (of_workers[0] != of_workers[1]).any()
    torch.testing.assert_close(moments["mean"][0], torch.stack(of_workers).mean(0))
    assert torch.equal(moments["first"][0], of_workers[0])


def _kept_at_start(path: str) -> dict[str, Tensor]:
    kept = {}

    class Start(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            kept.update(trainer.strategy.averager.state_dict()["own"]["unsent"])

    num_workers = int(os.environ["WORLD_SIZE"])
    strategy = strategy_of(CASES["back to the anchor"])
    trainer = quiet_trainer(strategy, num_workers=num_workers, max_steps=END, callbacks=[Start()])
    trainer.fit(WithSchedule(adam), ResumableData(1000), ckpt_path=path)
    return kept


def test_what_is_kept_apart_goes_on_as_its_mean_on_another_number_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run_workers(fit, 2, CASES["back to the anchor"], STOP, str(path), process_group=False)
    of_workers = [worker["unsent"] for worker in torch.load(path, weights_only=True)["lightning_sparse"]["workers"]]
    assert any((one != 0).any() for one in of_workers[0].values())
    for kept in run_workers(_kept_at_start, 3, str(path), process_group=False):
        for name, one in kept.items():
            torch.testing.assert_close(one, (of_workers[0][name] + of_workers[1][name]) / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_begins_with_the_mean(num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run_workers(fit, 2, {}, STOP, str(path), process_group=False)
    mean = torch.load(path, weights_only=True)["state_dict"]
    resumed = run_workers(_first_anchor, num_workers, str(path), process_group=False)
    for anchor, weights in resumed:
        assert_equal(anchor, mean)
        assert_equal(weights, mean)


def _first_anchor(path: str) -> Any:
    seen: list[Any] = []

    class First(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if not seen:
                seen.append((clones(trainer.strategy.averager.anchor().items()), clones(pl_module.named_parameters())))

    num_workers = int(os.environ["WORLD_SIZE"])
    trainer = quiet_trainer(
        strategy_of({}), num_workers=num_workers, max_steps=STOP + 1, callbacks=[First()], use_distributed_sampler=False
    )
    trainer.fit(WithSchedule(adam), ResumableData(1000), ckpt_path=path)
    return seen[0]


def _crossed(folder: str) -> None:
    """Plain ddp and the exchange of gradients read ours, and we read theirs."""
    fit({}, STOP, f"{folder}/local.ckpt")
    for strategy, source, target, end in (
        ("ddp", "local", "dense", STOP + 3),
        (strategy_of({}), "dense", "again", STOP + 6),
        ("ddp_topk", "again", "sparse", STOP + 9),
        (strategy_of({}), "sparse", "last", STOP + 12),
    ):
        saver = SaveAt(end, f"{folder}/{target}.ckpt")
        trainer = quiet_trainer(strategy, num_workers=2, max_steps=end, callbacks=[saver])
        trainer.fit(WithSchedule(adam), ResumableData(1000), ckpt_path=f"{folder}/{source}.ckpt")
        assert trainer.global_step == end
        assert saver.is_done


def test_checkpoints_are_exchanged_with_other_strategies(tmp_path: Path) -> None:
    run_workers(_crossed, 2, str(tmp_path), process_group=False)
    kinds = {
        name: torch.load(tmp_path / f"{name}.ckpt", weights_only=True).get("lightning_sparse", {}).get("kind")
        for name in ("local", "dense", "again", "sparse", "last")
    }
    assert kinds == {"local": "drifts", "dense": None, "again": "drifts", "sparse": "gradients", "last": "drifts"}


class Fails(Classifier):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 5 and self.global_rank == 1:
            raise ZeroDivisionError
        return self.loss(batch)


def _fails_alone(folder: str) -> dict[str, Tensor] | None:
    together.PATIENCE_IN_TROUBLE = 2.0
    anchor: dict[str, Tensor] = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            anchor.update(clones(trainer.strategy.averager.anchor().items()))

        def on_exception(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_rank == 0:
                trainer.strategy.barrier = lambda *_, **__: None  # the others are gone
                trainer.save_checkpoint(f"{folder}/alone.ckpt")

    from datetime import timedelta

    trainer = quiet_trainer(
        strategy_of({}, timeout=timedelta(seconds=20)), num_workers=2, max_steps=8, callbacks=[Keep()]
    )
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        trainer.fit(Fails(adam), ResumableData(1000))
    return anchor


def test_who_is_left_alone_saves_the_anchor_and_says_so(tmp_path: Path) -> None:
    anchor, _ = run_workers(_fails_alone, 2, str(tmp_path), process_group=False)
    saved = torch.load(tmp_path / "alone.ckpt", weights_only=True)
    assert "did not come to save" in saved["lightning_sparse"]["why_incomplete"]
    assert_equal(saved["state_dict"], anchor)
    assert saved["lightning_sparse"]["workers"] == []


def _two_players() -> tuple[int, int, dict[str, Tensor]]:
    trainer = quiet_trainer(strategy_of({}, every_n_steps=2), num_workers=2, max_steps=12)
    model = TwoPlayers()
    trainer.fit(model, data())
    return trainer.global_step, trainer.strategy.averager.last_step.step, clones(model.named_parameters())


def test_several_optimizers_and_manual_optimization() -> None:
    (steps, exchanges, one), (_, _, other) = run_workers(_two_players, 2, process_group=False)
    assert steps == 12
    assert exchanges == 5
    assert_equal(one, other)


def _scaled() -> tuple[list[float], list[bool], list[Tensor]]:
    """Only one worker overflows, and skips its own step."""
    scales, skipped, anchors = [], [], []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())
            anchors.append(torch.cat([one.flatten() for one in trainer.strategy.averager.anchor().values()]).clone())

    trainer = quiet_trainer(strategy_of({}), num_workers=2, max_steps=6, callbacks=[Look()], plugins=[scaled()])
    trainer.fit(OverflowsOnOne(adam), ResumableData(1000))
    return scales, skipped, anchors


def test_each_worker_skips_its_own_step_under_a_scaler() -> None:
    (one, _, anchors), (other, _, others) = run_workers(_scaled, 2, process_group=False)
    assert one == [1024.0] * 6
    assert other == [1024.0] * 3 + [512.0] * 3
    for mine, theirs in zip(anchors, others, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


def _usual(options: dict[str, Any], strategy: Any) -> dict[str, Tensor]:
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=8, **options)
    model = WithSchedule(nesterov)
    trainer.fit(model, ResumableData(1000))
    return clones(model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}], ids=str)
def test_with_sgd_and_a_threshold_of_zero_it_is_ddp(options: dict[str, Any]) -> None:
    [expected, _] = run_workers(_usual, 2, options, "ddp", process_group=False)
    for found in run_workers(_usual, 2, options, LocalHardThresholdStrategy(threshold=0.0), process_group=False):
        tolerance = 1e-2 if "precision" in options else 1e-6
        for name, one in found.items():
            torch.testing.assert_close(one, expected[name], rtol=0, atol=tolerance)


def _clipped() -> float:
    largest = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            largest.append(float(torch.stack([one.grad.norm() for one in pl_module.parameters()]).norm()))

    class Clip(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            largest[-1] = float(torch.stack([one.grad.norm() for one in pl_module.parameters()]).norm())

    trainer = quiet_trainer(
        strategy_of({}), num_workers=2, max_steps=4, callbacks=[Look(), Clip()], gradient_clip_val=0.05
    )
    trainer.fit(Classifier(adam), ResumableData(1000))
    return max(largest)


def test_each_worker_clips_its_own_gradient() -> None:
    assert all(one == pytest.approx(0.05, rel=1e-3) for one in run_workers(_clipped, 2, process_group=False))


def test_the_names_are_there_in_twelve_forms() -> None:
    others = ("accordion", "dense", "gaussiank", "modeltopk", "randomk", "topk")
    families = {"local_hardthreshold": LocalHardThresholdStrategy} | {
        f"local_{name}": SparseLocalStrategy for name in others
    }
    for family, kind in families.items():
        names = [name for name in StrategyRegistry.available_strategies() if name.startswith(family)]
        assert len(names) == 12
        for name in names:
            assert isinstance(StrategyRegistry.get(name), kind)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"static_graph": True}, ValueError, "leave it out"),
        ({"bucket_cap_mb": 5}, ValueError, "leave it out"),
        ({"ddp_comm_hook": print}, ValueError, "leave it out"),
        ({"model_averaging_period": 3}, ValueError, "leave it out"),
        ({"timeot": 3}, TypeError, "timeout"),
        ({"every_n_steps": 2.5}, ValueError, "whole number"),
        ({"drift_checkpoint": "some"}, ValueError, "'full'"),
        ({"optimizer_checkpoint": "none"}, ValueError, "'first'"),
        ({"threshold": 1.0, "density": 0.1}, ValueError, "Give one"),
    ],
)
def test_bad_arguments_are_told_at_once(arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        LocalHardThresholdStrategy(**arguments)


def test_a_threshold_in_place_of_a_sparsifier_is_told() -> None:
    with pytest.raises(TypeError, match="LocalHardThresholdStrategy"):
        SparseLocalStrategy(0.1)  # type: ignore[arg-type]
    assert SparseLocalStrategy(TopK(0.1), find_unused_parameters=True).state is None


def _lonely() -> bool:
    trainer = quiet_trainer(strategy_of({}), num_workers=1, max_steps=4)
    trainer.fit(Classifier(adam), data())
    return dist.is_initialized() and trainer.global_step == 4


def test_one_worker_alone() -> None:
    assert run_workers(_lonely, 1, process_group=False) == [True]
