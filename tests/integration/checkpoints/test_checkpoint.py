"""A resumed run equals an uninterrupted run; another number of workers keeps the pending update."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    RandomK,
    SparseDDPStrategy,
    SparseLocalStrategy,
    StepStats,
    TopK,
)
from tests.distributed.drift.drift_simulation import NESTEROV
from tests.integration.models import (
    SMALL_BUCKETS_MB,
    WEIGHTS_ONLY,
    Classifier,
    ScaledPrecision,
    adam,
    assert_equal,
    clones,
    data,
    mean_of,
    nesterov,
    quiet_trainer,
    sgd,
    warnings_of,
)
from tests.workers import run_workers

STOP, END = 7, 16


class ResumableData:
    """Endless batches that differ between workers; saves and restores its position."""

    def __init__(self, batches_per_epoch: int) -> None:
        self.batches_per_epoch = batches_per_epoch
        self.position = 0

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __iter__(self) -> Any:
        while self.position < self.batches_per_epoch:
            self.position += 1
            yield self.batch(self.position)
        self.position = 0

    def batch(self, number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * number + int(os.environ["RANK"]))
        return [torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveAt(Callback):
    """Writes a checkpoint after a step, as a custom callback would."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path, self.is_done = step, path, False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # The condition must be equal on all workers, so it cannot depend on whether the file exists.
        if trainer.global_step == self.step and not self.is_done:
            self.is_done = True
            trainer.save_checkpoint(self.path)


class WithSchedule(Classifier):
    """Has a learning rate that falls between the last step before the stop and the next step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, STOP, 0.7), "interval": "step"}]


class OverflowOnOneWorker(WithSchedule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        is_bad = batch_idx == 3 and self.global_rank == 1
        return super().training_step(batch, batch_idx) * (float("inf") if is_bad else 1.0)


class Transposed(WithSchedule):
    """Has a weight whose memory is not in the order of its indices, which fused optimizers ignore."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.middle.weight = torch.nn.Parameter(self.middle.weight.detach().t().contiguous().t())


OPTIMIZERS = {"sgd": sgd, "adam": adam, "nesterov": nesterov, "fused": partial(torch.optim.AdamW, lr=0.01, fused=True)}
OF_GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": "adam"},
    "accumulation": {"accumulate": 2},
    "middle of an epoch": {"batches_per_epoch": 5},
    "density": {"strategy": {"density": 0.05}},
    "share of each layer": {"strategy": {"density": 0.1, "granularity": "layer"}},
    "given thresholds": {"strategy": {"density": 0.02, "layer_thresholds": {"*.bias": 0.0}}},
    "bfloat16": {"strategy": {"value_dtype": "bfloat16"}},
    "dense": {"strategy": {"exchange": "dense"}},
    "reduce scatter": {"strategy": {"exchange": "reduce_scatter"}},
    "sparse sums": {"strategy": {"exchange": "sparse_sums"}},
    "one bucket": {"strategy": {"bucket_cap_mb": 25}},
    "top k of the model": {"sparsifier": TopK(0.05, granularity="model")},
    "random k": {"sparsifier": RandomK(0.2)},
    "random k, each its own": {"sparsifier": RandomK(0.2, same_on_all=False, seed=3)},
    "accordion": {"sparsifier": Accordion(0.05, 0.2, interval=1), "batches_per_epoch": 2},
    "accordion, after an epoch": {"sparsifier": Accordion(0.05, 0.2, interval=2), "batches_per_epoch": 3},
    "static graph": {"strategy": {"static_graph": True}},
    "copies": {"strategy": {"gradient_as_bucket_view": False}},
}
KEPT_APART = {"keep_drift": False, "drift_decay": 0.9}
OF_DRIFTS: dict[str, dict[str, Any]] = {
    "adam": {},
    "every third step": {"strategy": {"every_n_steps": 3}},
    "back to the anchor": {"strategy": KEPT_APART},
    "outer optimizer": {"strategy": {"outer_optimizer": NESTEROV}},
    "density": {"strategy": {"density": 0.2}},
    "share of each layer": {"strategy": {"density": 0.2, "granularity": "layer"}},
    "given thresholds": {"strategy": {"density": 0.05, "layer_thresholds": {"*.bias": 0.0}}},
    "bfloat16": {"strategy": {"value_dtype": "bfloat16"}},
    "accumulation": {"accumulate": 2},
    "middle of an epoch": {"batches_per_epoch": 5},
    "accordion": {"batches_per_epoch": 5, "sparsifier": Accordion(0.05, 0.3, interval=1)},
    "scaled, one worker overflows": {"overflows": True},
    "transposed, fused": {"optimizer": "fused", "model": Transposed},
}
CASES = OF_GRADIENTS | {f"local, {name}": case | {"is_local": True} for name, case in OF_DRIFTS.items()}


def make_strategy(case: dict[str, Any], **options: Any) -> SparseDDPStrategy | SparseLocalStrategy:
    options = case.get("strategy", {}) | options
    if not case.get("is_local"):
        options = {"bucket_cap_mb": SMALL_BUCKETS_MB} | options
    if "sparsifier" in case:
        return (SparseLocalStrategy if case.get("is_local") else SparseDDPStrategy)(case["sparsifier"], **options)
    threshold = {} if "density" in options else {"threshold": 0.01 if case.get("is_local") else 0.02}
    make = LocalHardThresholdStrategy if case.get("is_local") else DDPHardThresholdStrategy
    return make(**(threshold | options))


class End(Callback):
    """Records the state of a worker after its last step, before the end of training averages drifting weights."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: dict[str, Any] = {"steps": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(lambda step: self.seen["steps"].append(vars(step) | {"layers": None}))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step != self.step:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        state = trainer.strategy.state
        self.seen |= {
            "weights": clones(pl_module.named_parameters()),
            "optimizer": trainer.optimizers[0].state_dict(),
            "scale": scaler and scaler.get_scale(),
            "threshold": state.sparsifier.current_threshold,
        }
        snapshot = state.state_dict()  # applies a pending exchange
        self.seen |= {"tensors": snapshot["own"] | snapshot["shared"]}


def fit(
    case: dict[str, Any], max_steps: int, *callbacks: Callback, ckpt_path: str | None = None, **options: Any
) -> dict[str, Any]:
    end, plugins = End(max_steps), None
    if case.get("overflows"):
        plugins = [ScaledPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
    trainer = quiet_trainer(
        make_strategy(case, **options),
        max_steps=max_steps,
        accumulate_grad_batches=case.get("accumulate", 1),
        callbacks=[end, *callbacks],
        use_distributed_sampler=False,
        plugins=plugins,
    )
    make_optimizer = OPTIMIZERS[case.get("optimizer", "adam" if case.get("is_local") else "nesterov")]
    model = case.get("model", OverflowOnOneWorker if case.get("overflows") else WithSchedule)(make_optimizer)
    trainer.fit(model, ResumableData(case.get("batches_per_epoch", 1000)), ckpt_path=ckpt_path, **WEIGHTS_ONLY)
    return end.seen


def run(num_workers: int, case: dict[str, Any], max_steps: int, save: Any = None, resume: Any = None, **options: Any):
    function = partial(fit, ckpt_path=str(resume) if resume else None, **options)
    savers = [SaveAt(*save)] if save else []
    return run_workers(function, num_workers, case, max_steps, *savers, process_group=False)


OF_THREE = ("plain", "share of each layer", "dense", "reduce scatter", "sparse sums", "random k, each its own")


def rows_of_cases() -> list[Any]:
    rows = [(name, number) for name in OF_GRADIENTS for number in ((2, 3) if name in OF_THREE else (2,))]
    drifts = [(name, 2) for name in CASES if name not in OF_GRADIENTS]
    return [*rows, pytest.param(*drifts[0], marks=pytest.mark.representative), *drifts[1:]]


@pytest.mark.parametrize(("name", "num_workers"), rows_of_cases())
def test_a_resumed_run_equals_an_uninterrupted_run(name: str, num_workers: int, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "stop.ckpt"
    straight = run(num_workers, case, END, save=(STOP, str(path)))
    resumed = run(num_workers, case, END, resume=path)
    options, is_local = case.get("strategy", {}), case.get("is_local", False)
    for expected, found in zip(straight, resumed, strict=True):
        assert expected["steps"][STOP // options.get("every_n_steps", 1) :] == found["steps"]
        for key in ("threshold", "tensors", "weights", "optimizer", "scale"):
            assert_equal(found[key], expected[key], key)
        assert all(weight.isfinite().all() for weight in expected["weights"].values())
    last = straight[0]["steps"][-1]
    assert last["selected"] > 0
    if is_local or "sparsifier" not in case:
        assert last["squared_error"] > 0
    assert (straight[0]["scale"] != straight[1]["scale"]) == case.get("overflows", False)
    assert_equal(straight[0]["tensors"].get("anchor"), straight[1]["tensors"].get("anchor"))
    pairs = zip(straight[0]["weights"].values(), straight[1]["weights"].values(), strict=True)
    assert any((mine != theirs).any() for mine, theirs in pairs) == (is_local and options.get("keep_drift", True))


class Start(Callback):
    """Records the weights and tensors at the start of a worker."""

    seen: dict[str, Any] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.seen is None:
            snapshot = trainer.strategy.state.state_dict()
            self.seen = {"weights": clones(pl_module.named_parameters()), **snapshot["shared"]}
            self.seen |= {kind: tensors for kind, tensors in snapshot["own"].items() if kind != "weights"}


def _start_from(case: dict[str, Any], path: str, options: dict[str, Any]) -> dict[str, Any]:
    start = Start()
    fit(case, STOP + 3, start, ckpt_path=path, **options)
    return start.seen


def start_from(num_workers: int, case: dict[str, Any], path: Path, **options: Any) -> list[dict[str, Any]]:
    return run_workers(_start_from, num_workers, case, str(path), options, process_group=False)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("worker_state", ["full", "small"])
def test_another_number_of_workers_keeps_the_pending_update(
    worker_state: str, before: int, after: int, tmp_path: Path
) -> None:
    path = tmp_path / "stop.ckpt"
    old = run(before, CASES["plain"], STOP, save=(STOP, str(path)), worker_state=worker_state)
    expected = mean_of([worker["tensors"]["unsent"] for worker in old])  # the pending update (1/n) Σ e_i
    assert any(residual.any() for residual in expected.values())
    new = mean_of([worker["unsent"] for worker in start_from(after, CASES["plain"], path)])
    torch.testing.assert_close(new, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_starts_from_the_mean_of_drifting_weights(num_workers: int, tmp_path: Path) -> None:
    case, path = CASES["local, back to the anchor"], tmp_path / "stop.ckpt"
    for keep_drift in (True, False):
        options = {"keep_drift": keep_drift, "drift_decay": 1.0}
        run(2, case, STOP, save=(STOP, str(path)), **options)
        saved = torch.load(path, weights_only=True)
        for start in start_from(num_workers, case, path, **options):
            assert_equal(start["weights"], saved["state_dict"])
            if keep_drift:
                assert_equal(
                    {name: anchor.view_as(start["weights"][name]) for name, anchor in start["anchor"].items()},
                    saved["state_dict"],
                )
            else:
                expected = mean_of([worker["unsent"] for worker in saved["lightning_sparse"]["workers"]])
                assert any(unsent.any() for unsent in expected.values())
                torch.testing.assert_close(start["unsent"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("keep_drift", [True, False])
def test_a_small_checkpoint_of_drifts_has_mean_weights_and_one_optimizer(keep_drift: bool, tmp_path: Path) -> None:
    case, (path, full) = CASES["local, adam"], (tmp_path / "stop.ckpt", tmp_path / "full.ckpt")
    options = {"worker_state": "small", "keep_drift": keep_drift}
    run(2, case, STOP, save=(STOP, str(path)), **options)
    run(2, case, STOP, save=(STOP, str(full)), keep_drift=keep_drift)
    small, whole = (torch.load(file, weights_only=True) for file in (path, full))
    content = small["lightning_sparse"]
    assert content["extras"] == [[{}, {}]]
    assert [list(worker) for worker in content["workers"]] == ([] if keep_drift else [["unsent"]])
    if not keep_drift:
        expected = mean_of([worker["unsent"] for worker in whole["lightning_sparse"]["workers"]])
        torch.testing.assert_close(content["workers"][0]["unsent"], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(small["optimizer_states"], whole["optimizer_states"], rtol=0, atol=0)
    assert_equal(small["state_dict"], whole["state_dict"])
    for start in start_from(2, case, path, **options):
        assert_equal(start["weights"], small["state_dict"])


class Renamed(Classifier):
    """Has another name for the middle layer, another last layer, and a new layer."""

    def __init__(self) -> None:
        super().__init__(nesterov)
        self.centre, self.middle = self.middle, None
        self.last = torch.nn.Linear(40, 3, bias=False)
        self.extra = torch.nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.extra(self.last(self.centre(self.first(inputs).tanh()).tanh()))


def _fit_changed(path: str) -> tuple[int, float, list[str]]:
    class Changed(Renamed):
        default_optimizer, strict_loading = staticmethod(adam), False

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {}
            states = self.configure_optimizers().state_dict()
            states["param_groups"][0]["lr"] = 0.003
            checkpoint["optimizer_states"] = [states]

    trainer = quiet_trainer(make_strategy(CASES["local, adam"]), max_steps=END)
    messages: list[str] = []
    with warnings_of(messages, "the model is not the one"):
        trainer.fit(Changed(), ResumableData(1000), ckpt_path=path)
    return trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], messages


def test_a_changed_model_trains_locally_with_the_optimizers_that_the_user_gives(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run(2, CASES["local, adam"], STOP, save=(STOP, str(path)))
    first, second = run_workers(_fit_changed, 2, str(path), process_group=False)
    assert first[:2] == second[:2] == (END, 0.003)
    assert "unsent drifts are lost: middle.weight" in first[2][0]


def test_a_threshold_changed_by_the_user_stays(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    run(2, CASES["plain"], STOP, save=(STOP, str(path)))
    for worker in run(2, {"strategy": {"threshold": 0.5}}, STOP + 4, resume=path):
        assert worker["threshold"] == 0.5
    for worker in run(2, {"strategy": {"density": 0.1}}, STOP + 4, resume=path):
        assert worker["threshold"] not in (0.0, 0.02)


class SetsAtTheEnd(Callback):
    """Sets another threshold after a step, before the checkpoint of this step is saved."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == STOP:
            trainer.strategy.state.set_threshold(0.2)  # type: ignore[attr-defined]


def _set_and_save(case: dict[str, Any], path: str) -> dict[str, Any]:
    trainer = quiet_trainer(make_strategy(case), max_steps=STOP, callbacks=[SetsAtTheEnd()])
    trainer.fit(Classifier(), data())
    trainer.save_checkpoint(path)
    own = trainer.strategy.state.state_dict()  # type: ignore[attr-defined]
    return {"file": torch.load(path, weights_only=True)["lightning_sparse"]["numbers"], "own": own["numbers"]}


@pytest.mark.parametrize("name", ["plain", "density", "share of each layer", "local, density"])
@pytest.mark.parametrize("num_workers", [2, 1])
def test_a_threshold_that_is_set_after_a_step_is_saved(name: str, num_workers: int, tmp_path: Path) -> None:
    case = CASES[name]
    for numbers in run_workers(_set_and_save, num_workers, case, str(tmp_path / "set.ckpt"), process_group=False)[:1]:
        assert numbers["file"]["threshold"] == numbers["own"]["threshold"] == 0.2


def _continue_for_six_steps(path: str, threshold: float | None) -> list[StepStats]:
    """Train six steps from a checkpoint if there is one, and save; may set a threshold first."""
    seen: list[StepStats] = []

    def start(trainer: Trainer, _: LightningModule) -> None:
        trainer.strategy.state.subscribe(seen.append)  # type: ignore[attr-defined]
        if threshold is not None:
            trainer.strategy.state.set_threshold(threshold)  # type: ignore[attr-defined]

    num_workers = int(os.environ["WORLD_SIZE"])
    strategy = DDPHardThresholdStrategy(density=0.1)
    steps = torch.load(path, weights_only=True)["global_step"] if os.path.exists(path) else 0
    options = {"num_workers": num_workers, "max_steps": steps + 6}
    trainer = quiet_trainer(strategy, callbacks=[LambdaCallback(on_train_start=start)], **options)
    trainer.fit(Classifier(), data(), ckpt_path=path if steps else None)
    trainer.save_checkpoint(path)
    return seen


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_a_single_worker_sends_nothing_and_passes_the_threshold_on(threshold: float | None, tmp_path: Path) -> None:
    path = str(tmp_path / "passed on.ckpt")
    first = run_workers(_continue_for_six_steps, 2, path, None, process_group=False)[0]
    alone = run_workers(_continue_for_six_steps, 1, path, threshold, process_group=False)[0]
    assert {(step.density, step.threshold) for step in alone} == {(1.0, 0.0)}
    last = run_workers(_continue_for_six_steps, 2, path, None, process_group=False)[0]
    assert not any(step.is_calibration for step in last)
    assert last[0].threshold == pytest.approx(threshold or first[-1].threshold, rel=0.2)  # adjusted after each step
