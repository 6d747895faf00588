"""A selection of the random trainings of ``python -m tests.distributed.fuzz``."""

import zlib

import pytest

from lightning_sparse import HardThreshold
from tests.distributed.fuzz.__main__ import run_cases
from tests.distributed.fuzz.case import draw_case
from tests.distributed.fuzz.training import run_case
from tests.workers import of_all_workers, on_workers

CASE_SECONDS = 25.0
SEEDS = {
    1: (14, 72, 164, 378, 399),
    2: (18, 36, 39, 73, 337, 88),
    3: (19, 37, 83, 211, 205, 157),
    4: (145, 153, 168, 174, 86, 323),
}
"""Seeds with many features, by number of workers."""
KNOWN_SEEDS = {
    # Seeds that failed:
    11: "the first step of a static graph in several buckets, each of index 0 and none the last",
    212: "-inf in a dense step: NaN in a residual that should be zero",
    255: "a clipping factor of NaN times the zeros of an unused layer",
    372: "an overflow of the loss scale in a dense step that was not undone",
    20790: "the learning rate of an unused layer, committed while its earlier gradient waits for a step",
    # Seeds for which the simulation was wrong:
    50003: "a density of 1, which needs no statistics of layers",
    914018: "λ from a dropped backward, which a checkpoint contains at once",
    # Seeds for which a bound of the simulation was too narrow:
    20669: "clipped values that round to zero on the wire, so that their selection is unknown",
    30067: "squares below the smallest normal float32",
    2274: "a clipped gradient between two far larger gradients that nearly cancel",
    # Seeds that detect a mutation of the package:
    4: "the largest slice is ignored, or λ is rounded to the nearest float32",
    8: "nothing is undone after an overflow",
    17: "payloads are added in another order",
    26: "the clipping norm ignores the loss scale",
    280: "the filter of the CPU skips a block whose only large value is NaN",
}
"""Seeds with a description."""
CHECKSUM = 734879849


def assert_all_pass(seeds):
    outcomes = list(run_cases(seeds, CASE_SECONDS))
    failures = [f"seed {case.seed}: {failure}" for case, failure, _ in outcomes if failure is not None]
    assert not failures, "\n\n".join(failures)
    return outcomes


@pytest.mark.parametrize("num_workers", SEEDS)
def test_random_trainings_equal_the_simulation(num_workers):
    outcomes = assert_all_pass(SEEDS[num_workers])
    assert {case.num_workers for case, _, _ in outcomes} == {num_workers}
    assert sum(partial_steps for _, _, partial_steps in outcomes) >= 5


@pytest.mark.full
def test_seeds_that_once_failed_pass():
    assert_all_pass(KNOWN_SEEDS)


def test_a_thousand_seeds_draw_the_same_cases_as_ever():
    """If you change this, find new KNOWN_SEEDS and check that all values of every option are drawn."""
    assert zlib.crc32("".join(repr(draw_case(seed)) for seed in range(1000)).encode()) == CHECKSUM


@on_workers(2)
def test_every_worker_detects_a_changed_package():
    HardThreshold.threshold_of = lambda self, name: self.current_threshold / 2
    difference, _ = run_case(draw_case(SEEDS[2][1]))
    assert difference is not None
    assert difference.startswith("step ")
    assert of_all_workers(difference) == [difference] * 2
