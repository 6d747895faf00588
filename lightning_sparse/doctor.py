"""Describe this machine and, between workers, their link: ``python -m lightning_sparse.doctor``.

    python -m lightning_sparse.doctor                                           (this machine)
    torchrun --nproc-per-node 2 -m lightning_sparse.doctor                      (workers on one)
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d -m lightning_sparse.doctor

With several workers it measures the link between them and estimates the time of an exchange for a model with so many
``--parameters`` at a ``--density``.
"""

import argparse
import os
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse._version import __version__
from lightning_sparse.exchange.estimate import estimate, gbit
from lightning_sparse.kernels import is_available, native

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "OMP_NUM_THREADS")
LARGE_BYTES = 25 * 2**20
"""One of DDP's buckets."""
LARGE_ROUNDS, SMALL_ROUNDS = 5, 20


class LinkSpeed(NamedTuple):
    """The speed of a dense all-reduce.

    Attributes:
        gbit_s: rate at which a worker receives a large tensor, in Gbit/s: that of its link, if the link limits it.
        round_seconds: time for a tiny tensor, the latency of messages.
    """

    gbit_s: float
    round_seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the description, and between workers the estimate, on rank 0."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_sparse.doctor",
        description="What this machine has and, started by torchrun, how fast the link between workers is.",
    )
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of the model to speak of (100,000,000)")
    parser.add_argument("--density", type=float, default=0.001, help="share of coordinates to send (0.001)")
    options = parser.parse_args(arguments)
    if options.parameters < 1:
        parser.error(f"--parameters must be at least 1, and is {options.parameters}")
    if not 0 < options.density <= 1:
        parser.error(f"--density must be within (0, 1], and is {options.density:g}")
    num_workers = int(os.environ.get("WORLD_SIZE", "1"))
    if num_workers == 1:
        print("\n".join(described()))
        print("One worker. Started by torchrun on several, this measures the link between them.")
        return
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        speed = measure_link(device)
        if dist.get_rank() == 0:
            print("\n".join(described()))
            print("\n".join(verdict(speed, num_workers, options.parameters, options.density, on_gpu=on_gpu)))
    finally:
        dist.destroy_process_group()


def described() -> list[str]:
    """Return a description of this machine, line by line."""
    versions = {name: _version_of(name) for name in ("torch", "lightning", "torchmetrics", "triton", "matplotlib")}
    gpus = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    lines = [
        f"lightning_sparse {__version__}",
        f"  Python {platform.python_version()}, " + ", ".join(f"{name} {number}" for name, number in versions.items()),
        f"  {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads each",
        f"  GPUs: {', '.join(gpus) or 'none'}",
        f"  host {socket.gethostname()}: {_address()}",
        *(f"  {name}={os.environ[name]}" for name in INTERFACES if name in os.environ),
        f"  process groups: {', '.join(_backends()) or 'none'}",
    ]
    if gpus:
        lines.append(f"  kernels of Triton: {'yes' if is_available(torch.device('cuda')) else 'no, so slower ones'}")
    elif native.is_native(torch.empty(0), wire_dtype=torch.float32):
        lines.append("  compiled functions for CPUs: yes")
    else:
        lines.append("  compiled functions for CPUs: no; they need a C compiler")
    return lines


def measure_link(device: torch.device) -> LinkSpeed:
    """Return the speed of the default process group: medians of the slowest worker. Collective; takes a few seconds.

    Args:
        device: of the exchanged tensors.
    """
    workers = dist.get_world_size()
    large = _all_reduce_seconds(torch.zeros(LARGE_BYTES // 4, device=device), LARGE_ROUNDS)
    small = _all_reduce_seconds(torch.zeros(1, device=device), SMALL_ROUNDS)
    slowest = torch.tensor([large, small], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    large, small = slowest.tolist()
    received = 2 * (workers - 1) / workers * LARGE_BYTES
    return LinkSpeed(8e-9 * received / max(large - small, 1e-9), small)


def verdict(speed: LinkSpeed, num_workers: int, num_elements: int, density: float, *, on_gpu: bool) -> list[str]:
    """Return the measurement between workers and an estimate from it, line by line.

    Args:
        speed: of the link.
        num_workers: n.
        num_elements: parameters of a model.
        density: share of coordinates to send, in (0, 1].
        on_gpu: whether the link was measured on GPUs.
    """
    told = estimate(num_elements, num_workers=num_workers, gbit_per_s=speed.gbit_s, density=density, on_gpu=on_gpu)
    return [
        f"Link: {gbit(speed.gbit_s)} Gbit/s to each of {num_workers} workers in an all-reduce of 26 MB; "
        f"{1e3 * speed.round_seconds:.2g} ms for an empty one. (link_gbit_s={gbit(speed.gbit_s, 2)} tells it to a "
        "strategy)",
        str(told),
        "DensityMonitor's table at the end of a fit says what your own training gains.",
    ]


def _all_reduce_seconds(tensor: Tensor, rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = perf_counter()
        dist.all_reduce(tensor)
        float(tensor[0])  # waits for the device
        taken.append(perf_counter() - begin)
    return median(taken[1:])  # the first builds connections


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _address() -> str:
    named = "name the interface that leads to other hosts, GLOO_SOCKET_IFNAME=… and NCCL_SOCKET_IFNAME=…"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"the name cannot be resolved; {named}"
    if not address.startswith("127."):
        return address
    given = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ]
    advice = f"{' and '.join(given)} says which interface to take instead" if given else named
    return f"{address}, which is this machine alone; {advice}"


def _backends() -> list[str]:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_there in there.items() if is_there]


if __name__ == "__main__":
    main()
