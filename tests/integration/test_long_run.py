"""A few hundred steps of ``python -m tests.integration.long_run``, which runs 20,000 of them."""

import math

import pytest

from tests.integration.long_run import run

STEPS = 800


@pytest.mark.full
@pytest.mark.long
def test_nothing_grows_drifts_or_parts_company() -> None:
    results = run(STEPS, num_workers=3)
    for marks in zip(*(marks for marks, _ in results), strict=True):
        assert len({mark.weights for mark in marks}) == 1
    for marks, total_error in results:
        assert [mark.step for mark in marks] == list(range(STEPS // 20, STEPS + 1, STEPS // 20))
        middle, last = marks[9], marks[-1]
        assert last.open_files == middle.open_files
        assert last.threads == middle.threads
        # Half of the run lies between them: one object a step would be 400, one kilobyte a step 0.4 MB, of which an
        # allocator that grows by whole pages hides some.
        assert last.objects - middle.objects < 100
        assert last.resident_bytes - middle.resident_bytes < 4_000_000
        assert 0 < total_error < math.inf
        # Calibration is over after 50 steps and the residual filled after some hundred; from there on nothing changes.
        assert 0.5 < last.density / middle.density < 1.5
        assert 0.8 < last.error_norm / middle.error_norm < 1.25
