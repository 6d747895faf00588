"""Medians of dense and sparse steps, and the verdict on them."""

from typing import Any

import pytest

from lightning_sparse import StepStats
from lightning_sparse.callbacks import step_times
from lightning_sparse.callbacks.step_times import StepTimes


def step(*, dense: bool, is_calibration: bool = True) -> StepStats:
    is_calibration = dense and is_calibration
    return StepStats(2, 10, 2, 0.0, 0, 0.0, 0, 1, 1, dense_elements=10 * dense, is_calibration=is_calibration)


def measured(
    monkeypatch: Any, intervals: list[tuple[bool, float]], pause_before: int | None = None, steps: int = 1
) -> StepTimes:
    """Return the times of exchanges at these intervals, after a first one."""
    now, times = [0.0], StepTimes(steps)
    monkeypatch.setattr(step_times, "perf_counter", lambda: now[0])
    times.add(step(dense=True), 0.0)
    for place, (dense, seconds) in enumerate(intervals):
        if place == pause_before:
            times.pause()
        now[0] += seconds
        times.add(step(dense=dense, is_calibration=place < 2), seconds / 10)
    return times


def test_dense_and_sparse_steps_have_separate_medians(monkeypatch: Any) -> None:
    intervals = [(True, 9.0), (True, 0.3), (True, 0.3), (False, 0.1), (False, 0.1), (False, 0.2)]
    times = measured(monkeypatch, intervals)
    assert times.scalars() == pytest.approx(
        {"sparse/median_dense_step_ms": 300, "sparse/median_step_ms": 100, "sparse/median_wait_ms": 10}
    )
    assert times.rows()[0] == ("median dense step", "300 ms (2 steps)")
    assert measured(monkeypatch, intervals, steps=30).rows()[0] == ("median dense step", "10 ms (60 steps)")
    assert times.verdict() == "A sparse step is 3 times as fast as a dense one."


LEVEL = "Communication is not the bottleneck: sparse and dense steps take equally long."
SLOWER = "A sparse step takes longer than a dense one: compare a run with 'ddp'."
UNKNOWN = "Only 3 dense steps were timed: compare a run with 'ddp'."


@pytest.mark.parametrize(
    ("count", "dense", "sparse", "verdict"),
    [
        (3, 0.19, 0.1, UNKNOWN),
        (3, 0.1, 0.19, UNKNOWN),
        (3, 0.1, 0.21, SLOWER),
        (3, 0.3, 0.1, "A sparse step is 3 times as fast as a dense one."),
        (10, 0.1, 0.1, LEVEL),
        (10, 0.1, 0.12, SLOWER),
        (10, 0.12, 0.1, "A sparse step is 1.2 times as fast as a dense one."),
    ],
)
def test_the_verdict_needs_a_large_difference_or_many_steps(
    monkeypatch: Any, count: int, dense: float, sparse: float, verdict: str
) -> None:
    intervals = [(True, 1.0), *[(True, dense)] * count, *[(False, sparse)] * 3]
    assert measured(monkeypatch, intervals).verdict() == verdict


def test_a_verdict_needs_steps_of_both_kinds(monkeypatch: Any) -> None:
    assert StepTimes().rows() == []
    times = measured(monkeypatch, [(False, 0.1)] * 4)
    assert times.verdict() is None
    assert list(times.scalars()) == ["sparse/median_step_ms", "sparse/median_wait_ms"]


def test_pauses_do_not_count(monkeypatch: Any) -> None:
    times = measured(monkeypatch, [(False, 0.1), (False, 0.1), (False, 60.0), (False, 0.1)], pause_before=2)
    assert times.scalars()["sparse/median_step_ms"] == pytest.approx(100)
