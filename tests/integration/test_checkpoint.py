"""A run that stops and resumes equals one that went on; another number of workers keeps the pending update."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    GaussianK,
    HardThreshold,
    RandomK,
    SparseDDPStrategy,
    TopK,
)
from lightning_sparse.checkpointing.options import CheckpointOptions
from lightning_sparse.checkpointing.restoring import restore
from tests.integration.models import (
    SMALL_BUCKETS_MB,
    WEIGHTS_ONLY,
    Classifier,
    Recorder,
    adam,
    assert_equal,
    data,
    nesterov,
    quiet_trainer,
    sgd,
)
from tests.workers import run_workers

STOP, END = 7, 16


class ResumableData:
    """Batches without end, one of them a worker's, that say how far they are and continue from there."""

    def __init__(self, batches_per_epoch: int) -> None:
        self.batches_per_epoch = batches_per_epoch
        self.position = 0

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __iter__(self) -> Any:
        while self.position < self.batches_per_epoch:
            self.position += 1
            rank = int(os.environ["RANK"])
            generator = torch.Generator().manual_seed(1000 * self.position + rank)
            yield [torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveAt(Callback):
    """Writes a checkpoint after a step, as a user's own callback would."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path, self.is_done = step, path, False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Every worker saves or none: whether the file exists is not the same for all at one time.
        if trainer.global_step == self.step and not self.is_done:
            self.is_done = True
            trainer.save_checkpoint(self.path)


class WithSchedule(Classifier):
    """A learning rate that falls from the last step before the stop to the first after it."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, STOP, 0.7), "interval": "step"}]


OPTIMIZERS = {"sgd": sgd, "adam": adam, "nesterov": nesterov}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": "adam"},
    "accumulation": {"accumulate": 2},
    "middle of an epoch": {"batches_per_epoch": 5},
    "middle of calibration": {"strategy": {"density": 0.05, "calibration_steps": 10}},
    "after calibration": {"strategy": {"density": 0.05, "calibration_steps": 3}},
    "share of each layer": {"strategy": {"density": 0.1, "calibration_steps": 3, "granularity": "layer"}},
    "learning rate": {"strategy": {"threshold": 0.02, "error_feedback": "learning_rate"}},
    "bfloat16": {"strategy": {"threshold": 0.02, "value_dtype": "bfloat16"}},
    "dense": {"strategy": {"threshold": 0.02, "exchange": "dense"}},
    "reduce scatter": {"strategy": {"threshold": 0.02, "exchange": "reduce_scatter"}},
    "one bucket": {"strategy": {"threshold": 0.02, "bucket_cap_mb": 25}},
    "top k": {"sparsifier": TopK(0.05)},
    "top k of the model": {"sparsifier": TopK(0.05, granularity="model")},
    "random k": {"sparsifier": RandomK(0.2)},
    "random k, each its own": {"sparsifier": RandomK(0.2, same_on_all=False, seed=3)},
    "accordion": {"sparsifier": Accordion(0.05, 0.2, interval=1), "batches_per_epoch": 2},
    "accordion, after an epoch": {"sparsifier": Accordion(0.05, 0.2, interval=2), "batches_per_epoch": 3},
    "gaussian k": {"sparsifier": GaussianK(0.1)},
    "static graph": {"strategy": {"threshold": 0.02, "static_graph": True}},
    "copies": {"strategy": {"threshold": 0.02, "gradient_as_bucket_view": False}},
}


def make_strategy(case: dict[str, Any], **options: Any) -> SparseDDPStrategy:
    if "sparsifier" in case:
        return SparseDDPStrategy(case["sparsifier"], bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    return DDPHardThresholdStrategy(
        **({"bucket_cap_mb": SMALL_BUCKETS_MB} | case.get("strategy", {"threshold": 0.02}) | options)
    )


def fit(
    case: dict[str, Any], max_steps: int, *callbacks: Callback, ckpt_path: str | None = None, **options: Any
) -> dict[str, Any]:
    recorder, states = Recorder(), {}

    class Inner(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            states["optimizer"] = trainer.optimizers[0].state_dict()
            states["threshold"] = trainer.strategy.state.sparsifier.current_threshold

    trainer = quiet_trainer(
        options.pop("strategy", None) or make_strategy(case, **options),
        num_workers=int(os.environ["WORLD_SIZE"]),
        max_steps=max_steps,
        accumulate_grad_batches=case.get("accumulate", 1),
        callbacks=[recorder, Inner(), *callbacks],
        use_distributed_sampler=False,
    )
    model = WithSchedule(OPTIMIZERS[case.get("optimizer", "nesterov")])
    trainer.fit(model, ResumableData(case.get("batches_per_epoch", 1000)), ckpt_path=ckpt_path, **WEIGHTS_ONLY)
    return {
        "weights": recorder.weights,
        "residuals": recorder.residuals,
        "steps": [step.__dict__ | {"layers": None} for step in recorder.steps],
        **states,
    }


def _fit(
    case: dict[str, Any], max_steps: int, save: tuple[int, str] | None, ckpt_path: str | None, options: Any
) -> Any:
    return fit(case, max_steps, *([SaveAt(*save)] if save else []), ckpt_path=ckpt_path, **options)


def run(num_workers: int, case: dict[str, Any], max_steps: int, save: Any = None, resume: Any = None, **options: Any):
    return run_workers(
        _fit, num_workers, case, max_steps, save, str(resume) if resume else None, options, process_group=False
    )


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, num_workers: int, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "stop.ckpt"
    straight = run(num_workers, case, END, save=(STOP, str(path)))
    resumed = run(num_workers, case, END, resume=path)
    for one, other in zip(straight, resumed, strict=True):
        assert len(other["steps"]) == END - STOP
        assert one["steps"][STOP:] == other["steps"]
        assert one["threshold"] == other["threshold"]
        assert_equal(one["residuals"], other["residuals"])
        assert_equal(one["weights"], other["weights"])
        assert_equal(one["optimizer"], other["optimizer"])
    assert straight[0]["steps"][-1]["selected"] > 0
    if "sparsifier" not in case:
        assert straight[0]["steps"][-1]["squared_error"] > 0 or name == "middle of calibration"


def residuals_in(path: Path) -> Any:
    return [worker["residual"] for worker in torch.load(path, weights_only=True)["lightning_sparse"]["workers"]]


def pending(residuals: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """(1/n) Σ e_i."""
    return {name: sum(one[name].double() for one in residuals) / len(residuals) for name in residuals[0]}


class _Residuals(Callback):
    """What a worker starts from."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.residuals = trainer.strategy.state.residuals.state_dict()


def _start_from(path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    start = _Residuals()
    fit(CASES["plain"], STOP + 3, start, ckpt_path=path, **options)
    return start.residuals


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (8, 1)])
@pytest.mark.parametrize("residual_checkpoint", ["full", "mean"])
def test_another_number_of_workers_keeps_the_pending_update(
    residual_checkpoint: str, before: int, after: int, tmp_path: Path
) -> None:
    path = tmp_path / "stop.ckpt"
    old = run(before, CASES["plain"], STOP, save=(STOP, str(path)), residual_checkpoint=residual_checkpoint)
    expected = pending([one["residuals"] for one in old])
    assert any(one.any() for one in expected.values())
    new = run_workers(_start_from, after, str(path), {}, process_group=False)
    assert len(new) == after
    for name, one in pending(new).items():
        torch.testing.assert_close(one, expected[name], rtol=1e-6, atol=1e-9)


def test_a_checkpoint_of_the_mean_is_as_large_as_the_model_and_of_all_n_times_that(tmp_path: Path) -> None:
    sizes = {}
    for kind in ("full", "mean", "none"):
        path = tmp_path / f"{kind}.ckpt"
        run(3, CASES["plain"], STOP, save=(STOP, str(path)), residual_checkpoint=kind)
        sizes[kind] = path.stat().st_size
    model_bytes = 4 * sum(parameter.numel() for parameter in Classifier().parameters())
    assert sizes["mean"] - sizes["none"] == pytest.approx(model_bytes, rel=0.3)
    assert sizes["full"] - sizes["none"] == pytest.approx(3 * model_bytes, rel=0.3)


def test_residuals_can_be_reset_or_a_change_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run(2, CASES["plain"], STOP, save=(STOP, str(path)))
    new = run_workers(_start_from, 3, str(path), {"on_world_size_change": "reset"}, process_group=False)
    assert all(one == {} or not any(tensor.any() for tensor in one.values()) for one in new)
    with pytest.raises(AssertionError, match="The checkpoint is of 2 workers, this run has 3"):
        run_workers(_start_from, 3, str(path), {"on_world_size_change": "error"}, process_group=False)


class Renamed(Classifier):
    """The middle layer has another name, the last another size, and there is a new one."""

    def __init__(self) -> None:
        super().__init__(nesterov)
        self.centre, self.middle = self.middle, None
        self.last = torch.nn.Linear(40, 3, bias=False)
        self.extra = torch.nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.extra(self.last(self.centre(self.first(inputs).tanh()).tanh()))


def _fit_renamed(path: str) -> tuple[dict[str, Tensor], list[str]]:
    """Resumes another model: its weights and optimizer begin anew, residuals are matched by name."""
    content = torch.load(path, weights_only=True)["lightning_sparse"]
    messages = []

    class Restore(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            with pytest.warns(UserWarning, match="the model is not the one of the checkpoint") as caught:
                restore([trainer.strategy.state], content, CheckpointOptions())
            messages.extend(str(one.message) for one in caught)
            self.residuals = trainer.strategy.state.residuals.state_dict()

    callback = Restore()
    trainer = quiet_trainer(make_strategy(CASES["plain"]), num_workers=1, max_steps=2, callbacks=[callback])
    trainer.fit(Renamed(), data())
    return callback.residuals, messages


def test_a_changed_model_keeps_what_still_fits_and_says_what_does_not(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run(1, CASES["plain"], STOP, save=(STOP, str(path)))
    [(residuals, [message])] = run_workers(_fit_renamed, 1, str(path), process_group=False)
    assert sorted(residuals) == ["first.bias", "first.weight", "last.weight"]
    assert_equal(residuals["first.weight"], residuals_in(path)[0]["first.weight"])
    assert "residuals (norm " in message
    assert "last.bias, middle.bias, middle.weight" in message
    assert "centre.weight" in message


def test_a_threshold_that_the_user_changed_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run(2, CASES["plain"], STOP, save=(STOP, str(path)))
    for one in run(2, {"strategy": {"threshold": 0.5}}, STOP + 4, resume=path):
        assert one["threshold"] == 0.5
    for one in run(2, {"strategy": {"density": 0.1, "calibration_steps": 2}}, STOP + 4, resume=path):
        assert one["threshold"] not in (0.0, 0.02)


def test_the_words_are_checked_at_construction() -> None:
    with pytest.raises(ValueError, match=r"Invalid residual_checkpoint='all'. Must be one of 'full', 'mean', 'none'"):
        DDPHardThresholdStrategy(residual_checkpoint="all")
    with pytest.raises(ValueError, match=r"Invalid on_world_size_change='keep'. Must be one of 'mean', 'reset'"):
        SparseDDPStrategy(HardThreshold(threshold=0.1), on_world_size_change="keep")
