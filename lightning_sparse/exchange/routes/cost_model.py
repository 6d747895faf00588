"""Forecast the capacities of payloads and choose the fastest route.

Every worker and every repeated run must get the same result, so this module does not measure time. Forecasts and costs
depend on the headers of earlier steps and on the given link.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_sparse.exchange.payload import aligned

Route = Literal["gather", "reduce_scatter", "dense"]

MIN_CAPACITY = 16
MEAN_WEIGHT = 0.2
DEVIATION_WEIGHT = 0.1
SLACK_DEVIATIONS = 2.0
"""Margin in mean absolute deviations. With Gaussian noise, it is 1.6 standard deviations: one step in 20 overflows."""
CPU_GBIT_S = 3.8
"""The assumed rate of a CPU worker's link. At this low rate, ``auto`` also sends buckets with densities of 9 to 14 %
sparsely. That saves bytes, but may take longer on a faster link."""
INSIDE_GBIT_S, BETWEEN_GBIT_S = 2400.0, 100.0
"""The assumed rates of a GPU's link: NVLink if all workers share a node, else a network of 100 Gbit/s. Sparse routes
are chosen only if they are faster even at these rates."""
GLOO_BYTE = 1.3e-9
"""Seconds that Gloo takes per received byte if the link is not slower. Gloo works while the link transfers, so the two
do not add up (benchmarks/results/step_time_bucket_view.json, DDP at four rates)."""
GATHER_LAUNCHES, REDUCE_SCATTER_LAUNCHES = 2, 46
"""Additional kernels per bucket relative to the dense route (tests/distributed/exchange/test_launches.py)."""


class Forecast(NamedTuple):
    """A forecast of a count that all workers see in every step.

    The capacity is the larger of running mean and last count, plus twice the running mean deviation. A steady count
    needs almost no padding. A varying count sometimes overflows, which costs a round but stays correct. Rarer overflows
    would cost more bytes than they save (docs/evidence/performance.md). A count that halves or doubles restarts the
    forecast.
    """

    last: int  # the count of the last step
    mean: float  # the running mean of the counts
    deviation: float  # the running mean of their absolute deviations from it

    @classmethod
    def first(cls, count: int) -> "Forecast":
        """Return the forecast after the first count."""
        return cls(count, float(count), count / 16)

    def after(self, count: int) -> "Forecast":
        """Return the forecast after another count."""
        if not self.mean / 2 <= count <= 2 * self.mean:
            return Forecast.first(count)
        mean = self.mean + MEAN_WEIGHT * (count - self.mean)
        deviation = self.deviation + DEVIATION_WEIGHT * (abs(count - self.mean) - self.deviation)
        return Forecast(count, mean, deviation)

    def capacity(self, limit: int) -> int:
        """Return the capacity for the next step, a multiple of CAPACITY_STEP; at most ``limit`` rounded up."""
        padded = max(self.mean, self.last) + SLACK_DEVIATIONS * self.deviation
        return aligned(min(max(MIN_CAPACITY, round(padded)), limit))


class Speeds(NamedTuple):
    """Seconds for the parts of an exchange, the same on every worker."""

    byte: float  # for a byte to arrive
    select: float  # to select and pack a coordinate
    add: float  # to add a received coordinate
    place: float  # to put received averages in place, per element of the bucket, if they are many
    round: float  # for a round of messages, however small they are
    payload: float  # to start adding a payload
    launch: float  # to prepare and launch a kernel


def speeds(link_gbit_s: float | None, *, on_gpu: bool, is_one_node: bool = False) -> Speeds:
    """Return measured speeds of CPUs, or mostly predicted speeds of GPUs.

    CPU: 34 ns to select and 8 ns to add a coordinate, at a density of 20 % without a compiler
    (benchmarks/selection.py).
    GPU: about 100 bytes of memory traffic per coordinate, 60 µs of the host per launch, Python and operators included,
    and 4 µs for each payload's chain of reads (docs/evidence/performance.md).
    """
    if on_gpu:
        link = link_gbit_s or (INSIDE_GBIT_S if is_one_node else BETWEEN_GBIT_S)
        return Speeds(8e-9 / link, 4e-11, 4e-11, 4e-11, 6e-6, 4e-6, 6e-5)
    return Speeds(max(GLOO_BYTE, 8e-9 / (link_gbit_s or CPU_GBIT_S)), 34e-9, 8e-9, 1.5e-9, 70e-6, 0.0, 0.0)


@dataclass(frozen=True)
class Costs:
    """The received bytes and the time of each route for a bucket."""

    num_workers: int  # n
    num_elements: int  # d of the bucket
    value_bytes: int  # of a value on the wire
    sum_bytes: int  # of an element of the averaged gradient, which dense routes send
    fixed_bytes: int = 0  # of a payload without coordinates
    dense_element_bytes: int = 0  # sent and received per element on the dense route; 0: twice ``sum_bytes``

    def received_bytes(self, selected: float, largest_slice: float) -> dict[Route, float]:
        """Return the bytes that reach a worker on each route; see ``seconds`` for the arguments."""
        n, coordinate = self.num_workers, self.value_bytes + 2
        union = self.independent_union(selected)
        slice_bytes = self.fixed_bytes / n + largest_slice * coordinate
        sums_bytes = min(union * (self.sum_bytes + 2), self.num_elements * self.sum_bytes)  # sparse or dense
        return {
            "dense": (n - 1) / n * self.num_elements * (self.dense_element_bytes or 2 * self.sum_bytes),
            "gather": (n - 1) * (self.fixed_bytes + selected * coordinate),
            "reduce_scatter": (n - 1) * slice_bytes + (n - 1) / n * sums_bytes,
        }

    def independent_union(self, selected: float) -> float:
        """Return the expected size of the union of independent selections."""
        return self.num_elements * (1 - (1 - min(selected / self.num_elements, 1.0)) ** self.num_workers)

    def cheapest(self, selected: float, largest_slice: float, speeds: Speeds) -> Route:
        """Return the fastest route; see ``seconds``."""
        taken = self.seconds(selected, largest_slice, speeds)
        return min(taken, key=lambda route: taken[route])

    def seconds(self, selected: float, largest_slice: float, speeds: Speeds) -> dict[Route, float]:
        """Return the seconds of each route for the expected coordinates of a worker.

        Args:
            selected: the largest number of coordinates of a worker.
            largest_slice: the largest number of coordinates of a worker in a slice.
            speeds: see ``speeds``.
        """
        n, byte, launch = self.num_workers, speeds.byte, speeds.launch
        received = self.received_bytes(selected, largest_slice)
        taken: dict[Route, float] = {
            "dense": 2 * (n - 1).bit_length() * speeds.round + byte * received["dense"],
            "gather": speeds.round
            + byte * received["gather"]
            + selected * (speeds.select + n * speeds.add)
            + n * speeds.payload
            + GATHER_LAUNCHES * launch,
        }
        if n > 2:
            # Dense sums are copied into place, which costs only memory traffic.
            union = self.independent_union(selected)
            is_sparse = union * (self.sum_bytes + 2) < self.num_elements * self.sum_bytes
            taken["reduce_scatter"] = (
                3 * speeds.round  # coordinates, headers and sizes, averages
                + byte * received["reduce_scatter"]
                + selected * speeds.select
                + n * largest_slice * speeds.add
                + (min(union * speeds.add, self.num_elements * speeds.place) if is_sparse else 0)
                + n * speeds.payload
                + REDUCE_SCATTER_LAUNCHES * launch
            )
        return taken
