"""Manual optimization of two adversarial networks, each with its own optimizer."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.integration.models import TwoPlayers, sgd
from tests.integration.programs.trainer import BATCHES, fit_without_validation, moved, recorder_of, trains
from tests.integration.programs.world import Row, Run


class TugOfWar(LightningModule):
    """Has constant gradients: the generator's loss moves the judge back as far as its own loss moves it forward."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.set_to_none = set_to_none
        self.generator, self.judge = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.pull = torch.linspace(0.2, 1.2, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator_optimizer, judge_optimizer = self.optimizers()
        generator_optimizer.zero_grad(set_to_none=self.set_to_none)
        self.manual_backward((self.generator * self.pull).sum() - (self.judge * self.pull).sum())
        generator_optimizer.step()
        judge_optimizer.zero_grad(set_to_none=self.set_to_none)
        self.manual_backward((self.judge * self.pull).sum())
        judge_optimizer.step()

    def configure_optimizers(self) -> Any:
        return sgd([self.generator]), sgd([self.judge])


def pulled_all_the_way(runs: list[Run]) -> None:
    pull = 2 * BATCHES * torch.linspace(0.2, 1.2, 8)
    for run in runs:
        for name in ("generator", "judge"):
            kept = torch.stack([worker.residuals.get(name, torch.zeros(8)) for worker in runs]).mean(0)
            torch.testing.assert_close(kept - run.state[name], pull)


untoggled = partial(TwoPlayers, toggles=False, zeroes_first=True)
"""Each optimizer drops the gradients that the other loss left on its parameters."""


PLAYERS = ("generator.0.weight", "judge.0.weight")
both_moved = partial(moved, 2 * 2 * BATCHES, PLAYERS)
trained_by_turns = partial(moved, 2 * (BATCHES // 2 + BATCHES // 4), PLAYERS)


class ClippedAndZeroedPlayers(TwoPlayers):
    """Clips the waiting gradient of one player between two backwards, and drops that of the other."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator_optimizer, judge_optimizer = self.optimizers()
        generator_optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.generator_loss(batch[0]))
        recorder_of(self).seen["norms"].append(nn.utils.clip_grad_norm_(self.generator.parameters(), 0.01))
        judge_optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.judge_loss(batch[0]))
        generator_optimizer.step()
        judge_optimizer.step()


def clipped_one(runs: list[Run]) -> None:
    both_moved(runs)
    for run in runs:
        assert min(run.seen["norms"]) > 0.01


class FrozenJudge(TwoPlayers):
    """Drops the gradient of the judge, and freezes it, only at the start of a batch for the judge."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator_optimizer, judge_optimizer = self.optimizers()
        self.judge.requires_grad_(True)
        if batch_idx % 2 == 0:
            self.manual_backward(self.generator_loss(batch[0]))
            if batch_idx % 4 == 2:
                generator_optimizer.step()
                generator_optimizer.zero_grad()
        else:
            self.generator.requires_grad_(False)
            judge_optimizer.zero_grad()
            self.manual_backward(self.judge_loss(batch[0]))
            judge_optimizer.step()
            self.generator.requires_grad_(True)
        self.judge.requires_grad_(False)


_unused = {"find_unused_parameters": True}
_plain = {"drive": fit_without_validation}

ROWS = {
    **{
        f"{players}, {words}": Row(
            trains(partial(make, set_to_none=none), **_plain, **options),
            check,
            threshold,
            rolls_back=True,
            leaves_out=options is _unused,
        )
        for players, make, options, check, threshold in (
            ("constant players", TugOfWar, _unused, pulled_all_the_way, 1.0),
            ("untoggled players", untoggled, _unused, both_moved, 0.01),
            ("players that reach each other", partial(untoggled, reaches_both=True), {}, both_moved, 0.01),
        )
        for none, words in ((True, "gradients dropped"), (False, "gradients zeroed"))
    },
    "one player clipped, the other zeroed": Row(
        trains(ClippedAndZeroedPlayers, **_plain, **_unused), clipped_one, 0.01, rolls_back=True, leaves_out=True
    ),
    "toggled optimizers, zeroed before": Row(
        trains(partial(TwoPlayers, zeroes_first=True), **_plain, **_unused), both_moved, 0.01, leaves_out=True
    ),
    "toggled optimizers": Row(trains(TwoPlayers, **_unused), both_moved, 0.01, leaves_out=True),
    "frozen between": Row(
        trains(FrozenJudge, **_plain, **_unused), trained_by_turns, 0.01, rolls_back=True, leaves_out=True
    ),
}
