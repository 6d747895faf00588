"""Precisions, options of the strategy and what it logs; ``tests/integration/programs`` has the modes of a Trainer.

Most tests train under a threshold that no gradient reaches. Then no weight may move, and every worker's residual must
be the sum of its own gradients, which the tests compute again without DDP.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_sparse import DDPHardThresholdStrategy, SparseDDPStrategy, StepStats, TopK
from tests.integration.models import (
    NOTHING_IS_SENT,
    SMALL_BUCKETS_MB,
    Classifier,
    Recorder,
    data,
    gradients,
    nesterov,
    quiet_trainer,
)
from tests.workers import run_workers


@dataclass
class Run:
    """What one worker saw of a training."""

    comm_hooks: list[str | None]
    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    residuals: dict[str, Tensor]
    own_gradients: list[dict[str, Tensor]]
    steps: list[StepStats]
    global_step: int
    callback_metrics: dict[str, float]


def train(
    make_model: Callable[[], Any],
    strategy: dict[str, Any] | str,
    trainer_options: dict[str, Any] | None = None,
    num_workers: int = 2,
) -> Run:
    """Runs in every worker; a strategy given as a dict is made with these arguments."""
    model, recorder = make_model(), Recorder()
    untrained = copy.deepcopy(model)
    options = dict(trainer_options or {})
    callbacks = [recorder, *options.pop("callbacks", [])]
    if isinstance(strategy, dict):
        strategy = DDPHardThresholdStrategy(**strategy)
    trainer = quiet_trainer(strategy, num_workers=num_workers, callbacks=callbacks, **options)
    trainer.fit(model, data())
    own_gradients: list[dict[str, Tensor]] = []
    if hasattr(untrained, "loss"):
        own_gradients = [gradients(untrained, partial(untrained.loss, batch)) for batch in model.batches]
    return Run(
        recorder.comm_hooks,
        recorder.initial,
        recorder.weights,
        recorder.residuals,
        own_gradients,
        recorder.steps,
        trainer.global_step,
        {name: value.item() for name, value in trainer.callback_metrics.items()},
    )


def train_workers(*args: Any, num_workers: int = 2) -> list[Run]:
    return run_workers(partial(train, num_workers=num_workers), num_workers, *args, process_group=False)


def frozen(**strategy: Any) -> dict[str, Any]:
    """A strategy that sends nothing, in several buckets."""
    return {"threshold": NOTHING_IS_SENT, "bucket_cap_mb": SMALL_BUCKETS_MB, **strategy}


def total(own_gradients: list[dict[str, Tensor]], weights: list[float] | None = None) -> dict[str, Tensor]:
    """Σ_t w_t g_t by parameter name, in float64."""
    weights = weights or [1.0] * len(own_gradients)
    return {
        name: sum(weight * one[name].double() for weight, one in zip(weights, own_gradients, strict=True))
        for name in own_gradients[0]
    }


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name].flatten().double(),
            expected[name].flatten().double(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_nothing_was_sent(run: Run, expected: dict[str, Tensor], steps: int, **tolerance: float) -> None:
    """The weights stand still, and the residual is what is expected; so the hook saw every gradient once."""
    assert run.comm_hooks == ["sparse_hook"]
    assert run.global_step == steps
    assert [step.selected for step in run.steps] == [0] * steps
    assert_same_bits(run.weights, run.initial)
    assert any(values.abs().max() > 0.01 for values in expected.values())  # an oracle of zeros would prove nothing
    assert_close(run.residuals, expected, **tolerance)


@pytest.mark.parametrize(
    ("precision", "model_dtype", "residual_dtype", "rtol"),
    [
        ("bf16-mixed", torch.float32, torch.float32, 1e-5),
        ("bf16-true", torch.bfloat16, torch.float32, 1e-6),
        ("64-true", torch.float64, torch.float64, 1e-12),
    ],
)
def test_residuals_hold_the_gradients_of_every_precision(
    precision: str, model_dtype: torch.dtype, residual_dtype: torch.dtype, rtol: float
) -> None:
    for run, expected in run_workers(_train_with_precision, 2, precision, model_dtype, process_group=False):
        assert {weight.dtype for weight in run.weights.values()} == {model_dtype}
        assert {residual.dtype for residual in run.residuals.values()} == {residual_dtype}
        assert_nothing_was_sent(run, expected, steps=3, rtol=rtol, atol=rtol)


def _train_with_precision(precision: str, model_dtype: torch.dtype) -> tuple[Run, dict[str, Tensor]]:
    models: list[Classifier] = []

    def make_model() -> Classifier:
        models.append(Classifier())
        return models[0]

    run = train(make_model, frozen(), {"precision": precision})
    untrained = Classifier().to(model_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        own_gradients = [gradients(untrained, partial(untrained.loss, batch)) for batch in models[0].batches]
    return run, total(own_gradients)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_threshold_zero_trains_as_stock_ddp_does_in_every_precision(precision: str) -> None:
    for sparse, dense in run_workers(_train_with_precision_densely, 2, precision, process_group=False):
        assert sparse.comm_hooks == ["sparse_hook"]
        assert dense.comm_hooks == [None]
        # With bfloat16 gradients stock DDP adds in bfloat16 and the sparse exchange in float32: some roundings apart.
        tolerance = 0.03 if precision == "bf16-true" else 1e-6
        assert_close(sparse.weights, dense.weights, rtol=tolerance, atol=tolerance)


def _train_with_precision_densely(precision: str) -> tuple[Run, Run]:
    make_model = partial(Classifier, nesterov)
    options = {"precision": precision, "max_steps": 5}
    sparse = train(make_model, {"threshold": 0.0, "bucket_cap_mb": SMALL_BUCKETS_MB}, options)
    return sparse, train(make_model, DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), options)


@pytest.mark.parametrize("options", [{}, {"value_dtype": "float8"}, {"error_feedback": "none"}])
def test_a_single_worker_holds_nothing_back(options: dict[str, Any]) -> None:
    [run] = train_workers(Classifier, {"threshold": 0.05, **options}, {"max_steps": 1}, num_workers=1)
    sent = {name: (run.initial[name] - weight).flatten() for name, weight in run.weights.items()}
    assert run.steps[0].density == 1
    assert_close(sent, run.own_gradients[0])
    for values in run.residuals.values():
        assert not values.any()


def test_evaluation_needs_no_hook() -> None:
    for stages in run_workers(_evaluate, 2, process_group=False):
        assert stages == [(True, None, 1), (True, None, 1), (True, None, 8)]


def _evaluate() -> list[tuple[bool, Any, int]]:
    found = []
    for stage in ("validate", "test", "predict"):
        model = Classifier()
        trainer = quiet_trainer("ddp_hardthreshold", num_workers=2)
        outputs = getattr(trainer, stage)(model, data())
        found.append((trainer.strategy.model is model, trainer.strategy.state, len(outputs)))
    return found


def test_a_second_fit_calibrates_anew() -> None:
    for thresholds in run_workers(_calibrate_twice, 2, process_group=False):
        first, second = thresholds[:4], thresholds[4:]
        assert first[:2] == [0.0, 0.0]
        assert second[:2] == [0.0, 0.0]
        assert first[2] == first[3] > 0
        assert second[2] == second[3] > 0
        # The first fit has trained the model, so its gradients have another scale now.
        assert first[3] != second[3]


def _calibrate_twice() -> list[float | None]:
    model, recorder = Classifier(), Recorder()
    strategy = DDPHardThresholdStrategy(density=0.05, calibration_steps=2, density_control="calibrate")
    trainer = quiet_trainer(strategy, num_workers=2, callbacks=[recorder], max_steps=4)
    trainer.fit(model, data())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(model, data())
    return [step.threshold for step in recorder.steps]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_keeps_residuals_under_the_names_of_the_plain_one(backend: str) -> None:
    for run, own_gradients, is_compiled in run_workers(_train_compiled, 2, backend, process_group=False):
        assert is_compiled
        assert run.residuals.keys() == dict(Classifier().named_parameters()).keys()
        assert_nothing_was_sent(run, total(own_gradients), steps=3)
        assert run.callback_metrics["sparse/density"] == 0.0


def _train_compiled(backend: str) -> tuple[Run, list[dict[str, Tensor]], bool]:
    models: list[Classifier] = []
    compiled_graphs: list[bool] = []

    def make_model() -> Any:
        models.append(Classifier())
        return torch.compile(models[0], backend=partial(_compile, compiled_graphs, backend))

    # With tiny buckets torch's own DDP optimizer refuses to compile; Dynamo splits at the buckets of usual size.
    run = train(make_model, {"threshold": NOTHING_IS_SENT})
    untrained = Classifier()
    own_gradients = [gradients(untrained, partial(untrained.loss, batch)) for batch in models[0].batches]
    return run, own_gradients, bool(compiled_graphs)


def _compile(compiled_graphs: list[bool], backend: str, graph: Any, inputs: Any) -> Any:
    compiled_graphs.append(True)
    return torch._dynamo.lookup_backend(backend)(graph, inputs)


def test_local_clipping_bounds_each_workers_own_gradient() -> None:
    for run in train_workers(Classifier, frozen(local_clip_norm=0.5)):
        norms = [float(torch.cat(list(one.values())).norm()) for one in run.own_gradients]
        assert max(norms) > 0.5
        clipped = [min(1.0, 0.5 / norm) for norm in norms]
        assert_nothing_was_sent(run, total(run.own_gradients, clipped), steps=3)


def test_layer_thresholds_hold_for_the_layers_that_they_name() -> None:
    layer_thresholds = {"last.bias": NOTHING_IS_SENT, "*.bias": 0.0}
    for run in train_workers(Classifier, frozen(layer_thresholds=layer_thresholds)):
        moved = {name for name in run.weights if not torch.equal(run.weights[name], run.initial[name])}
        assert moved == {"first.bias", "middle.bias"}
        assert [step.selected for step in run.steps] == [2 * 80] * 3
        assert {name for name, residual in run.residuals.items() if residual.any()} == run.weights.keys() - moved


class ScheduledClassifier(Classifier):
    """Learning rates of the steps: 1, 0.5, 0.25, … for the first layer; the others stay at 0.5."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.first.parameters()), "lr": 1.0},
            {"params": [*self.middle.parameters(), *self.last.parameters()], "lr": 0.5},
        ]
        optimizer = torch.optim.SGD(groups)
        halve, stay = (lambda step: 0.5**step), (lambda step: 1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [halve, stay])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("error_feedback", ["gradient", "learning_rate"])
def test_residuals_follow_the_learning_rate_where_asked_to(error_feedback: str) -> None:
    for run in train_workers(ScheduledClassifier, frozen(error_feedback=error_feedback), {"max_steps": 4}):
        expected = total(run.own_gradients)
        if error_feedback == "learning_rate":
            # Each step multiplies the residual by lr_{t-1} / lr_t = 2.
            first_layer = total(run.own_gradients, [8.0, 4.0, 2.0, 1.0])
            expected |= {name: values for name, values in first_layer.items() if name.startswith("first")}
        assert_nothing_was_sent(run, expected, steps=4)


def test_calibration_finds_one_threshold_for_all_workers_and_says_so_once() -> None:
    results = run_workers(_calibrate, 2, process_group=False)
    runs = [run for run, _ in results]
    squared_norms = [
        sum(float(values.double().square().sum()) for values in run.own_gradients[step].values()) / 2
        for step in range(3)
        for run in runs
    ]
    # The formula of the design: λ = sqrt(E‖g‖² / (ρ d)); the weights stand still (lr 0), so all gradients are known.
    expected = (sum(squared_norms) / 3 / (0.05 * runs[0].steps[0].num_elements)) ** 0.5
    for run in runs:
        assert [step.threshold for step in run.steps[:3]] == [0.0] * 3
        assert [step.density for step in run.steps[:3]] == [1.0] * 3
        assert run.steps[3].threshold == pytest.approx(expected, rel=1e-5)
        assert run.steps[3].threshold == runs[0].steps[3].threshold == run.steps[-1].threshold
        assert 0 < run.steps[-1].density < 1
    assert [len(messages) for _, messages in results] == [1, 0]
    assert f"{expected:.6g}"[:5] in results[0][1][0]


def _calibrate() -> tuple[Run, list[str]]:
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "calibrated" in record.getMessage():
                messages.append(record.getMessage())

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).addHandler(Listener())
    make_model = partial(Classifier, partial(torch.optim.SGD, lr=0.0))
    options = {"density": 0.05, "calibration_steps": 3, "density_control": "calibrate"}
    run = train(make_model, options, {"max_steps": 6})
    return run, messages


def test_early_stopping_watches_the_density() -> None:
    for run in run_workers(_stop_early, 2, process_group=False):
        # Density is 1 throughout the two calibration steps, and below the stopping threshold from the third on.
        assert run.global_step == 3
        assert run.callback_metrics["sparse/density"] < 0.9


def _stop_early() -> Run:
    stopper = EarlyStopping("sparse/density", stopping_threshold=0.9, patience=100, check_on_train_epoch_end=True)
    strategy = {"density": 0.05, "calibration_steps": 2}
    return train(Classifier, strategy, {"callbacks": [stopper], "max_steps": 50, "limit_train_batches": 1})


def test_top_k_sends_k_coordinates_of_every_layer() -> None:
    runs = run_workers(_train_top_k, 2, process_group=False)
    # max(1, ⌊0.1 · size⌋) of 8·40, 40, 40·40, 40, 40·3 and 3.
    expected = 32 + 4 + 160 + 4 + 12 + 1
    for run in runs:
        assert run.comm_hooks == ["sparse_hook"]
        assert [step.selected for step in run.steps] == [2 * expected] * 3
        logged = {f"sparse/{name}" for name in ("density", "error_norm", "payload_bytes", "exchange_wait_ms")}
        assert {name for name in run.callback_metrics if name.startswith("sparse/")} == logged  # there is no threshold
        assert_same_bits(run.weights, runs[0].weights)


def _train_top_k() -> Run:
    return train(Classifier, SparseDDPStrategy(TopK(0.1), bucket_cap_mb=SMALL_BUCKETS_MB))
