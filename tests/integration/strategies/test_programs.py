"""Compares the sparse exchange with plain DDP (λ = 0) and with error feedback in plain tensors (λ > 0).

Each row of the table (tests/integration/programs) is a program. It runs in four worlds, on two workers each::

    ddp      plain                                   zero     sparse, λ = 0: equal to ddp in every bit
    oracle   error feedback in plain tensors         sparse   λ > 0: equal to the oracle in every bit

A new kind of program is a new row.
"""

from contextlib import contextmanager

import pytest

from tests.integration.models import assert_equal
from tests.integration.programs.running import FIRST_OF_PARTS, ROWS, Outcome, compare, run_rows
from tests.integration.programs.world import PAIRS
from tests.markdown import PROJECT

CHUNK = 10
"""Rows that share one start of workers."""

CHUNKS = {name: place // CHUNK for place, name in enumerate(ROWS)}


@pytest.fixture(scope="module")
def outcomes(rows, tmp_path_factory):
    """Return a function that runs the chunk of a row if necessary, and returns its outcomes on both workers."""
    wanted = [row["name"] for row in rows]
    known: dict[str, list[Outcome] | Exception] = {}

    def look_up(name: str) -> list[Outcome]:
        if name not in known:
            chunk = [row for row in wanted if CHUNKS[row] == CHUNKS[name] and not ROWS[row].missing()]
            try:
                workers = run_rows(chunk, str(tmp_path_factory.mktemp("stores")))
                known.update({row: [worker[row] for worker in workers] for row in chunk})
            except Exception as error:
                known.update(dict.fromkeys(chunk, error))
        found = known[name]
        if isinstance(found, Exception):
            raise found
        return found

    return look_up


def row_of(name):
    """Return a parameter of the test; the first row of each part of the programs is representative."""
    marks = [pytest.mark.xdist_group(f"programs {CHUNKS[name]}")]
    return pytest.param(name, marks=[*marks, pytest.mark.representative] if name in FIRST_OF_PARTS else marks)


@pytest.mark.long
@pytest.mark.parametrize("name", [row_of(name) for name in ROWS])
def test_a_program_trains_as_in_its_reference_world(name, outcomes):
    row = ROWS[name]
    if reason := row.missing():
        pytest.skip(reason)
    workers = outcomes(name)
    failures = [f"worker {rank}: {outcome}" for rank, outcome in enumerate(workers) if isinstance(outcome, str)]
    assert not failures, "\n".join(failures)
    for kind in row.worlds:
        with about(f"in the world of {kind}"):
            row.check([worker[kind] for worker in workers])
    if row.is_refused:
        return
    for right, other in PAIRS:
        if {right, other} <= set(row.worlds):
            for worker in workers:
                with about(f"{other} against {right}"):
                    compare(worker[right], worker[other])
    for worker in workers:
        if "zero" in row.worlds:
            assert_sent_densely(row, worker["ddp"], worker["zero"])
        if {"ddp", "oracle", "sparse"} <= set(row.worlds):
            assert_sent_sparsely(row, worker["ddp"], worker["oracle"], worker["sparse"])
            assert worker["sparse"].sent == sum(other["oracle"].sent for other in workers)
    if row.warns_of:
        assert new_warnings(row, workers[0]["sparse"], workers[0]["ddp"]) == row.warns_of


def test_the_documentation_names_the_number_of_programs():
    assert f"{len(ROWS)} training programs" in " ".join((PROJECT / "docs/guides/reliability.md").read_text().split())


@contextmanager
def about(what):
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def assert_sent_densely(row, ddp, zero):
    assert ddp.comm_hooks == [None] * len(zero.comm_hooks)
    assert zero.comm_hooks == ["sparse_hook"] * len(ddp.comm_hooks)
    assert not any(residual.any() for residual in zero.residuals.values())
    # Each backward sends everything, except parameters that it did not use.
    assert row.leaves_out or all(density == 1.0 for density in zero.densities)
    assert new_warnings(row, zero, ddp) <= row.warns_of


def assert_sent_sparsely(row, ddp, oracle, sparse):
    assert_equal(sparse.residuals, oracle.residuals, "residuals")
    assert sparse.num_exchanges == oracle.num_exchanges
    sent, held = oracle.sent / oracle.offered, oracle.held / oracle.offered
    assert min(sent, held) > 0.05, f"λ sends {sent:.1%} and keeps {held:.1%}. Both must exceed 5 %"
    assert (oracle.num_rolled_back > 0) == row.rolls_back
    assert new_warnings(row, sparse, ddp) <= row.warns_of


def new_warnings(row, run, ddp):
    """Return the warnings of the sparse strategy alone, or only their first quoted names if the row lists names."""
    return {message.split("'")[1] if row.warns_of else message for message in run.warnings - ddp.warnings}
