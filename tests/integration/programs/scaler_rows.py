"""Scaled losses: steps that an overflow skips, by optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.models import Classifier, ScaledPrecision, nesterov, sgd
from tests.integration.programs.loops import BATCHES, batches, loss_of
from tests.integration.programs.trainer import BATCHES as TRAINER_BATCHES
from tests.integration.programs.trainer import Student, fit_without_validation, recorder_of, trains
from tests.integration.programs.world import Row, Run, World

OVERFLOWS = (1, 3)
SCALE = 2.0**10


def overflowing(loss: Tensor, parameter: Tensor, index: int) -> Tensor:
    """Return a loss with an infinite gradient of this parameter on one worker."""
    return loss + parameter.sum() * float("inf") if index in OVERFLOWS and dist.get_rank() == 1 else loss


def scaled(
    make_optimizers: Callable[[Classifier], list[torch.optim.Optimizer]], num_backwards: int = 1
) -> Callable[[World], None]:
    """Return a loop in which ``last.weight`` overflows."""

    def program(world: World) -> None:
        model = Classifier()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)
        module = world.wrap(model, grad_scaler=scaler)
        optimizers = make_optimizers(model)
        world.watch(*optimizers)
        for index, batch in enumerate(batches()):
            world.run.seen["scales"].append(scaler.get_scale())
            for optimizer in optimizers:
                optimizer.zero_grad()
            for sign in (1, -1)[:num_backwards]:
                loss = loss_of(module, [sign * batch[0], batch[1]])
                world.backward(scaler.scale(overflowing(loss, model.last.weight, index)))
            for name in ("first", "last"):
                note(world, f"{name} before", getattr(model, name))
            for optimizer in optimizers:
                scaler.step(optimizer)
            for name in ("first", "last"):
                note(world, f"{name} after", getattr(model, name))
            scaler.update()

    return program


def note(world: World, what: str, layer: nn.Linear) -> None:
    world.run.seen[what].append(layer.weight.detach().clone())


def skipped(is_first_skipped: bool, runs: list[Run]) -> None:
    """Check that the overflowing layer stays unchanged, and the other layer only if it has the same optimizer."""
    for run in runs:
        stays = {
            name: list(map(torch.equal, run.seen[f"{name} before"], run.seen[f"{name} after"]))
            for name in ("first", "last")
        }
        overflows = [index in OVERFLOWS for index in range(BATCHES)]
        assert stays == {"first": overflows if is_first_skipped else [False] * BATCHES, "last": overflows}
        assert min(run.seen["scales"]) < SCALE


def single(model: Classifier) -> list[torch.optim.Optimizer]:
    return [nesterov(model.parameters())]


def fused(model: Classifier) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)]


def two(model: Classifier) -> list[torch.optim.Optimizer]:
    return [nesterov(model.first.parameters()), sgd([*model.middle.parameters(), *model.last.parameters()])]


class Overflowing(Student):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        recorder_of(self).seen["scales"].append(self.trainer.strategy.precision_plugin.scaler.get_scale())
        return overflowing(super().training_step(batch, batch_idx), self.last.weight, batch_idx)


def scaled_precision() -> dict[str, Any]:
    return {"plugins": [ScaledPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=SCALE))]}


def scale_fell(runs: list[Run]) -> None:
    for run in runs:
        assert run.seen["scales"][-1] == SCALE / 8  # the last batch overflows later
        assert len(run.stepped_on) == 2 * (TRAINER_BATCHES - 2)
        if run.kind in ("zero", "sparse"):
            assert run.non_finite == [index in OVERFLOWS for index in range(TRAINER_BATCHES)] * 2


ROWS = {
    "scaled, overflows": Row(scaled(single), partial(skipped, True), rolls_back=True),
    "scaled, one of two optimizers overflows": Row(scaled(two), partial(skipped, False), rolls_back=True),
    "scaled, fused optimizer overflows": Row(scaled(fused), partial(skipped, True), rolls_back=True),
    "scaled, two backwards before an overflow": Row(scaled(single, 2), partial(skipped, True), rolls_back=True),
    "scaled, two backwards and two optimizers": Row(scaled(two, 2), partial(skipped, False), rolls_back=True),
    **{
        f"scaled by a Trainer, overflows, {exchange}": Row(
            trains(Overflowing, scaled_precision, fit_without_validation),
            scale_fell,
            rolls_back=True,
            exchange=exchange,
        )
        for exchange in ("gather", "dense", "reduce_scatter")
    },
}
