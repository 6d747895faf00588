"""Manual optimization of two adversarial networks, each with its own optimizer."""

from functools import partial

from torch import Tensor, nn

from tests.integration.models import TwoPlayers
from tests.integration.programs.trainer import BATCHES, fit_without_validation, moved, recorder_of, trains
from tests.integration.programs.world import Row, Run

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
            both_moved,
            0.01,
            rolls_back=True,
            leaves_out=options is _unused,
        )
        for players, make, options in (
            ("untoggled players", untoggled, _unused),
            ("players that reach each other", partial(untoggled, reaches_both=True), {}),
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
