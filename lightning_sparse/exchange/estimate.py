"""Estimates the cost of an exchange before a run."""

from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil, inf
from typing import get_args

from torch import nn

from lightning_sparse.exchange.routes.cost_model import Costs, Route, speeds
from lightning_sparse.exchange.wire import DTYPES, ValueDtype
from lightning_sparse.sparsifiers.checks import (
    is_number,
    require_count,
    require_density,
    require_flag,
    require_link,
    require_word,
)

DENSITIES = [digits * 10.0**power for power in range(-8, -1) for digits in range(10, 100)]
"""Densities with two digits, ascending."""
BUCKET_BYTES = 25 * 2**20
"""Default size of DDP's buckets."""
CPU_DENSE_ELEMENT, CPU_SPARSE_ELEMENT = 0.7e-9, 1.6e-9
"""Additional seconds per element relative to a step without DDP: of DDP without an exchange, and of a threshold that
hardly any coordinate reaches (benchmarks/results/step_time_bucket_view.json, one core of an AMD EPYC)."""
GPU_SPARSE_ELEMENT = 6e-12
"""Seconds per element to read gradient and residual and write the residual at 2 TB/s. An H200 takes 3.4e-12."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a dense and a sparse exchange per step, without overlap with backward.

    Attributes:
        num_elements: d, of all trained parameters.
        num_workers: n.
        link_gbit_s: rate of a worker's link, in one direction.
        density: share of sent coordinates.
        dense_seconds: seconds per step of a dense exchange in float32.
        sparse_seconds: seconds per step of a sparse exchange.
        dense_bytes: bytes that reach a worker per step in a dense exchange.
        sparse_bytes: bytes that reach a worker per step in a sparse exchange.
        break_even: the density up to which a sparse exchange costs less than a dense one, in 0…1, with two digits.
        compute_seconds: time of a step without any exchange; None if unknown.
    """

    num_elements: int
    num_workers: int
    link_gbit_s: float
    density: float
    dense_seconds: float
    sparse_seconds: float
    dense_bytes: float
    sparse_bytes: float
    break_even: float
    compute_seconds: float | None = None

    @property
    def times_faster(self) -> float:
        """The speedup of a step, or of the exchange alone if ``compute_seconds`` is unknown."""
        compute = self.compute_seconds or 0.0
        return (compute + self.dense_seconds) / (compute + self.sparse_seconds)

    def __str__(self) -> str:
        """Return the verdict in a few sentences."""
        sentences = [
            f"{self.num_elements:,} parameters, {self.num_workers} workers, {gbit(self.link_gbit_s)} Gbit/s each: "
            f"without overlap with backward, a dense exchange takes {duration(self.dense_seconds)}, and one at a "
            f"density of {100 * self.density:g} % takes {duration(self.sparse_seconds)}."
        ]
        if self.compute_seconds is not None:
            dense, sparse = self.compute_seconds + self.dense_seconds, self.compute_seconds + self.sparse_seconds
            sentences.append(
                f"With {duration(self.compute_seconds)} of computation, a dense step takes {duration(dense)} and a "
                f"sparse step {duration(sparse)}. The exchange is {100 * self.dense_seconds / dense:.0f} % of the "
                f"dense step, and a sparse step is {self.times_faster:.2g} times as fast."
            )
        if self.break_even == 0:
            sentences.append("A dense exchange is fastest at any density: use strategy='ddp'.")
        else:
            sentences.append(f"Densities above {float(f'{100 * self.break_even:.2g}'):g} % gain nothing.")
        return " ".join(sentences)


def estimate(
    model: nn.Module | int,
    *,
    num_workers: int,
    link_gbit_s: float,
    density: float = 0.001,
    value_dtype: ValueDtype = "float32",
    compute_seconds: float | None = None,
    on_gpu: bool = False,
) -> Estimate:
    """Estimate the cost of a dense and a sparse exchange.

    Uses the cost model of ``exchange="auto"``, whose constants are measured on CPUs and predicted on GPUs. If the
    exchange overlaps with backward, the result is an upper bound.

    Args:
        model: the module, whose parameters with ``requires_grad`` are exchanged; or the number of their elements.
        num_workers: n, at least 2.
        link_gbit_s: rate at which a worker receives, above 0: that of a node's network card, divided by the ranks of a
            node if replicas are sharded.
        density: share of sent coordinates, in (0, 1].
        value_dtype: the dtype of values in payloads.
        compute_seconds: time of a step without any exchange, if it is known.
        on_gpu: whether gradients are on GPUs.

    Raises:
        ValueError: a number is outside its range, or layers of the model are not initialised.
        TypeError: ``model`` is not a module or a number.

    Example:
        >>> result = estimate(11_173_962, num_workers=8, link_gbit_s=1, compute_seconds=0.06)
        >>> round(result.dense_seconds, 2), round(result.sparse_seconds, 3), round(result.times_faster)
        (0.63, 0.023, 8)
    """
    require_count("num_workers", num_workers, least=2, instead=": a single worker exchanges nothing")
    require_link(link_gbit_s)
    if isinstance(model, bool) or not isinstance(model, (int, nn.Module)):
        raise TypeError(f"Invalid {model=}. Must be a module or the number of its parameters.")
    if isinstance(model, nn.Module) and any(map(nn.parameter.is_lazy, model.parameters())):
        raise ValueError("The model has uninitialised layers. Run a batch through it first.")
    if compute_seconds is not None and (not is_number(compute_seconds) or not 0 <= compute_seconds < inf):
        raise ValueError(f"Invalid {compute_seconds=}. Must be at least 0 and finite, in seconds.")
    require_word("value_dtype", value_dtype, get_args(ValueDtype))
    require_density(density, "one in a thousand")
    require_flag("on_gpu", on_gpu)
    trained = [] if isinstance(model, int) else [weight for weight in model.parameters() if weight.requires_grad]
    sizes = (weight.numel() * (2 if weight.is_complex() else 1) for weight in trained)
    num_elements = model if isinstance(model, int) else sum(sizes)
    if num_elements < 1:
        raise ValueError(f"Got {num_elements} parameters to exchange. Must be at least 1: check requires_grad.")
    rates = speeds(link_gbit_s, on_gpu=on_gpu)
    dense_element, sparse_element = (0.0, GPU_SPARSE_ELEMENT) if on_gpu else (CPU_DENSE_ELEMENT, CPU_SPARSE_ELEMENT)
    whole = Costs(num_workers, num_elements, DTYPES[value_dtype].itemsize, sum_bytes=4)
    received = whole.received_bytes(density * num_elements, density * num_elements / num_workers)
    num_buckets = ceil(4 * num_elements / BUCKET_BYTES)
    bucket = replace(whole, num_elements=num_elements // num_buckets)

    def taken(share: float) -> dict[Route, float]:
        selected = share * bucket.num_elements
        return bucket.seconds(selected, selected / num_workers, rates)

    def sparse_seconds(share: float) -> float:
        return sparse_element * num_elements + num_buckets * min(taken(share).values())

    times = taken(density)
    route = min(times, key=lambda route: times[route])
    dense_seconds = dense_element * num_elements + num_buckets * times["dense"]
    gaining = list(takewhile(lambda share: sparse_seconds(share) < dense_seconds, DENSITIES))
    return Estimate(
        num_elements=num_elements,
        num_workers=num_workers,
        link_gbit_s=float(link_gbit_s),
        density=density,
        dense_seconds=dense_seconds,
        sparse_seconds=sparse_seconds(density),
        dense_bytes=received["dense"],
        sparse_bytes=received[route],
        break_even=gaining[-1] if gaining else 0.0,
        compute_seconds=compute_seconds,
    )


def duration(seconds: float) -> str:
    """Return a time with three digits, in a suitable unit.

    >>> duration(4.2e-5), duration(0.0765), duration(2.09)
    ('42 µs', '76.5 ms', '2.09 s')
    """
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def gbit(rate: float, digits: int = 3) -> str:
    """Return a rate with at most ``digits`` digits, without an exponent.

    >>> gbit(0.9482), gbit(2400.0), gbit(2400.0, digits=1)
    ('0.948', '2400', '2000')
    """
    return f"{float(f'{rate:.{digits}g}'):g}"
