"""Loss scales and NaN where a table of programs does not reach: ``tests/integration/programs`` has the rest."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_sparse import DDPHardThresholdStrategy
from tests.integration.models import (
    SMALL_BUCKETS_MB,
    Classifier,
    Recorder,
    ScaledPrecision,
    assert_equal,
    data,
    nesterov,
    quiet_trainer,
)
from tests.workers import run_workers

STEPS = 6


def strategy() -> DDPHardThresholdStrategy:
    return DDPHardThresholdStrategy(threshold=0.05, bucket_cap_mb=SMALL_BUCKETS_MB)


def _fit(scale: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any], float | None]:
    recorder, scaler = Recorder(), None
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    plugins = [] if scaler is None else [ScaledPrecision("16-mixed", "cpu", scaler=scaler)]
    quiet_trainer(strategy(), max_steps=STEPS, callbacks=[recorder], plugins=plugins).fit(Classifier(nesterov), data())
    return recorder.weights, recorder.residuals, recorder.steps, scaler and scaler.get_scale()


@pytest.mark.parametrize("scale", [2.0**4, 2.0**20])
def test_numbers_do_not_depend_on_the_scale(scale: float) -> None:
    """A power of two rounds nothing, and it changes while training goes on."""
    scaled, plain = (run_workers(_fit, 2, each, process_group=False) for each in (scale, None))
    for (*found, last), (*expected, _) in zip(scaled, plain, strict=True):
        assert last == scale * 2**3
        assert_equal(found[:2], expected[:2])
        assert found[2] == expected[2]


class NanOnOne(Classifier):
    def loss(self, batch: list[Tensor]) -> Tensor:
        is_bad = (self.global_step, self.global_rank) == (3, 1)
        return super().loss([batch[0] * (float("nan") if is_bad else 1.0), batch[1]])


def _anomaly(kind: str) -> None:
    chosen = DDPStrategy() if kind == "ddp" else strategy()
    quiet_trainer(chosen, max_steps=STEPS, detect_anomaly=True).fit(NanOnOne(nesterov), data())


@pytest.mark.parametrize("kind", ["ddp", "hard threshold"])
def test_detect_anomaly_names_the_step_on_the_worker_that_has_the_nan(kind: str) -> None:
    """Only that worker finds it in its own backward; the others' exchange breaks off, as under DDP."""
    with pytest.raises(AssertionError) as caught:
        run_workers(_anomaly, 2, kind, process_group=False, timeout=60)
    assert "returned nan values in its 0th output" in str(caught.value)
