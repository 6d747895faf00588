"""Precisions, options and logs of the strategy; ``tests/integration/programs`` has the modes of a Trainer."""

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    SparseDDPStrategy,
    SparseLocalStrategy,
    TopK,
)
from tests.integration.models import (
    NOTHING_IS_SENT,
    SMALL_BUCKETS_MB,
    Classifier,
    ManualClassifier,
    Recorder,
    adam,
    assert_equal,
    clones,
    compiled,
    data,
    gradients,
    messages_of,
    nesterov,
    quiet_trainer,
    search_restriction,
)
from tests.workers import on_workers


def train(model: Any, strategy: Any, **options: Any) -> dict[str, Any]:
    """Train in every worker; a dict gives the arguments of a strategy."""
    recorder = Recorder()
    if isinstance(strategy, dict):
        strategy = DDPHardThresholdStrategy(**{"bucket_cap_mb": SMALL_BUCKETS_MB} | strategy)
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = quiet_trainer(strategy, callbacks=callbacks, **options)
    trainer.fit(model, data())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    seen = {
        name: getattr(recorder, name) for name in ("comm_hooks", "views", "initial", "weights", "residuals", "steps")
    }
    return seen | {"global_step": trainer.global_step, "metrics": metrics}


FROZEN: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
    "bf16-true": {"trainer": {"precision": "bf16-true"}, "dtype": torch.bfloat16, "tolerance": 1e-6},
    "64-true": {"trainer": {"precision": "64-true"}, "dtype": torch.float64, "tolerance": 1e-12},
    "compiled": {"backend": "eager"},
    "compiled ahead of time": {"backend": "aot_eager"},
}


@pytest.mark.parametrize("name", FROZEN)
@on_workers(2, process_group=False)
def test_residuals_equal_the_sum_of_each_workers_gradients(name: str) -> None:
    case = FROZEN[name]
    model, options, strategy = Classifier(), case.get("trainer", {}), {"threshold": NOTHING_IS_SENT}
    graphs: list[int] = []
    if "backend" in case:
        # With tiny buckets torch's own DDP optimizer refuses to compile; Dynamo splits at the buckets of usual size.
        run = train(compiled(model, graphs, case["backend"]), strategy | {"bucket_cap_mb": 25}, max_steps=4)
        assert graphs
    else:
        run = train(model, strategy, max_steps=4, **options)
    untrained = Classifier().to(case.get("dtype", torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=options.get("precision") == "bf16-mixed"):
        own = [gradients(untrained, partial(untrained.loss, batch)) for batch in model.batches]
    expected = {layer: sum(gradient[layer].double() for gradient in own) for layer in own[0]}
    assert (run["comm_hooks"], run["views"]) == (["sparse_hook"], [True])
    assert run["global_step"] == 4
    assert [step.selected for step in run["steps"]] == [0] * 4
    assert run["metrics"]["sparse/density"] == 0.0
    assert_equal(run["weights"], run["initial"])
    dtype = case.get("dtype", torch.float32)
    assert {weight.dtype for weight in run["weights"].values()} == {dtype}
    residual_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    assert {residual.dtype for residual in run["residuals"].values()} == {residual_dtype}
    assert any(values.abs().max() > 0.01 for values in expected.values())  # an oracle of zeros proves nothing
    tolerance = case.get("tolerance", 1e-5)
    residuals = {layer: residual.double() for layer, residual in run["residuals"].items()}
    torch.testing.assert_close(residuals, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "options"),
    [(Classifier, {"find_unused_parameters": True}), (Classifier, {"static_graph": True}), (ManualClassifier, {})],
)
@on_workers(2, process_group=False)
def test_gradients_are_no_views_of_buckets_where_a_backward_would_overwrite_them(make: Any, options: Any) -> None:
    assert train(make(), {"threshold": 0.1} | options, max_steps=1)["views"] == [False]


class LargeClassifier(Classifier):
    """Has four further parameters of the given size."""

    def __init__(self, num_elements: int) -> None:
        super().__init__(nesterov)
        self.others = torch.nn.ParameterList(torch.zeros(num_elements) for _ in range(4))

    def training_step(self, *batch: Any) -> Any:
        return super().training_step(*batch) + sum(parameter.sum() for parameter in self.others)


@pytest.mark.parametrize(
    ("num_elements", "bucket_cap_mb", "expected"), [(2**17, None, 1), (2**17, 0.4, 5), (2**18 + 1, None, 2)]
)
@on_workers(2, process_group=False)
def test_a_small_model_has_one_bucket(num_elements: int, bucket_cap_mb: float | None, expected: int) -> None:
    strategy = DDPHardThresholdStrategy(threshold=0.1, bucket_cap_mb=bucket_cap_mb)
    quiet_trainer(strategy, max_steps=3).fit(LargeClassifier(num_elements), data())
    assert len(strategy.state.snapshot().numbers["layout"]) == expected


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@on_workers(2, process_group=False)
def test_threshold_zero_equals_stock_ddp_in_every_precision(precision: str) -> None:
    options = {"precision": precision, "max_steps": 5}
    sparse = train(Classifier(nesterov), {"threshold": 0.0}, **options)
    dense = train(Classifier(nesterov), DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), **options)
    assert (sparse["comm_hooks"], dense["comm_hooks"]) == (["sparse_hook"], [None])
    # For bfloat16 gradients, stock DDP adds in bfloat16 and the sparse exchange in float32.
    tolerance = 0.03 if precision == "bf16-true" else 1e-6
    torch.testing.assert_close(sparse["weights"], dense["weights"], rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="no EMAWeightAveraging in this Lightning")
@on_workers(2, process_group=False)
def test_a_moving_average_of_weights_equals_that_of_stock_ddp() -> None:
    averages = []
    for strategy in ({"threshold": 0.0}, DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)):
        model = Classifier(nesterov)
        trained = train(model, strategy, max_steps=5, callbacks=[callbacks.EMAWeightAveraging(decay=0.5)])
        averages.append(clones(model.named_parameters()))
        assert not torch.equal(averages[-1]["first.weight"], trained["weights"]["first.weight"])
    torch.testing.assert_close(*averages, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DDPHardThresholdStrategy, {}),
        (DDPHardThresholdStrategy, {"value_dtype": "float8"}),
        (LocalHardThresholdStrategy, {}),
        (LocalHardThresholdStrategy, {"keep_drift": False}),
        (LocalHardThresholdStrategy, {"every_n_steps": 3, "value_dtype": "float8"}),
    ],
)
@on_workers(1, process_group=False)
def test_a_single_worker_sends_everything(make: Any, options: dict[str, Any]) -> None:
    models, strategy = [Classifier(adam), Classifier(adam)], make(threshold=100.0, **options)
    for model, chosen in zip(models, (strategy, "ddp"), strict=True):
        quiet_trainer(chosen, max_steps=6).fit(model, data())
    torch.testing.assert_close(*(clones(model.named_parameters()) for model in models))
    assert (strategy.state.last_step.density, strategy.state.last_step.squared_error) == (1, 0)


class BackwardInValidation(ManualClassifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.manual_backward(self.loss(batch))


@on_workers(2, process_group=False)
def test_evaluation_needs_no_hook() -> None:
    for stage, num_outputs in (("validate", 1), ("test", 1), ("predict", 8)):
        model, trainer = BackwardInValidation(), quiet_trainer("ddp_hardthreshold", inference_mode=False)
        outputs = getattr(trainer, stage)(model, data())
        assert trainer.strategy.model is model
        assert trainer.strategy.state is None
        assert len(outputs) == num_outputs
        assert all((parameter.grad is not None) == (stage == "validate") for parameter in model.parameters())


class WithUnusedLayer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


@on_workers(2, process_group=False)
def test_an_unused_layer_causes_advice_that_keeps_the_strategy() -> None:
    with pytest.raises(RuntimeError, match=r"set find_unused_parameters=True: strategy=DDPHardThresholdStrategy\("):
        quiet_trainer("ddp_hardthreshold").fit(WithUnusedLayer(), data())


@on_workers(2, process_group=False)
def test_a_second_fit_calibrates_anew() -> None:
    model, recorder = Classifier(), Recorder()
    strategy = DDPHardThresholdStrategy(density=0.05)
    trainer = quiet_trainer(strategy, callbacks=[recorder], max_steps=4)
    trainer.fit(model, data())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(model, data())
    thresholds = [step.threshold for step in recorder.steps]
    first, second = thresholds[:4], thresholds[4:]
    for of_fit in (first, second):
        assert of_fit[0] == 0.0
        assert of_fit[1] > 0
    # The first fit has trained the model, which changes the scale of its gradients.
    assert first[1] != second[1]


@pytest.mark.parametrize("kind", ["ddp_hardthreshold", "local_hardthreshold"])
@on_workers(1, process_group=False)
def test_a_copy_of_a_trainer_can_fit(kind: str) -> None:
    copies: list[Any] = []
    trainer = quiet_trainer(
        kind, callbacks=[LambdaCallback(on_train_batch_end=lambda trainer, *_: copies.append(copy.deepcopy(trainer)))]
    )
    trainer.fit(Classifier(), data())
    for copied in (copies[0], copy.deepcopy(trainer)):
        assert copied.strategy.state is None
        copied.fit_loop.epoch_loop.max_steps = 6
        copied.fit(Classifier(), data())
        assert copied.global_step == 6


@on_workers(2, process_group=False)
def test_rank_0_logs_the_calibrated_threshold_once() -> None:
    messages: list[str] = []
    with messages_of(messages):
        steps = train(Classifier(), {"density": 0.05}, max_steps=6)["steps"]
    calibrated = [message for message in messages if "calibrated" in message]
    assert len(calibrated) == (dist.get_rank() == 0)
    assert all(f"{steps[1].threshold:.6g}"[:5] in message for message in calibrated)


# Sparsifiers receive epochs and learning rates.

OF_EPOCHS = {"ddp": SparseDDPStrategy, "local": SparseLocalStrategy}
DENSITIES = (0.05, 0.3)


class SlowingDown(Classifier):
    """Has two groups of parameters; the learning rate of one falls in epoch 3."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": others, "lr": 0.05}])
        falls = [lambda epoch: 1.0, lambda epoch: 0.5 if epoch >= 3 else 1.0]
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, falls)]


MAY_SEARCH = pytest.mark.skipif(search_restriction() is not None, reason=str(search_restriction()))


@pytest.mark.parametrize("searches", [False, pytest.param(True, marks=MAY_SEARCH)])
@pytest.mark.parametrize("kind", OF_EPOCHS)
@on_workers(2, process_group=False)
def test_accordion_is_dense_at_first_and_after_the_learning_rate_falls(kind: str, searches: bool) -> None:
    densities: list[list[float]] = []
    epochs = LambdaCallback(
        on_train_epoch_start=lambda *_: densities.append([]),
        on_train_batch_end=lambda trainer, *_: densities[-1].append(trainer.strategy.state.last_step.density),
    )
    # No change is this large, so layers are stable from the second comparison until the learning rate falls.
    strategy = OF_EPOCHS[kind](Accordion(*DENSITIES, interval=1, relative_change=1e9))
    searching = [LearningRateFinder(num_training_steps=6)] if searches else []
    trainer = quiet_trainer(strategy, max_steps=-1, max_epochs=6, callbacks=[*searching, epochs])
    trainer.fit(SlowingDown(), data(32))
    assert [len(of_epoch) for of_epoch in densities[-6:]] == [4] * 6
    is_high = [[density > sum(DENSITIES) / 2 for density in of_epoch] for of_epoch in densities[-6:]]
    assert is_high == [[expected] * 4 for expected in (True, True, False, True, False, False)]


class NeverSteps(ManualClassifier):
    """Has two optimizers; a group of the second has no learning rate."""

    def configure_optimizers(self) -> Any:
        first, second, *others = self.parameters()
        optimizers = torch.optim.SGD([first], torch.tensor(0.5)), torch.optim.SGD([second], 2)
        optimizers[1].param_groups.append({"params": others})
        return optimizers

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass


@on_workers(2, process_group=False)
def test_begin_epoch_gets_the_rates_of_all_groups_of_all_optimizers() -> None:
    with mock.patch.object(TopK, "begin_epoch") as begin_epoch:
        quiet_trainer(SparseDDPStrategy(TopK()), max_steps=-1, max_epochs=2).fit(NeverSteps(), data())
    assert begin_epoch.call_args_list == [mock.call(0, [0.5, 2.0]), mock.call(1, [0.5, 2.0])]
