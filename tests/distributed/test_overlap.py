"""Early buckets travel while backward goes on: an order of events, not a time."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from lightning_sparse import HardThreshold, register_comm_hook
from tests.workers import run_workers

BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"


def _events():
    layers = [torch.nn.Linear(128, 128) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)  # more than one layer
    register_comm_hook(model, HardThreshold(threshold=1e-6), exchange="gather")
    inputs = torch.randn(4, 128)
    for _ in range(3):
        model(inputs).square().sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(inputs).square().sum().backward()
    wanted = {"c10d::send": "send", BACKWARD: "differentiate"}
    events = [(event.time_range.start, wanted[event.name]) for event in profiler.events() if event.name in wanted]
    return [kind for _, kind in sorted(events)]


def test_a_bucket_that_sends_much_is_sent_as_soon_as_it_is_ready():
    for kinds in run_workers(_events, 2):
        assert kinds.count("differentiate") == 6
        assert kinds.count("send") == 3  # of two layers each
        first = kinds.index("send")
        assert kinds[first:].count("differentiate") >= 3  # more than half of backward is still to come
        assert kinds[-1] == "send"
