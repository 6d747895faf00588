"""Every mode of Lightning that a training may use, each with something that a dense exchange would fail.

Most tests train under a threshold that nothing reaches. Then no weight may move, and every worker's residual must be
the sum of its own gradients, which is computed again here without DDP.
"""

import copy
import csv
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_sparse import DDPHardThresholdStrategy, SparseDDPStrategy, StepStats, TopK
from tests.integration.models import (
    NOTHING_IS_SENT,
    SMALL_BUCKETS_MB,
    Classifier,
    ClassifierWithUnusedLayer,
    ManualClassifier,
    Recorder,
    ScaledPrecision,
    TwoPlayers,
    TwoPlayersZeroingFirst,
    adam,
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
    num_buckets: int
    rebuilt_buckets: bool
    global_step: int
    callback_metrics: dict[str, float]
    largest_residuals: list[float]


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
        recorder.num_buckets,
        recorder.rebuilt_buckets,
        trainer.global_step,
        {name: value.item() for name, value in trainer.callback_metrics.items()},
        recorder.largest_residuals,
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
    "ddp_options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("make_model", [Classifier, ManualClassifier], ids=["automatic", "manual"])
def test_residuals_are_the_sum_of_the_workers_own_gradients(make_model: Any, ddp_options: dict[str, Any]) -> None:
    for run in train_workers(make_model, frozen(**ddp_options), {"max_steps": 4}):
        assert run.num_buckets > 1
        assert run.rebuilt_buckets == ("find_unused_parameters" not in ddp_options)
        assert_nothing_was_sent(run, total(run.own_gradients), steps=4)


def test_the_workers_gradients_differ_so_that_a_residual_is_local() -> None:
    one, other = train_workers(Classifier, frozen())
    assert not torch.equal(one.residuals["middle.weight"], other.residuals["middle.weight"])
    squares = [float(values.double().square().sum()) for run in (one, other) for values in run.residuals.values()]
    assert one.steps[-1].squared_error == pytest.approx(sum(squares) / 2, rel=1e-6)
    assert one.steps == other.steps


@pytest.mark.parametrize(
    ("make_model", "make_optimizer", "options"),
    [
        (Classifier, adam, {"exchange": "auto"}),
        (Classifier, adam, {"exchange": "gather"}),
        (Classifier, adam, {"exchange": "dense"}),
        (Classifier, nesterov, {"exchange": "gather"}),
        (Classifier, adam, {"static_graph": True}),
        (Classifier, adam, {"gradient_as_bucket_view": True}),
        (Classifier, adam, {"find_unused_parameters": True}),
        (ManualClassifier, adam, {}),
        (ManualClassifier, adam, {"static_graph": True}),
    ],
)
def test_threshold_zero_trains_as_stock_ddp_does(make_model: Any, make_optimizer: Any, options: dict[str, Any]) -> None:
    if make_model is ManualClassifier and "static_graph" in options and "post_backward" not in vars(DDPStrategy):
        pytest.skip("This Lightning's own DDPStrategy does not exchange here (pull request 21251, September 2025)")
    make = partial(make_model, make_optimizer)
    sparse, dense = run_workers(_train_sparse_and_dense, 2, make, options, process_group=False)[0]
    assert sparse.comm_hooks == ["sparse_hook"]
    assert dense.comm_hooks == [None]
    assert sparse.num_buckets == dense.num_buckets > 1
    assert sparse.rebuilt_buckets == ("find_unused_parameters" not in options)
    assert [step.density for step in sparse.steps] == [1.0] * 20
    assert not torch.equal(sparse.weights["middle.weight"], sparse.initial["middle.weight"])
    # Stock DDP divides by n before it adds, the sparse exchange after: equal up to the rounding of one sum a step.
    assert_close(sparse.weights, dense.weights, rtol=1e-5, atol=1e-6)


def _train_sparse_and_dense(make_model: Any, options: dict[str, Any]) -> tuple[Run, Run]:
    steps = {"max_steps": 20, "limit_train_batches": 8}
    sparse = train(make_model, {"threshold": 0.0, "bucket_cap_mb": SMALL_BUCKETS_MB, **options}, steps)
    ddp_options = {name: value for name, value in options.items() if name != "exchange"}
    return sparse, train(make_model, _stock_ddp(**ddp_options), steps)


def _stock_ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **options)


@pytest.mark.parametrize(
    ("make_optimizer", "exchange"), [(adam, "gather"), (adam, "dense"), (nesterov, "auto"), (nesterov, "gather")]
)
def test_replicas_are_equal_to_the_last_bit(make_optimizer: Any, exchange: str) -> None:
    strategy = {"threshold": 0.1, "exchange": exchange, "bucket_cap_mb": SMALL_BUCKETS_MB}
    runs = train_workers(partial(Classifier, make_optimizer), strategy, {"max_steps": 16}, num_workers=3)
    for run in runs:
        assert run.num_buckets > 1
        assert 0 < run.steps[-1].density < 1
        assert_same_bits(run.weights, runs[0].weights)
    assert not torch.equal(runs[0].residuals["middle.weight"], runs[1].residuals["middle.weight"])


def test_gather_and_dense_exchange_the_same_selection() -> None:
    strategy = {"threshold": 0.1, "bucket_cap_mb": SMALL_BUCKETS_MB}
    gathered, dense = (train_workers(Classifier, {**strategy, "exchange": mode})[0] for mode in ("gather", "dense"))
    assert [step.selected for step in gathered.steps] == [step.selected for step in dense.steps]
    assert_close(gathered.weights, dense.weights)
    assert gathered.steps[-1].payload_bytes < dense.steps[-1].payload_bytes


def test_auto_goes_dense_without_a_history_and_gathers_when_little_is_sent() -> None:
    run = train_workers(Classifier, frozen())[0]
    first, last = run.steps[0], run.steps[-1]
    assert first.payload_bytes > first.dense_bytes
    assert last.payload_bytes < last.dense_bytes / 10


@pytest.mark.parametrize("ddp_options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "bucket_view"])
def test_gradient_accumulation_exchanges_the_accumulated_gradient_once_a_step(ddp_options: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 2, "max_steps": 3}
    for run in train_workers(Classifier, frozen(**ddp_options), options):
        assert len(run.own_gradients) == 6
        # Lightning divides each loss by the number of accumulated batches.
        assert_nothing_was_sent(run, total(run.own_gradients, [0.5] * 6), steps=3)


class ManualAccumulation(ManualClassifier):
    """Steps after every second batch; the first of the two is exchanged too, as under plain DDP."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batches.append(batch)
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_manual_accumulation_loses_nothing() -> None:
    runs = train_workers(ManualAccumulation, {"threshold": 0.3, "exchange": "gather"}, {"max_steps": 1})
    # (1/n) Σ_i (sent + kept) = (1/n) Σ_i gradients; under SGD with learning rate 1 the weights show what was sent.
    kept = total([run.residuals for run in runs], [0.5, 0.5])
    gradient = total([one for run in runs for one in run.own_gradients], [0.5] * 4)
    sent = {name: (runs[0].initial[name] - weight).flatten() for name, weight in runs[0].weights.items()}
    assert len(runs[0].steps) == 2
    assert 0 < runs[0].steps[-1].density < 1
    assert_close({name: sent[name].double() + kept[name] for name in sent}, gradient)


def test_what_is_sent_and_what_is_kept_add_up_to_the_gradient() -> None:
    runs = train_workers(Classifier, {"threshold": 0.05}, {"max_steps": 1})
    sent = {name: (runs[0].initial[name] - weight).flatten() for name, weight in runs[0].weights.items()}
    kept = total([run.residuals for run in runs], [0.5, 0.5])
    gradient = total([run.own_gradients[0] for run in runs], [0.5, 0.5])
    assert 0 < runs[0].steps[0].density < 1
    assert_close({name: sent[name].double() + kept[name] for name in sent}, gradient)


def test_no_residual_reaches_the_threshold() -> None:
    for run in train_workers(Classifier, {"threshold": 0.05, "bucket_cap_mb": SMALL_BUCKETS_MB}, {"max_steps": 10}):
        assert len(run.largest_residuals) == 10
        assert 0 < max(run.largest_residuals) < 0.05


def test_two_optimizers_in_turn_keep_every_residual() -> None:
    runs = run_workers(_train_two_players, 2, process_group=False)
    for run, expected in runs:
        assert run.comm_hooks == ["sparse_hook"]
        # Two backward passes a batch, each of which exchanges everything.
        assert (run.global_step, len(run.steps)) == (6, 6)
        assert_same_bits(run.weights, run.initial)
        assert_close(run.residuals, expected)
        assert min(values.norm().item() for values in run.residuals.values()) > 0.001


def _train_two_players() -> tuple[Run, dict[str, Tensor]]:
    models: list[TwoPlayers] = []

    def make_model() -> TwoPlayers:
        models.append(TwoPlayers())
        return models[0]

    run = train(make_model, frozen(find_unused_parameters=True), {"max_steps": 6})
    untrained = TwoPlayers()
    parts: list[dict[str, Tensor]] = []
    for inputs, _ in models[0].batches:
        for player, loss in (("generator.", untrained.generator_loss), ("judge.", untrained.judge_loss)):
            found = gradients(untrained, partial(loss, inputs))
            parts.append({name: values if name.startswith(player) else 0 * values for name, values in found.items()})
    return run, total(parts)


@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_a_gradient_left_over_from_the_other_optimizers_turn_is_not_exchanged_again(threshold: float) -> None:
    # DDP puts the old gradient of a parameter that this backward does not use into the bucket, and ignores what comes
    # back for it. In the residual it would be counted twice.
    for zeroed_after, zeroed_before in run_workers(_train_two_players_twice, 2, threshold, process_group=False):
        assert zeroed_after.steps[-1].selected > 0
        assert_close(zeroed_before.residuals, zeroed_after.residuals)
        assert_close(zeroed_before.weights, zeroed_after.weights)


def _train_two_players_twice(threshold: float) -> tuple[Run, Run]:
    strategy = {"threshold": threshold, "find_unused_parameters": True}
    options = {"max_steps": 8}
    return train(TwoPlayers, strategy, options), train(TwoPlayersZeroingFirst, strategy, options)


def test_two_optimizers_in_turn_train_as_under_stock_ddp_with_threshold_zero() -> None:
    for sparse, dense in run_workers(_train_two_players_densely, 2, process_group=False):
        assert sparse.comm_hooks == ["sparse_hook"]
        assert_close(sparse.weights, dense.weights)
        assert not torch.equal(sparse.weights["judge.0.weight"], sparse.initial["judge.0.weight"])


def _train_two_players_densely() -> tuple[Run, Run]:
    options = {"max_steps": 12}
    sparse = train(TwoPlayers, {"threshold": 0.0, "find_unused_parameters": True}, options)
    return sparse, train(TwoPlayers, "ddp_find_unused_parameters_true", options)


@pytest.mark.parametrize("threshold", [NOTHING_IS_SENT, 0.4])
def test_a_layer_that_no_worker_uses_keeps_its_residual(threshold: float) -> None:
    for run, first_gradient in run_workers(_train_with_unused_layer, 2, threshold, process_group=False):
        kept = {name: values for name, values in run.residuals.items() if name.startswith("sometimes")}
        expected = {name: first_gradient[name] for name in kept}
        assert len(kept) == 2
        # Only the first step used the layer; the other five must neither send nor lose what that step left.
        assert 0.01 < expected["sometimes.weight"].abs().max() < threshold
        assert_close(kept, expected)
        assert [step.num_elements for step in run.steps] == [sum(w.numel() for w in run.weights.values())] * 6
        assert (sum(step.selected for step in run.steps) > 0) == (threshold < 1)


def _train_with_unused_layer(threshold: float) -> tuple[Run, dict[str, Tensor]]:
    models: list[ClassifierWithUnusedLayer] = []

    def make_model() -> ClassifierWithUnusedLayer:
        models.append(ClassifierWithUnusedLayer())
        return models[0]

    run = train(make_model, frozen(threshold=threshold, find_unused_parameters=True), {"max_steps": 6})
    untrained = ClassifierWithUnusedLayer()
    return run, gradients(untrained, partial(untrained.first_loss, models[0].batches[0]))


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
    return sparse, train(make_model, _stock_ddp(), options)


def test_a_loss_scale_is_not_in_the_residuals() -> None:
    for scaled, unscaled, scale in run_workers(_train_with_loss_scale, 2, process_group=False):
        assert scale == 1024.0
        # Selected by the magnitude of the unscaled gradient, and the optimizer gets what it would get without a scale.
        assert [step.selected for step in scaled.steps] == [step.selected for step in unscaled.steps]
        assert 0 < scaled.steps[-1].density < 1
        assert_close(scaled.residuals, unscaled.residuals)
        assert_close(scaled.weights, unscaled.weights)


def _train_with_loss_scale() -> tuple[Run, Run, float]:
    # On a CPU Lightning turns 16-mixed into bf16-mixed; a plugin with a scaler of its own keeps the scale. A power of
    # two, so that scaling by itself rounds nothing.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = ScaledPrecision("16-mixed", "cpu", scaler=scaler)
    scaled = train(Classifier, {"threshold": 0.05}, {"plugins": [plugin]})
    return scaled, train(Classifier, {"threshold": 0.05}), scaler.get_scale()


@pytest.mark.parametrize("options", [{}, {"value_dtype": "float8"}, {"error_feedback": "none"}])
def test_a_single_worker_holds_nothing_back(options: dict[str, Any]) -> None:
    [run] = train_workers(Classifier, {"threshold": 0.05, **options}, {"max_steps": 1}, num_workers=1)
    sent = {name: (run.initial[name] - weight).flatten() for name, weight in run.weights.items()}
    assert run.steps[0].density == 1
    assert_close(sent, run.own_gradients[0])
    for values in run.residuals.values():
        assert not values.any()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_needs_no_hook(stage: str) -> None:
    for is_module, state, num_outputs in run_workers(_evaluate, 2, stage, process_group=False):
        assert is_module
        assert state is None
        assert num_outputs == 8 if stage == "predict" else num_outputs == 1


def _evaluate(stage: str) -> tuple[bool, Any, int]:
    model = Classifier()
    trainer = quiet_trainer("ddp_hardthreshold", num_workers=2)
    outputs = getattr(trainer, stage)(model, data())
    return trainer.strategy.model is model, trainer.strategy.state, len(outputs)


def test_validation_during_fit_exchanges_nothing() -> None:
    for num_steps, metrics in run_workers(_fit_with_validation, 2, process_group=False):
        assert num_steps == 4
        assert {"val_loss", "sparse/density"} <= metrics


def _fit_with_validation() -> tuple[int, set[str]]:
    recorder = Recorder()
    trainer = quiet_trainer("ddp_hardthreshold", num_workers=2, callbacks=[recorder], max_steps=4, val_check_interval=2)
    trainer.fit(Classifier(), data(), data(16))
    return len(recorder.steps), set(trainer.callback_metrics)


@pytest.mark.parametrize("static_graph", [False, True], ids=["plain", "static_graph"])
@pytest.mark.parametrize("make_model", [Classifier, ManualClassifier], ids=["automatic", "manual"])
def test_a_second_fit_has_the_hook_and_begins_with_empty_residuals(make_model: Any, static_graph: bool) -> None:
    for recorder, second, gradients_of_second, different_states in run_workers(
        _fit_twice, 2, make_model, static_graph, process_group=False
    ):
        assert different_states
        assert recorder.comm_hooks == ["sparse_hook", "sparse_hook"]
        assert [step.step for step in recorder.steps] == [0, 1, 2, 0, 1, 2]
        assert_close(second, total(gradients_of_second))


def _fit_twice(make_model: Any, static_graph: bool) -> tuple[Any, ...]:
    model, recorder = make_model(), Recorder()
    strategy = DDPHardThresholdStrategy(**frozen(static_graph=static_graph))
    trainer = quiet_trainer(strategy, num_workers=2, callbacks=[recorder])
    trainer.fit(model, data())
    first_state = strategy.state
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(model, data())
    untrained = Classifier()
    own_gradients = [gradients(untrained, partial(untrained.loss, batch)) for batch in model.batches[3:]]
    return recorder, recorder.residuals, own_gradients, strategy.state is not first_state


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


def test_local_clipping_leaves_a_small_gradient_alone() -> None:
    for run in train_workers(Classifier, frozen(local_clip_norm=1e3)):
        assert_nothing_was_sent(run, total(run.own_gradients), steps=3)


def test_the_trainers_clipping_acts_after_the_exchange() -> None:
    strategy = frozen(layer_thresholds={"last.*": 0.0})
    options = {"gradient_clip_val": 0.01, "max_steps": 1}
    for run in train_workers(Classifier, strategy, options):
        moved = torch.cat([(run.initial[name] - run.weights[name]).flatten() for name in ("last.weight", "last.bias")])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
        # What was kept was never clipped.
        expected = {name: values for name, values in run.own_gradients[0].items() if not name.startswith("last")}
        assert torch.cat(list(expected.values())).norm() > 0.1
        assert_close({name: run.residuals[name] for name in expected}, expected)


def test_layer_thresholds_hold_for_the_layers_that_they_name() -> None:
    layer_thresholds = {"last.bias": NOTHING_IS_SENT, "*.bias": 0.0}
    for run in train_workers(Classifier, frozen(layer_thresholds=layer_thresholds)):
        moved = {name for name in run.weights if not torch.equal(run.weights[name], run.initial[name])}
        assert moved == {"first.bias", "middle.bias"}
        assert [step.selected for step in run.steps] == [2 * 80] * 3
        assert {name for name, residual in run.residuals.items() if residual.any()} == run.weights.keys() - moved


def test_no_error_feedback_forgets_what_was_not_sent() -> None:
    for run in train_workers(Classifier, frozen(error_feedback="none")):
        assert run.comm_hooks == ["sparse_hook"]
        assert_same_bits(run.weights, run.initial)
        assert not any(residual.any() for residual in run.residuals.values())
        assert [step.error_norm for step in run.steps] == [0.0] * 3


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


@pytest.mark.parametrize("exchange", ["gather", "dense"])
def test_values_sent_in_bfloat16_leave_their_rounding_behind(exchange: str) -> None:
    strategy = {"threshold": 0.0, "value_dtype": "bfloat16", "exchange": exchange}
    runs = train_workers(Classifier, strategy, {"max_steps": 1})
    for run in runs:
        gradient = run.own_gradients[0]
        assert_close(run.residuals, {name: one - one.bfloat16().float() for name, one in gradient.items()}, atol=1e-8)
        assert run.steps[0].error_norm > 0
    expected = total([{name: one.bfloat16() for name, one in run.own_gradients[0].items()} for run in runs], [0.5, 0.5])
    sent = {name: (runs[0].initial[name] - weight).flatten() for name, weight in runs[0].weights.items()}
    assert_close(sent, expected)


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


SCALARS = {
    "sparse/density",
    "sparse/error_norm",
    "sparse/threshold",
    "sparse/payload_bytes",
    "sparse/exchange_wait_ms",
}


@pytest.mark.parametrize(
    ("make_model", "accumulate", "static_graph"),
    [
        (Classifier, 1, False),
        (Classifier, 2, False),
        (ManualClassifier, 1, False),
        (Classifier, 1, True),
        (ManualClassifier, 1, True),
    ],
    ids=["automatic", "accumulated", "manual", "static_graph", "manual+static_graph"],
)
def test_four_scalars_are_logged_once_per_optimizer_step(
    make_model: Any, accumulate: int, static_graph: bool, tmp_path: Path
) -> None:
    runs = run_workers(_log_to_csv, 2, make_model, accumulate, static_graph, str(tmp_path), process_group=False)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("sparse/density")]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    for run in runs:
        assert run.callback_metrics.keys() >= SCALARS
        for row, step in zip(rows, run.steps, strict=True):
            assert float(row["sparse/density"]) == pytest.approx(step.density, rel=1e-5)
            assert float(row["sparse/error_norm"]) == pytest.approx(step.error_norm, rel=1e-5)
            assert float(row["sparse/threshold"]) == pytest.approx(0.1)
            assert float(row["sparse/payload_bytes"]) == step.payload_bytes
        assert run.callback_metrics["sparse/density"] == pytest.approx(run.steps[-1].density, rel=1e-5)
        assert run.callback_metrics["sparse/payload_bytes"] == run.steps[-1].payload_bytes


def _log_to_csv(make_model: Any, accumulate: int, static_graph: bool, folder: str) -> Run:
    options = {
        "logger": CSVLogger(folder, flush_logs_every_n_steps=1),
        "log_every_n_steps": 1,
        "accumulate_grad_batches": accumulate,
        "max_steps": 4,
    }
    return train(make_model, {"threshold": 0.1, "static_graph": static_graph}, options)


def test_top_k_sends_k_coordinates_of_every_layer() -> None:
    runs = run_workers(_train_top_k, 2, process_group=False)
    # max(1, ⌊0.1 · size⌋) of 8·40, 40, 40·40, 40, 40·3 and 3.
    expected = 32 + 4 + 160 + 4 + 12 + 1
    for run in runs:
        assert run.comm_hooks == ["sparse_hook"]
        assert [step.selected for step in run.steps] == [2 * expected] * 3
        assert "sparse/threshold" not in run.callback_metrics
        assert SCALARS - {"sparse/threshold"} <= run.callback_metrics.keys()
        assert_same_bits(run.weights, runs[0].weights)


def _train_top_k() -> Run:
    return train(Classifier, SparseDDPStrategy(TopK(0.1), bucket_cap_mb=SMALL_BUCKETS_MB))
