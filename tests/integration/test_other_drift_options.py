"""Local training that goes on with other options than it was saved with: nothing held back is lost without a word."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager
from tests.integration.hsdp_models import run_ranks
from tests.integration.test_hsdp_checkpoints import NESTEROV, train
from tests.workers import run_workers

ADAM = partial(torch.optim.Adam, lr=0.01)
SLOW = partial(torch.optim.SGD, lr=0.1, momentum=0.5)


def averager_of(module: nn.Module, **options: Any) -> SparseModelAverager:
    return SparseModelAverager(module, HardThreshold(threshold=0.5), DriftOptions(**options))


def trained(**options: Any) -> dict[str, Any]:
    """What a worker saves after it has drifted, by more and by less than the threshold."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.complex64))
    averager = averager_of(model, **options)
    with torch.no_grad():
        for _ in range(2):
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
            averager.step()
    return averager.state_dict()


def resumed(saved: dict[str, Any], **options: Any) -> tuple[dict[str, Tensor], Any, list[str]]:
    """The weights that a worker begins with, its outer optimizer, and what it was warned of."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.complex64))
    averager = averager_of(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        averager.load_state_dict(saved)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    averager.step()  # goes on
    return (
        own,
        averager._exchange.outer,
        [str(warning.message) for warning in caught if "outer" in str(warning.message)],
    )


def _kept_goes_into_the_weights() -> None:
    saved = trained(keep_drift=False)
    apart, _, _ = resumed(saved, keep_drift=False)
    within, _, _ = resumed(saved, keep_drift=True)
    kept = saved["own"]["unsent"]
    assert any(tensor.any() for tensor in kept.values())
    for name, tensor in apart.items():
        part = (
            torch.view_as_complex(kept[name].view(*tensor.shape, 2))
            if tensor.is_complex()
            else kept[name].view_as(tensor)
        )
        torch.testing.assert_close(within[name], tensor - part, rtol=0, atol=0)


def test_what_was_kept_apart_goes_into_weights_that_keep_their_drift() -> None:
    run_workers(_kept_goes_into_the_weights, 2)


def _other_outer_optimizers() -> tuple[list[str], list[str], list[str]]:
    saved = trained(outer_optimizer=NESTEROV)
    _, slow, said_of_slow = resumed(saved, outer_optimizer=SLOW)
    assert [(one["lr"], one["momentum"], one["nesterov"]) for one in slow.param_groups] == [(0.1, 0.5, False)]
    # What has gathered has been multiplied by the momentum of now, in the step after.
    momentum = saved["shared"]["outer.momentum_buffer"]
    before = torch.cat([momentum[name] for name in saved["numbers"]["layout"][0]])
    anchor = slow.param_groups[0]["params"][0]
    assert before.any()
    torch.testing.assert_close(slow.state[anchor]["momentum_buffer"], 0.5 * before)
    _, adam, said_of_adam = resumed(saved, outer_optimizer=ADAM)
    assert [float(tensor["step"]) for tensor in adam.state.values()] == [1.0] * len(adam.state)
    return said_of_slow, said_of_adam, resumed(saved)[2]


def test_an_outer_optimizer_has_the_options_of_now_and_another_begins_anew() -> None:
    for slow, adam, none in run_workers(_other_outer_optimizers, 2):
        assert slow == []
        for said, now in ((adam, "Adam, which begins anew"), (none, "none")):
            [one] = said
            assert f"optimizer is SGD, that of now {now}: what" in one


def _of_shards(folder: str, is_folder: bool) -> dict[str, Any]:
    results = {}
    for name, epochs, others in (
        ("saved", 1, {}),
        ("same", 2, {}),
        ("in the weights", 2, {"keep_drift": True}),
        ("slower", 2, {"outer_optimizer": SLOW}),
        ("Adam", 2, {"outer_optimizer": ADAM}),
        ("none", 2, {"outer_optimizer": None}),
    ):
        resume = None if name == "saved" else f"{folder}/saved.end"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lightning_sparse: the checkpoint's outer optimizer is SGD")
            results[name] = train("SparseLoCo", 2, epochs, f"{folder}/{name}", resume, is_folder, **others)
    return results


@pytest.mark.full
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_replicas_of_shards_go_on_so_too(tmp_path: Any, is_folder: bool) -> None:
    for results in run_ranks(_of_shards, 4, str(tmp_path), is_folder):
        start = {name: result["at start"] for name, result in results.items() if name != "saved"}
        own, kept = start["same"]["own"]["weights"], start["same"]["own"]["unsent"]
        assert any(tensor.any() for tensor in kept.values())
        for name, weight in own.items():
            within = start["in the weights"]["own"]["weights"][name]
            torch.testing.assert_close(within, weight - kept[name].view_as(weight), rtol=0, atol=0)
        outer = {
            name: {key: held for key, held in one["shared"].items() if key != "anchor"} for name, one in start.items()
        }
        torch.testing.assert_close(outer["slower"], outer["same"], rtol=0, atol=0)
        assert outer["same"]
        assert outer["Adam"] == outer["none"] == {}
        for result in results.values():
            assert all(weight.isfinite().all() for weight in result["model"].values())
