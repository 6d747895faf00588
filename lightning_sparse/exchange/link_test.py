"""How fast the link between workers is."""

from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LARGE_BYTES = 25 * 2**20
"""One of DDP's buckets."""
LARGE_ROUNDS, SMALL_ROUNDS = 5, 20


class LinkSpeed(NamedTuple):
    """What a dense all-reduce takes.

    Attributes:
        gbit_s: bytes that reach a worker in a large one, in Gbit/s: the rate of its link, if that is what it waits for.
        round_seconds: of a tiny one, of which all is waiting for messages.
    """

    gbit_s: float
    round_seconds: float


def measure_link(device: torch.device) -> LinkSpeed:
    """Returns how fast the default process group is: medians, of the slowest worker. Collective; a few seconds.

    Args:
        device: of the tensors that travel.
    """
    workers = dist.get_world_size()
    large = _seconds(torch.zeros(LARGE_BYTES // 4, device=device), LARGE_ROUNDS)
    small = _seconds(torch.zeros(1, device=device), SMALL_ROUNDS)
    slowest = torch.tensor([large, small], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    large, small = slowest.tolist()
    received = 2 * (workers - 1) / workers * LARGE_BYTES
    return LinkSpeed(8e-9 * received / max(large - small, 1e-9), small)


def _seconds(tensor: Tensor, rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = perf_counter()
        dist.all_reduce(tensor)
        float(tensor[0])  # waits for the device
        taken.append(perf_counter() - begin)
    return median(taken[1:])  # the first builds connections
