"""Judges what struck workers of local training leave, by a simulation in plain tensors."""

import hashlib
from typing import Any

import torch

from tests.integration.fault_judge import File, Judge
from tests.integration.fault_training import SIZES, Layers, LocalState, first_local_state, simulate_local, step_alone
from tests.integration.fault_workers import KEY


def same(actual: Layers, expected: Layers) -> bool:
    """Whether tensors are equal to the last bit."""
    return all(name in actual and torch.equal(actual[name], expected[name]) for name in SIZES)


def momentum_of(optimizer_states: list[Any]) -> Layers:
    """A worker's, by parameter name."""
    of_optimizer = optimizer_states[0]["state"] if optimizer_states else {}
    return {
        name: of_optimizer[index]["momentum"] if index in of_optimizer else torch.zeros(SIZES[name]).double()
        for index, name in enumerate(SIZES)
    }


def own_of(content: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Returns every worker's tensors and its momentum."""
    extras = content["extras"][0] if content["extras"] else []
    return [
        (held, momentum_of(extra["optimizer_states"])) for held, extra in zip(content["workers"], extras, strict=False)
    ]


class LocalJudge(Judge):
    """What is exact: the mean of the workers' weights in each file, all that each worker has, and every resume."""

    lacking = "drifts"

    def __init__(self, case: Any) -> None:
        super().__init__(case)
        # A worker may be struck between its optimizer and the exchange.
        self.stepped = [step_alone(state, step) for step, state in enumerate(self.states[:-1])]

    def prepare(self) -> None:
        """Needs no training of its own."""

    def look_at(self, name: str, saved: dict[str, Any], problems: list[str]) -> File | None:
        weights, content = saved["state_dict"], saved.get(KEY)
        if not saved["optimizer_states"]:
            return File(name, None, saved["global_step"], "nothing yet", "")
        if content is None:
            problems.append(f"{name} has nothing under {KEY}")
            return None
        why_not = content["why_incomplete"]
        if why_not is None:
            holds = "residuals"
            step = self._check_workers(saved, name, problems)
        else:
            holds = str(why_not)
            # The mean, if all had met and one died or left while the rest was gathered.
            known = [(step, state.anchor) for step, state in enumerate(self.states)]
            known += [(step, state.mean) for step, state in enumerate(self.states)]
            step = next((step for step, layers in known if same(weights, layers)), None)
            if step is None and "changed" not in why_not and "failed" not in why_not:
                problems.append(f"{name}: the weights are no step's anchor")
            if content["workers"]:
                problems.append(f"{name} has drifts and says why it has none: {why_not}")
        digest = hashlib.sha256(repr((step, saved["global_step"], holds)).encode())
        for weight in (*weights.values(), *momentum_of(saved["optimizer_states"]).values()):
            digest.update(weight.numpy().tobytes())
        return File(name, step, saved["global_step"], holds, digest.hexdigest())

    def _check_workers(self, saved: dict[str, Any], name: str, problems: list[str]) -> int | None:
        """Returns the step of what workers have; None, as with plain ddp, where an optimizer was broken off."""
        content = saved[KEY]
        workers = [(held["weights"], momentum) for held, momentum in own_of(content)]
        known = [*enumerate(self.states), *((step + 1, state) for step, state in enumerate(self.stepped))]
        found: list[tuple[int, LocalState]] = []
        if self.case.residual_checkpoint == "mean":
            if workers:
                problems.append(f"{name} has what was not asked for")
            # An exchange leaves the mean what it is.
            found = [entry for entry in known if same(saved["state_dict"], entry[1].mean)]
        elif len(workers) != self.case.num_workers:
            problems.append(f"{name}: what {len(workers)} workers have")
        else:
            mean = LocalState({}, [weights for weights, _ in workers], []).mean
            if not same(saved["state_dict"], mean):
                problems.append(f"{name}: the weights are not the mean of the workers'")
            for entry in known:
                pairs = zip(workers, entry[1].weights, entry[1].momentum, strict=True)
                if all(same(own[0], weights) and same(own[1], momentum) for own, weights, momentum in pairs):
                    found = [entry]
        anchors = [state.anchor for _, state in found] or [state.anchor for state in self.states]
        if not any(same(content["shared"]["anchor"], anchor) for anchor in anchors):
            problems.append(f"{name}: not the anchor of the weights' step")
        return found[0][0] if found else None

    def simulate(self, saved: dict[str, Any] | None, steps: range) -> list[Any]:
        start = first_local_state(self.case.num_workers) if saved is None else self.start(saved)
        return simulate_local(start, steps, self.case.threshold)

    def start(self, saved: dict[str, Any]) -> Any:
        content, n = saved[KEY], self.case.num_workers
        weights = [saved["state_dict"]] * n
        momentum = [momentum_of(saved["optimizer_states"])] * n
        if content["why_incomplete"] is not None:
            return LocalState(saved["state_dict"], weights, momentum)
        if content["workers"]:
            weights = [held["weights"] for held, _ in own_of(content)]
            momentum = [own for _, own in own_of(content)]
        anchor = {name: content["shared"]["anchor"][name] for name in SIZES}
        return LocalState(anchor, weights, momentum)

    def check_end(self, result: dict[str, Any], rank: int, expected: Any, what: str) -> list[str]:
        problems = []
        if not same(result["weights"], expected.mean):
            problems.append(f"{what}: weights at the end are not the mean of the simulation's")
        if not same(result["residuals"], expected.anchor):
            problems.append(f"{what}: the anchor at the end is not the simulation's")
        return problems
