"""The table of programs; runs many rows in the same workers."""

import gc
import logging
import os
import traceback
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.integration.models import assert_equal
from tests.integration.programs import (
    automatic_rows,
    layer_rows,
    manual_rows,
    plain_rows,
    player_rows,
    scaler_rows,
    trainer_model_rows,
    trainer_option_rows,
    wrapper_rows,
)
from tests.integration.programs.world import Kind, Row, Run
from tests.workers import run_workers

_PARTS = (
    trainer_option_rows.ROWS,
    trainer_model_rows.ROWS,
    automatic_rows.ROWS,
    manual_rows.ROWS,
    player_rows.ROWS,
    plain_rows.ROWS,
    scaler_rows.ROWS,
    layer_rows.ROWS,
    wrapper_rows.ROWS,
)
ROWS: dict[str, Row] = {name: row for part in _PARTS for name, row in part.items()}
assert len(ROWS) == sum(map(len, _PARTS)), "two rows have the same name"
FIRST_OF_PARTS = {next(iter(part)) for part in _PARTS}

Outcome = dict[Kind, Run] | str
"""The run of a worker in each world, or its traceback."""

NUM_WORKERS = 2
PATIENCE = timedelta(seconds=40)
"""Time limit if one worker fails and the other waits: the row fails, but not later rows."""


def run_rows(names: Sequence[str], folder: str) -> list[dict[str, Outcome]]:
    """Return the outcome of every row for each of two workers; by name, because rows cannot be pickled."""
    return run_workers(_run_all, NUM_WORKERS, list(names), folder, process_group=False, timeout=170)


def _run_all(names: Sequence[str], folder: str) -> dict[str, Outcome]:
    logging.disable(logging.WARNING)
    outcomes = {name: _run(ROWS[name], f"{folder}/{index}") for index, name in enumerate(names)}
    logging.disable(logging.NOTSET)  # other tests reuse this worker
    return outcomes


def _run(row: Row, store: str) -> Outcome:
    rank = int(os.environ["RANK"])
    # A group for each row: if a worker fails, its connections close, so that the others notice.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_WORKERS, timeout=PATIENCE)
    try:
        outcome: Outcome = {kind: _run_in(row, kind) for kind in row.worlds}
    except BaseException:
        outcome = traceback.format_exc(limit=-6)
    dist.destroy_process_group()
    gc.collect()
    return outcome


def _run_in(row: Row, kind: Kind) -> Run:
    os.environ["WORLD_SIZE"] = str(NUM_WORKERS)  # Lightning removes it after a Trainer finishes
    torch.manual_seed(5)
    world = row.world(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row.program(world)
    run = world.finish()
    run.warnings = {str(warning.message).splitlines()[0] for warning in caught}
    return run


def compare(right: Run, other: Run) -> None:
    """Compare to the last bit, because a sum of two terms has a single order."""
    assert_equal(other.state, right.state, "weights and buffers")
    assert_equal(other.stepped_on, right.stepped_on, "gradients stepped on")
    assert_equal(dict(other.seen), dict(right.seen), "what was seen")
    assert other.texts == right.texts
    assert (other.global_step, other.epochs) == (right.global_step, right.epochs)
    assert_equal(own_metrics(other.metrics), own_metrics(right.metrics), "metrics")


def own_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("sparse/")}
