"""The mean of the workers' optimizers."""

import torch

from lightning_sparse.checkpointing.saving import mean_of


def test_what_only_some_workers_have_trained_is_in_the_mean_of_optimizers():
    def state(numbers):
        moments = {place: {"exp_avg": torch.full((2,), value)} for place, value in numbers.items()}
        return [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}]

    (mean,) = mean_of([state({0: 1.0}), state({0: 3.0, 1: 5.0}), state({2: 7.0})])
    assert {place: one["exp_avg"].tolist() for place, one in mean["state"].items()} == {
        0: [2.0, 2.0],
        1: [5.0, 5.0],
        2: [7.0, 7.0],
    }
    assert mean["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]
