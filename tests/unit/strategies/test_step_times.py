"""Medians of the times of steps and of their waits."""

from typing import Any

import pytest

from lightning_sparse.callbacks import step_times
from lightning_sparse.callbacks.step_times import StepTimes


def measured(monkeypatch: Any, intervals: list[float], pause_before: int | None = None, steps: int = 1) -> StepTimes:
    """Return the times of exchanges at these intervals, after a first one."""
    now, times = [0.0], StepTimes(steps)
    monkeypatch.setattr(step_times, "perf_counter", lambda: now[0])
    times.add(0.0)
    for place, seconds in enumerate(intervals):
        if place == pause_before:
            times.pause()
        now[0] += seconds
        times.add(seconds / 10)
    return times


def test_medians_are_of_single_steps_and_leave_the_first_interval_out(monkeypatch: Any) -> None:
    intervals = [9.0, 0.1, 0.1, 0.2]
    times = measured(monkeypatch, intervals)
    assert times.scalars() == pytest.approx({"sparse/median_step_ms": 100, "sparse/median_wait_ms": 10})
    assert times.rows() == [("median step", "100 ms"), ("  waited for the exchange", "10 ms")]
    assert measured(monkeypatch, intervals, steps=50).rows()[0] == ("median step", "2 ms")
    assert measured(monkeypatch, intervals[:2]).rows() == []


def test_pauses_do_not_count(monkeypatch: Any) -> None:
    times = measured(monkeypatch, [0.1, 0.1, 60.0, 0.1], pause_before=2)
    assert times.scalars()["sparse/median_step_ms"] == pytest.approx(100)
