"""SparseModelAverager continues from saved state with other options."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager
from tests.distributed.drift.drift_simulation import NESTEROV
from tests.integration.models import assert_equal, clones, warnings_of
from tests.workers import on_workers

SLOW = partial(torch.optim.SGD, lr=0.1, momentum=0.5)


def _drifting(**options: Any) -> tuple[nn.Module, SparseModelAverager]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.complex64))
    return model, SparseModelAverager(model, HardThreshold(threshold=0.5), DriftOptions(**options))


def _saved(**options: Any) -> dict[str, Any]:
    """Return the state of a worker after drifts above and below the threshold."""
    torch.manual_seed(dist.get_rank())
    model, averager = _drifting(**options)
    with torch.no_grad():
        for _ in range(2):
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
            averager.step()
    return averager.state_dict()


def _loaded(saved: dict[str, Any], **options: Any) -> tuple[dict[str, Tensor], Any, list[str]]:
    """Return the weights of a worker after loading, its outer optimizer, and warnings."""
    model, averager = _drifting(**options)
    messages: list[str] = []
    with warnings_of(messages, "outer"):
        averager.load_state_dict(saved)
    own = clones(model.named_parameters())
    averager.step()  # continues
    return own, averager.drift_exchange.outer, messages


@on_workers(2)
def test_separate_drifts_move_into_weights_that_keep_drift() -> None:
    saved = _saved(keep_drift=False)
    apart, _, _ = _loaded(saved, keep_drift=False)
    within, _, _ = _loaded(saved, keep_drift=True)
    kept = saved["own"]["unsent"]
    assert any(unsent.any() for unsent in kept.values())
    for name, weight in apart.items():
        real = torch.view_as_real(weight) if weight.is_complex() else weight
        part = kept[name].view_as(real)
        assert_equal(within[name], weight - (torch.view_as_complex(part) if weight.is_complex() else part))


@on_workers(2)
def test_an_outer_optimizer_takes_current_options_and_another_starts_anew() -> None:
    saved = _saved(outer_optimizer=NESTEROV)
    _, slow, slow_messages = _loaded(saved, outer_optimizer=SLOW)
    [group] = slow.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.5, False)
    # The next step multiplied the buffer by the current momentum.
    momentum = saved["shared"]["outer.momentum_buffer"]
    before = torch.cat([momentum[name] for name in saved["numbers"]["layout"][0]])
    assert before.any()
    after = torch.cat([slow.state[part]["momentum_buffer"] for part in group["params"]])
    torch.testing.assert_close(after, 0.5 * before)
    _, other, other_messages = _loaded(saved, outer_optimizer=partial(torch.optim.Adam, lr=0.01))
    assert [float(state["step"]) for state in other.state.values()] == [1.0] * len(other.state)
    assert slow_messages == []
    for messages, current in ((other_messages, "Adam, which starts without state"), (_loaded(saved)[2], "none")):
        [message] = messages
        assert f"optimizer is SGD, the current one is {current}: the saved state" in message
