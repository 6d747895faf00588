"""Describe this machine and, between workers, their link: ``python -m lightning_sparse.doctor``.

    python -m lightning_sparse.doctor                                           (this machine)
    torchrun --nproc-per-node 2 -m lightning_sparse.doctor                      (two workers on it)
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d -m lightning_sparse.doctor

With several workers, it measures the link between them. It then estimates the time of an exchange for a model with
``--parameters`` elements at a ``--density``.
"""

import argparse
import os
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import distributions
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse._version import __version__
from lightning_sparse.exchange.estimate import BUCKET_BYTES, Estimate, estimate, gbit
from lightning_sparse.kernels import native
from lightning_sparse.kernels.launching import is_available

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
VARIABLES = (*INTERFACES, "NCCL_IB_DISABLE", "OMP_NUM_THREADS")
LARGE_ROUNDS, SMALL_ROUNDS = 5, 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the description of this machine and, with several workers, the estimate, on rank 0."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_sparse.doctor",
        description="Describe this machine and, with several workers of torchrun, measure their link.",
    )
    parser.add_argument(
        "--parameters", type=int, default=100_000_000, help="elements of the model (default: 100,000,000)"
    )
    parser.add_argument("--density", type=float, default=0.001, help="share of coordinates to send (default: 0.001)")
    options = parser.parse_args(arguments)
    if options.parameters < 1:
        parser.error(f"Invalid --parameters={options.parameters}. Must be at least 1.")
    if not 0 < options.density <= 1:
        parser.error(f"Invalid --density={options.density:g}. Must be within (0, 1].")
    num_workers = int(os.environ.get("WORLD_SIZE", "1"))
    if num_workers == 1:
        print("\n".join(describe_machine()))
        print("This is a single worker. Start several with torchrun to measure the link between them.")
        return
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        gbit_s, round_seconds = measure_link(device)
        if dist.get_rank() == 0:
            print("\n".join(describe_machine()))
            prediction = estimate(
                options.parameters, num_workers=num_workers, link_gbit_s=gbit_s, density=options.density, on_gpu=on_gpu
            )
            print(describe_link(prediction, round_seconds))
    finally:
        dist.destroy_process_group()


def describe_machine() -> list[str]:
    """Return the lines of a description of this machine."""
    installed = {package.name: package.version for package in distributions()}
    packages = ("torch", "lightning", "triton", "matplotlib")
    versions = ", ".join(f"{name} {installed.get(name, '(not installed)')}" for name in packages)
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    gpus = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    if gpus:
        has_triton = is_available(torch.device("cuda"))
        kernels = f"Triton kernels: {'yes' if has_triton else 'no, slower operations replace them'}"
    else:
        is_native = native.is_native(torch.empty(0), wire_dtype=torch.float32)
        kernels = f"compiled functions for CPUs: {'yes' if is_native else 'no, install a C compiler'}"
    return [
        f"lightning_sparse {__version__}",
        f"  Python {platform.python_version()}, {versions}",
        f"  {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use",
        f"  GPUs: {', '.join(gpus) or 'none'}",
        f"  host {socket.gethostname()}: {_address()}",
        *(f"  {name}={os.environ[name]}" for name in VARIABLES if name in os.environ),
        f"  process groups: {', '.join(backends) or 'none'}",
        f"  {kernels}",
    ]


def measure_link(device: torch.device) -> tuple[float, float]:
    """Measure rate and latency of the default process group. Collective.

    The rate, in Gbit/s, is that at which a worker receives a large tensor in an all-reduce. It is the link's rate if
    the link is the bottleneck. The latency, in seconds, is that of one element. Both are of the slowest worker.

    Args:
        device: the device of the exchanged tensors.
    """
    workers = dist.get_world_size()
    large = _all_reduce_seconds(torch.zeros(BUCKET_BYTES // 4, device=device), LARGE_ROUNDS)
    small = _all_reduce_seconds(torch.zeros(1, device=device), SMALL_ROUNDS)
    slowest = torch.tensor([large, small], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    large, small = slowest.tolist()
    received = 2 * (workers - 1) / workers * BUCKET_BYTES
    return 8e-9 * received / max(large - small, 1e-9), small


def describe_link(prediction: Estimate, round_seconds: float) -> str:
    """Return the text of the measurement and of an estimate from it; ``round_seconds`` is the latency."""
    rate = prediction.link_gbit_s
    return (
        f"Link: {gbit(rate)} Gbit/s to each of {prediction.num_workers} workers in an all-reduce of 26 MB; "
        f"{1e3 * round_seconds:.2g} ms for a single element. Pass link_gbit_s={gbit(rate, 2)} to a strategy; "
        "to a sharded one, divided by the ranks per node.\n"
        f"{prediction}\n"
        "After a fit, the table of DensityMonitor shows the time of a step: compare it with strategy='ddp'."
    )


def _all_reduce_seconds(tensor: Tensor, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = perf_counter()
        dist.all_reduce(tensor)
        float(tensor[0])  # waits for the device
        seconds.append(perf_counter() - begin)
    return median(seconds[1:])  # the first round opens connections


def _address() -> str:
    remedy = "set the interface to other hosts, GLOO_SOCKET_IFNAME=… and NCCL_SOCKET_IFNAME=…"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"the name cannot be resolved; {remedy}"
    if not address.startswith("127."):
        return address
    given = [name for name in INTERFACES if name in os.environ]
    advice = f"{' and '.join(given)} selects another interface" if given else remedy
    return f"{address}, which other hosts cannot reach; {advice}"


if __name__ == "__main__":
    main()
