"""The monitors: numbers, tables and pictures, without any collective."""

import io
import re
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_sparse import (
    DDPHardThresholdStrategy,
    DensityMonitor,
    ErrorMonitor,
    LayerLayout,
    LocalHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    StepStats,
    TopK,
)
from lightning_sparse.callbacks.error_monitor import _add_histograms
from lightning_sparse.engine.step_stats import LayerStats
from lightning_sparse.selection.bucket import FlatBucket, Residual
from tests.integration.checkpoints.test_checkpoint import ResumableData, SaveAt
from tests.integration.logs.test_step_log import columns, density_of
from tests.integration.models import SMALL_BUCKETS_MB, Classifier, data, messages_of, quiet_trainer
from tests.workers import on_workers, run_workers

THRESHOLD = 0.15
SENDS_NONE = 1000.0  # so that no payload exceeds its capacity and needs a second round
NUM_ELEMENTS = sum(parameter.numel() for parameter in Classifier().parameters())
SIZES = {name: parameter.numel() for name, parameter in Classifier().named_parameters()}


@dataclass
class Watched:
    """The record of a training with monitors on a worker."""

    steps: list[StepStats]
    callback_metrics: dict[str, float]
    printed: str
    messages: list[str]


def watch(callbacks: list[Callback], *, num_workers: int = 2, **options: Any) -> list[Watched]:
    """Train and return each worker's record; by default six steps with a hard threshold and fixed weights."""
    watched = partial(_watch, callbacks, num_workers=num_workers, **options)
    return run_workers(watched, num_workers, process_group=False)


def _watch(callbacks: list[Callback], *, strategy: Any = None, ckpt_path: str | None = None, **options: Any) -> Watched:
    strategy = strategy or DDPHardThresholdStrategy(threshold=THRESHOLD, bucket_cap_mb=SMALL_BUCKETS_MB)
    options = {"max_steps": 6, "log_every_n_steps": 1, **options}
    steps, messages, printed = [], [], io.StringIO()

    def subscribe(trainer: Trainer, _: LightningModule) -> None:
        if isinstance(trainer.strategy, SparseDDPStrategy | LocalHardThresholdStrategy):
            trainer.strategy.state.subscribe(steps.append)

    callbacks = [LambdaCallback(on_fit_start=subscribe), *callbacks]
    trainer = quiet_trainer(strategy, callbacks=callbacks, **options)
    with redirect_stdout(printed), messages_of(messages), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*barebones.*configured")
        trainer.fit(Classifier(partial(torch.optim.SGD, lr=0.0)), data(), ckpt_path=ckpt_path)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return Watched(steps, metrics, printed.getvalue(), messages)


def test_tensorboard_shows_averages_totals_and_layers(tmp_path: Path) -> None:
    monitors = [DensityMonitor(), ErrorMonitor(per_layer=True, histograms_every_n_steps=4)]
    workers = watch(monitors, logger=TensorBoardLogger(str(tmp_path)))
    steps = workers[0].steps
    rows = [columns([step], steps[: number + 1]) for number, step in enumerate(steps)]
    for worker in workers:
        for tag in ("sparse/average_density", "sparse/total_error"):
            assert worker.callback_metrics[tag] == pytest.approx(rows[-1][tag], rel=1e-5)
    # In a separate process, because reading event files warns about protobuf.
    run_workers(_check_events, 1, str(tmp_path), steps, rows, process_group=False)


def _events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = Path(folder).rglob("events.out.tfevents.*")  # from the first worker only
    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    return events.Reload()


def _check_events(folder: str, steps: list[StepStats], rows: list[dict[str, float]]) -> None:
    events = _events(folder)
    tags = events.Tags()
    # Scalars per layer are for other loggers; in TensorBoard they hide everything else.
    assert not any(tag.startswith("sparse/layer_density") for tag in tags["scalars"])
    for tag in [tag for tag in rows[0] if not tag.startswith("sparse/layer_density")]:
        points = events.Scalars(tag)
        assert [point.step for point in points] == list(range(6)), tag
        assert [point.value for point in points] == pytest.approx([row[tag] for row in rows], rel=1e-5, abs=1e-7), tag
    for tag in ("sparse/median_step_ms", "sparse/median_wait_ms"):
        assert len(events.Scalars(tag)) == 1  # at the end
    for point, step in zip(events.Histograms("sparse/layer_density"), steps, strict=True):
        assert (point.step, point.histogram_value.num) == (step.step, len(SIZES))
        densities = [layer.density for layer in step.layers.values()]
        assert point.histogram_value.sum == pytest.approx(sum(densities), rel=1e-5)
    for name, size in SIZES.items():
        of_kinds = [events.Histograms(f"sparse/{kind}/{name}") for kind in ("compensated", "residual", "gradient")]
        assert [[(point.step, point.histogram_value.num) for point in kind] for kind in of_kinds] == [
            [(0, size), (4, size)]
        ] * 3
        for whole, residual, gradient in zip(*of_kinds, strict=True):
            parts = residual.histogram_value.sum + gradient.histogram_value.sum
            assert whole.histogram_value.sum == pytest.approx(parts, abs=1e-5)
            assert (residual.histogram_value.sum_squares > 0) == (residual.step > 0)
            assert gradient.histogram_value.sum_squares > 0
    assert tags["images"] == ["sparse/log10_layer_density"]
    [image] = events.Images("sparse/log10_layer_density")
    assert image.width > 500
    assert image.height > 100


def test_short_epochs_redraw_the_image_only_at_the_end(tmp_path: Path) -> None:
    watch([DensityMonitor()], logger=TensorBoardLogger(str(tmp_path)), limit_train_batches=2)
    run_workers(_check_images, 1, str(tmp_path), process_group=False)


def _check_images(folder: str) -> None:
    assert [image.step for image in _events(folder).Images("sparse/log10_layer_density")] == [2, 6]


@on_workers(1, process_group=False)
def test_without_matplotlib_a_warning_replaces_the_image(tmp_path: Path) -> None:
    monitor, strategy = DensityMonitor(), SimulatedWorkersStrategy(TopK(0.1), 2)
    trainer = quiet_trainer(strategy, callbacks=[monitor], logger=TensorBoardLogger(str(tmp_path)))
    absent = mock.patch.object(type(monitor._history), "figure", side_effect=ModuleNotFoundError)
    with absent, pytest.warns(UserWarning, match="DensityMonitor needs matplotlib"):
        trainer.fit(Classifier(), data(), data())
    assert trainer.global_step == 3


@on_workers(1, process_group=False)
def test_the_image_shows_layers_in_the_order_of_the_model() -> None:
    monitor, strategy = DensityMonitor(), SimulatedWorkersStrategy(TopK(0.1), 2)
    quiet_trainer(strategy, callbacks=[monitor]).fit(Classifier(), data(), data())
    labels = monitor._history.figure(monitor._layer_names).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == list(SIZES)


def test_a_dense_fit_does_not_draw_the_layers_of_an_earlier_fit() -> None:
    monitor = DensityMonitor()
    monitor._history.columns.append({"weight": 0.5})  # as an earlier fit leaves them
    monitor.on_fit_start(quiet_trainer("auto", num_workers=1), Classifier())
    assert not monitor._history.columns


def test_monitors_count_and_log_nothing_in_barebones_mode() -> None:
    monitors = [DensityMonitor(), ErrorMonitor(per_layer=True)]
    first, _ = watch(monitors, barebones=True, log_every_n_steps=0, max_steps=4)
    assert re.search(r"steps exchanged +4", first.printed)


def test_histograms_hold_finite_values_from_before_the_selection() -> None:
    logger, layout = mock.Mock(TensorBoardLogger), LayerLayout(("weight", "bias", "unused"), (3, 1, 1))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=3))
    trainer: Any = SimpleNamespace(loggers=[logger], is_global_zero=True, fit_loop=loop)
    residual = Residual(torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0]), torch.full((5,), 7.0))
    scaled = torch.tensor([2.0, 4.0, float("inf"), 0.5, 0.0])
    bucket = FlatBucket(0, layout, scaled, residual, True, loss_scale=torch.tensor([2.0]), left_out=[(4, 5)])
    _add_histograms(trainer, ("compensated", "residual", "gradient"), bucket)
    added = [call.args for call in logger.experiment.add_histogram.call_args_list]
    assert {tag: (step, values.tolist()) for tag, values, step in added} == {
        "sparse/compensated/weight": (3, [1.5, 1.0]),
        "sparse/residual/weight": (3, [0.5, -1.0, 2.0]),
        "sparse/gradient/weight": (3, [1.0, 2.0]),
        "sparse/compensated/bias": (3, [0.5]),
        "sparse/residual/bias": (3, [0.25]),
        "sparse/gradient/bias": (3, [0.25]),
    }


DRIFT_HISTOGRAMS: dict[str, tuple[dict[str, Any], list[str], list[int]]] = {
    "every step": ({}, ["drift"], [0, 2, 4]),  # the residual is a part of the drift
    "every third step": ({"every_n_steps": 3}, ["drift"], [2, 5]),
    "kept apart": ({"keep_drift": False}, ["compensated", "drift", "residual"], [0, 2, 4]),
}


@pytest.mark.parametrize("name", DRIFT_HISTOGRAMS)
def test_monitors_count_exchanges_of_drifts_and_histograms_have_their_steps(name: str, tmp_path: Path) -> None:
    options, kinds, steps = DRIFT_HISTOGRAMS[name]
    strategy = LocalHardThresholdStrategy(threshold=0.02, **options)
    monitors = [DensityMonitor(per_layer=False), ErrorMonitor(histograms_every_n_steps=2)]
    first, _ = watch(monitors, strategy=strategy, logger=TensorBoardLogger(str(tmp_path)))
    assert first.printed.startswith("Sparse drift exchange\n")
    assert re.search(rf"steps exchanged +{6 // options.get('every_n_steps', 1)}$", first.printed, re.MULTILINE)
    run_workers(_check_drift_histograms, 1, str(tmp_path), kinds, steps, process_group=False)


def _check_drift_histograms(folder: str, kinds: list[str], steps: list[int]) -> None:
    events = _events(folder)
    tags = events.Tags()["histograms"]
    assert set(tags) == {f"sparse/{kind}/{name}" for kind in kinds for name in SIZES}
    for tag in tags:
        assert [point.step for point in events.Histograms(tag)] == steps, tag


@pytest.mark.parametrize("per_layer", [True, False])
def test_rank_0_prints_the_table_without_a_logger(per_layer: bool) -> None:
    first, second = watch([DensityMonitor(per_layer), ErrorMonitor()])
    assert second.printed == ""
    assert all(bool(step.layers) == per_layer for step in first.steps)
    rows = dict(re.findall(r"^  (.+?)  +(.+)$", first.printed, re.MULTILINE))
    assert rows["steps exchanged"] == "6"
    assert rows["average density"] == f"{100 * density_of(first.steps):.4g} %"
    sent = sum(step.payload_bytes for step in first.steps)
    dense = 6 * 4 * NUM_ELEMENTS
    assert rows["bytes sent per worker"] == f"{sent / 1000:.4g} kB"
    assert rows["bytes if dense"] == f"{dense / 1000:.4g} kB"
    assert rows["times fewer"] == f"{dense / sent:.1f}"
    assert first.printed.startswith("Sparse gradient exchange\n")
    assert ("densest layers (parameters)\n" in first.printed) == per_layer
    layers = {name.strip(): value for name, value in rows.items() if name.endswith(")")}
    averages = {name: sum(step.layers[name].density for step in first.steps) / 6 for name in first.steps[0].layers}
    densest = sorted(averages, key=averages.get, reverse=True)[:3]
    assert layers == {f"{name} ({SIZES[name]:,})": f"{100 * averages[name]:.4g} %" for name in densest}
    errors = [step.squared_error for step in first.steps]
    numbers = [float(number) for number in re.findall(r"\d+\.?\d*(?:e[-+]\d+)?", first.printed.splitlines()[-1])]
    assert numbers == pytest.approx([sqrt(errors[-1]), sqrt(max(errors)), sum(errors)], rel=1e-3)


def test_the_table_has_at_most_80_columns_and_shortens_layer_names() -> None:
    """Use names of PEFT adapters of a GPT."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.default.weight"
    layers = {name.format(layer): LayerStats(2, 32_768, 2, 1.0) for layer in (0, 31)}
    monitor = DensityMonitor()
    monitor.add_exchange(StepStats(2, 2 * 32_768, 4, 1.0, 0, 1.0, 0, 60, 400, 0.1, layers=layers))
    table = monitor.table()
    assert max(map(len, table.splitlines())) <= 80, table
    for layer in (0, 31):
        row = rf"^    base_mod….*{layer}\.self_attn.q_proj.lora_A.default.weight \(32,768\)  "
        assert re.search(row, table, re.M), table


def test_the_table_of_a_resumed_run_names_its_first_step_for_layers() -> None:
    monitor = DensityMonitor()
    layer = LayerStats(1, 2**40, 1357, 1.0)
    step = StepStats(2, 2**40, 10**12, 1.0, 0, 1.0, 0, 10**18, 10**18, 1.23456e-9, layers={"a." * 99 + "weight": layer})
    monitor.load_state_dict({**monitor.state_dict(), "totals": {"steps": 10**9}})
    monitor.add_exchange(step)
    monitor.add_exchange(step)
    monitor.add_exchange(StepStats(**{**vars(step), "layers": {"of another model": layer}}))
    monitor._history.steps_per_column = 2
    monitor.add_exchange(step)  # for a later column
    assert "  densest layers (parameters), since the resume\n" in monitor.table()
    assert max(map(len, monitor.table().splitlines())) <= 80, monitor.table()
    assert monitor._history.densest(1) == [("of another model", 2**40, layer.density)]
    for is_calibration in (False, True):
        monitor._newest = replace(step, threshold=0.1, is_calibration=is_calibration)
        assert ("threshold λ" in monitor.table()) != is_calibration
    monitor.setup(SimpleNamespace(strategy=None), None, "fit")  # another fit
    assert not monitor._totals
    assert monitor.total() == 0


def test_the_table_separates_calibration_and_dense_exchanges() -> None:
    strategy = DDPHardThresholdStrategy(density=0.05, bucket_cap_mb=SMALL_BUCKETS_MB)
    first, second = watch([DensityMonitor(per_layer=False)], strategy=strategy, max_steps=12)
    assert second.printed == ""
    rows = dict(re.findall(r"^ +(\S.+?)  +(.+)$", first.printed, re.MULTILINE))
    calibrating, *later = first.steps
    assert calibrating.is_calibration
    assert calibrating.density == 1
    assert calibrating.dense_elements == NUM_ELEMENTS
    assert not any(step.is_calibration for step in later)
    assert all(step.dense_elements == 0 and step.density < 1 for step in later)  # also the first, without a history
    assert rows["steps exchanged"] == "12"
    assert rows["sent densely"] == "1"
    assert rows["target density"] == "5 %"
    assert rows["density after calibration"] == f"{100 * sum(step.density for step in later) / len(later):.4g} %"
    assert rows["threshold λ at the end"] == f"{later[-1].threshold:.4g}"
    fewer = sum(step.dense_bytes for step in later) / sum(step.payload_bytes for step in later)
    assert rows["times fewer after calibration"] == f"{fewer:.1f}"


def test_a_message_says_that_a_logger_shows_no_histograms(tmp_path: Path) -> None:
    first, _ = watch([ErrorMonitor(histograms_every_n_steps=2)], logger=CSVLogger(str(tmp_path)))
    assert sum("histograms_every_n_steps has no effect without" in text for text in first.messages) == 1


def test_a_single_worker_has_no_table() -> None:
    [alone] = watch([DensityMonitor()], num_workers=1)
    assert alone.printed == ""
    assert not any(step.payload_bytes for step in alone.steps)


def _set_totals(trainer: Trainer, _: LightningModule) -> None:
    for monitor in trainer.callbacks:
        getattr(monitor, "_totals", {}).update(steps=1, largest_error_norm=2.0)  # as after a resume


def test_monitors_warn_and_stay_idle_under_plain_ddp() -> None:
    monitors = [DensityMonitor(), ErrorMonitor(per_layer=True)]
    workers = watch([*monitors, LambdaCallback(on_fit_start=_set_totals)], strategy="ddp")
    for worker in workers:
        assert worker.printed == ""
        assert not any(name.startswith("sparse/") for name in worker.callback_metrics)
    idle = [message for message in workers[0].messages if "is idle" in message]
    assert [message.split()[0] for message in idle] == ["DensityMonitor", "ErrorMonitor"]
    assert all("DDPStrategy exchanges whole gradients" in message for message in idle)
    assert not any("is idle" in message for message in workers[1].messages)


@pytest.mark.parametrize("exchange", ["gather", "dense"])
@on_workers(2, process_group=False)
def test_monitors_and_logging_cost_no_collective(exchange: str) -> None:
    calls: list[str] = []
    for module in (dist, dist.distributed_c10d):
        for name in COLLECTIVES:
            setattr(module, name, partial(_call, getattr(dist, name), name, calls))
    runs = []
    for callbacks in ([], [DensityMonitor(per_layer=True), ErrorMonitor(per_layer=True)]):
        calls.clear()
        strategy = DDPHardThresholdStrategy(threshold=SENDS_NONE, exchange=exchange, bucket_cap_mb=SMALL_BUCKETS_MB)
        _watch(callbacks, strategy=strategy, num_workers=2)
        runs.append(calls.copy())
    without, with_monitors = runs
    assert without
    assert with_monitors == without


COLLECTIVES = [
    name
    for name in dist.distributed_c10d.__all__
    if re.search("gather|reduce|all_to_all|barrier|broadcast|scatter|isend", name)
    and name.islower()
    and name != "reduce_op"
]


def _call(collective: Any, name: str, calls: list[str], *args: Any, **kwargs: Any) -> Any:
    calls.append(name)
    return collective(*args, **kwargs)


def test_averages_and_totals_continue_when_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    before = watch([SaveAt(3, path), DensityMonitor(), ErrorMonitor()], max_steps=3)
    # The threshold changes, so that the two halves differ.
    strategy = DDPHardThresholdStrategy(threshold=THRESHOLD / 3, bucket_cap_mb=SMALL_BUCKETS_MB)
    after = watch([DensityMonitor(), ErrorMonitor()], strategy=strategy, ckpt_path=path)
    for first, second in zip(before, after, strict=True):
        steps = [*first.steps, *second.steps]
        assert [len(first.steps), len(second.steps)] == [3, 3]
        average, total = density_of(steps), sum(step.squared_error for step in steps)
        assert second.callback_metrics["sparse/average_density"] == pytest.approx(average, rel=1e-5)
        assert second.callback_metrics["sparse/total_error"] == pytest.approx(total, rel=1e-5)
        # Without the saved state of the callback, the average differs.
        assert density_of(second.steps) != pytest.approx(average, rel=1e-3)
    assert re.search(r"steps exchanged +6$", after[0].printed, re.MULTILINE)
    sent = sum(step.payload_bytes for half in (before, after) for step in half[0].steps)
    assert f"{sent / 1000:.4g} kB" in after[0].printed


def test_a_picture_averages_a_run_longer_than_its_width() -> None:
    monitor = DensityMonitor(image_columns=4)
    for selected in (1, 2, 3, 4, 10, 20, 30, 40):
        layers = {"weight": LayerStats(1, 100, selected, 1.0)}
        monitor.add_exchange(StepStats(1, 100, selected, 1.0, 0, 1.0, 0, 1, 1, layers=layers))
    history = monitor._history
    assert history.steps_per_column == 4
    assert [column["weight"] for column in history.columns] == pytest.approx([0.025, 0.25])


@on_workers(2, process_group=False)
def test_totals_are_in_the_first_row_of_a_resumed_run(tmp_path: Path) -> None:
    has_average: list[bool] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            has_average.append("sparse/average_density" in trainer.callback_metrics)

    def trainer_of(max_steps: int) -> Trainer:
        strategy = LocalHardThresholdStrategy(threshold=0.001, every_n_steps=4)
        return quiet_trainer(strategy, num_workers=2, max_steps=max_steps, callbacks=[DensityMonitor(), Watch()])

    first = trainer_of(5)
    first.fit(Classifier(), ResumableData(20))
    first.save_checkpoint(tmp_path / "a.ckpt")
    trainer_of(7).fit(Classifier(), ResumableData(20), ckpt_path=tmp_path / "a.ckpt")
    assert has_average == [False] * 3 + [True] * 2 + [True] * 2


def test_a_restored_monitor_forgets_the_exchanges_of_a_search():
    monitor = ErrorMonitor()
    monitor._new_steps.append(StepStats(2, 10, 2, 1.0, 0, 1.0, 0, 1, 1))
    monitor.load_state_dict({"totals": {"squared_error": 3.0}})
    assert monitor.state_dict()["totals"] == {"squared_error": 3.0}
