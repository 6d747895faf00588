"""Saved state: copies share no memory, and changes by hooks apply."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from lightning_sparse.engine.snapshot import copied
from lightning_sparse.strategies.sparse_strategy import _own_state


def test_a_copy_has_its_own_tensors_in_any_container_and_shares_them_as_the_original_does() -> None:
    betas = (torch.tensor(0.9), [torch.tensor(0.99)])
    copy = copied({"state": {0: OrderedDict(betas=betas), 1: betas[0]}})["state"]
    betas[0].zero_(), betas[1][0].zero_()
    assert copy[0]["betas"] == (torch.tensor(0.9), [torch.tensor(0.99)])
    assert copy[1] is copy[0]["betas"][0]


MOMENTUM, BETAS = torch.tensor([3.0, 0.0]), (0.9, 0.99)


@pytest.mark.parametrize(
    ("state", "is_changed"),
    [
        ({"momentum": MOMENTUM.clone(), "betas": BETAS}, False),
        ({"momentum": MOMENTUM.to_sparse(), "betas": BETAS}, False),
        ({"momentum": torch.tensor([0.0, 3.0]).to_sparse(), "betas": BETAS}, True),
        ({"momentum": MOMENTUM.double(), "betas": BETAS}, True),
        ({"momentum": MOMENTUM.repeat(2), "betas": BETAS}, True),
        ({"momentum": None, "betas": BETAS}, True),
        ({"momentum": MOMENTUM, "betas": (0.9, 0.95)}, True),
        ({"momentum": MOMENTUM}, True),
    ],
)
def test_a_worker_keeps_its_own_optimizer_state_except_what_a_hook_has_changed(state: Any, is_changed: bool) -> None:
    saved = {"state": {0: {"momentum": MOMENTUM, "betas": BETAS}}, "param_groups": [{"lr": 0.1}]}
    loaded = {"state": {0: state}, "param_groups": [{"lr": 0.1}], "added by a hook": 1}
    kept = _own_state(loaded, saved, {"state": "own", "param_groups": "own"})
    expected = {0: state} if is_changed else "own"
    assert kept == {"state": expected, "param_groups": "own", "added by a hook": 1}
