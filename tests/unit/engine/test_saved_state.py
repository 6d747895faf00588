"""Saved state: the seal finds any change, copies share no memory, and saving has a timeout."""

import copy
import sys
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_sparse.engine.snapshot import DamagedStateError, copied, require_seal, sealed
from lightning_sparse.exchange.save_barrier import is_interrupted, patience_of
from tests.integration.checkpoints.test_damaged_checkpoints import damaged

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=True)
    | st.text(max_size=3)
    | st.lists(st.floats(-1e3, 1e3, width=32), max_size=4).map(torch.tensor)
    | st.lists(st.integers(0, 9), max_size=3).map(lambda numbers: torch.tensor(numbers, dtype=torch.int64))
)
NAMES = st.text(max_size=3) | st.integers(0, 3)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
STATES = st.dictionaries(st.text("abcd", min_size=1, max_size=2), TREES, min_size=1, max_size=4)


def test_a_copy_has_its_own_tensors_in_any_container_and_shares_them_as_the_original_does() -> None:
    betas = (torch.tensor(0.9), [torch.tensor(0.99)])
    copy = copied({"state": {0: OrderedDict(betas=betas), 1: betas[0]}})["state"]
    betas[0].zero_(), betas[1][0].zero_()
    assert copy[0]["betas"] == (torch.tensor(0.9), [torch.tensor(0.99)])
    assert copy[1] is copy[0]["betas"][0]


@given(STATES)
def test_require_seal_accepts_sealed_states(state: dict[str, Any]) -> None:
    require_seal(sealed(state))
    require_seal(copy.deepcopy(sealed(state)))


@given(STATES, st.integers(0, 2**32))
def test_require_seal_rejects_any_changed_entry(state: dict[str, Any], seed: int) -> None:
    saved = sealed(state)
    changed = damaged(saved, seed)
    assume(not _is_same(saved, changed))  # NaN in the place of NaN, for example
    with pytest.raises(DamagedStateError, match="lightning_sparse cannot resume: in the saved state, "):
        require_seal(changed)


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value.nan_to_num(7), other.nan_to_num(7))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return repr(value) == repr(other)


def test_a_message_names_the_entry_and_both_values() -> None:
    saved = sealed({"residuals": [{"fc.weight": torch.tensor([3.0, 4.0])}], "shared": {"next_step": 5}})
    saved["residuals"][0]["fc.weight"][1] = float("nan")
    with pytest.raises(DamagedStateError, match=r"residuals/0/fc.weight is a tensor .* and was a tensor "):
        require_seal(saved)
    saved["residuals"][0]["fc.weight"][1] = 4.0
    saved["shared"]["next_step"] = "5"
    with pytest.raises(DamagedStateError, match=r"shared/next_step is '5' and was 5\. "):
        require_seal(saved)


@pytest.mark.parametrize("changed", [[0.0, 3.0], [4.0, 0.0]])
def test_the_seal_covers_indices_and_values_of_sparse_tensors(changed: list[float]) -> None:
    saved = sealed({"momentum": torch.tensor([3.0, 0.0]).to_sparse()})
    require_seal(saved)
    with pytest.raises(DamagedStateError, match="momentum is a tensor"):
        require_seal(saved | {"momentum": torch.tensor(changed).to_sparse()})


def test_saving_waits_less_for_workers_that_may_be_missing():
    timeouts = (None, timedelta(seconds=40), timedelta(seconds=3))
    assert [patience_of(timeout) for timeout in timeouts] == [300, 40, 3]
    assert [patience_of(timeout, is_exchanging=True) for timeout in timeouts] == [15, 15, 3]


def test_a_handled_exception_counts_as_trouble():
    assert not is_interrupted()
    try:
        raise ValueError
    except ValueError:
        assert is_interrupted()
        assert patience_of(None) == 15
        assert patience_of(None, error_before=sys.exc_info()[1]) == 300  # training inside an except block
    assert not is_interrupted()
