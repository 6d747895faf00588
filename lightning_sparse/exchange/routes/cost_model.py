"""What each route costs: bytes that reach a worker, and which route is fastest. From shared numbers only.

Every worker must come to the same choice, and a repeated run too, so nothing is timed: the choice follows from the
numbers of the last step's headers, and from what is said of the link.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Route = Literal["gather", "reduce_scatter", "dense"]

INSIDE_GBIT_S, BETWEEN_GBIT_S = 2400.0, 100.0
"""What a GPU's link is taken for where it is not said: NVLink where all workers share a node, and a network of 100
Gbit/s where they do not. Sparse routes are then chosen only where they win even there."""
GATHER_LAUNCHES, REDUCE_SCATTER_LAUNCHES = 2, 46
"""Kernels of a bucket beyond those of the dense route (tests/distributed/test_launches.py)."""


def require_link(link_gbit_s: float | None) -> None:
    """Raises ValueError where this is no rate of a link."""
    is_number = isinstance(link_gbit_s, (int, float)) and not isinstance(link_gbit_s, bool)
    if link_gbit_s is not None and not (is_number and 1e-6 <= link_gbit_s <= 1e6):
        raise ValueError(
            f"Invalid {link_gbit_s=}. Must be a worker's link in Gbit/s, within 1e-6 and 1e6, for example 10; or None."
        )


class Speeds(NamedTuple):
    """Seconds that parts of an exchange take. The same on every worker, whatever its machine is like.

    Attributes:
        byte: to arrive.
        select: a coordinate that is selected and packed.
        add: a received coordinate that is added.
        round: a round of messages, however small they are.
        payload: to begin with each payload that is added, one after the other.
        launch: a kernel.
    """

    byte: float
    select: float
    add: float
    round: float
    payload: float
    launch: float


def speeds(link_gbit_s: float | None, *, on_gpu: bool, is_one_node: bool = False) -> Speeds:
    """Returns what is known of CPUs, measured, and of GPUs, predicted.

    CPU: 34 ns and 8 ns a coordinate at a density of 20 % without a compiler (benchmarks/selection.py), and 1.3 ns a
    byte for a Gloo all-reduce beside the link's own time. Not said, the link is one of 10 Gbit/s: on a slower one a
    bucket then goes dense earlier than it had to, above a density of 10 %, but no step is ever much slower than plain
    DDP's. GPU: about 100 bytes of memory traffic a coordinate, 4 µs a launch, and as long for each payload's chain of
    reads (docs/performance.md).

    Args:
        link_gbit_s: of a worker's link, in one direction.
        on_gpu: whether tensors are on a GPU.
        is_one_node: whether all workers share one.
    """
    if on_gpu:
        link = link_gbit_s or (INSIDE_GBIT_S if is_one_node else BETWEEN_GBIT_S)
        return Speeds(8e-9 / link, 4e-11, 4e-11, 6e-6, 4e-6, 4e-6)
    return Speeds(1.3e-9 + 8e-9 / (link_gbit_s or 10.0), 34e-9, 8e-9, 70e-6, 0.0, 0.0)


@dataclass(frozen=True)
class Costs:
    """Bytes that reach one worker on each route for one bucket, and the time by which routes are compared.

    Args:
        num_workers: n.
        num_elements: d of the bucket.
        value_bytes: bytes of a value on the wire.
        sum_bytes: bytes of an element of the averaged gradient, which dense routes send.
        fixed_bytes: bytes of a payload without coordinates.
        dense_element_bytes: bytes of an element on the dense route, there and back; 0 for twice those of a sum.
    """

    num_workers: int
    num_elements: int
    value_bytes: int
    sum_bytes: int
    fixed_bytes: int = 0
    dense_element_bytes: int = 0

    def gather_bytes(self, selected: float) -> float:
        """The payloads of all others, with so many coordinates each."""
        return (self.num_workers - 1) * (self.fixed_bytes + selected * (self.value_bytes + 2))

    def dense_bytes(self) -> float:
        """What a ring all-reduce, or whatever the dense route is, brings to each worker."""
        element = self.dense_element_bytes or 2 * self.sum_bytes
        return (self.num_workers - 1) / self.num_workers * self.num_elements * element

    def scatter_bytes(self, largest_slice: float) -> float:
        """First half of a sparse reduce-scatter: from each other worker the coordinates of this worker's slice."""
        return (self.num_workers - 1) * (self.fixed_bytes / self.num_workers + largest_slice * (self.value_bytes + 2))

    def slices_bytes(self, union: float) -> float:
        """Second half: the summed slices of all others, sparse or dense, whichever is less.

        Args:
            union: coordinates that any worker selected, in the whole bucket.
        """
        others = (self.num_workers - 1) / self.num_workers
        return others * min(union * (self.sum_bytes + 2), self.num_elements * self.sum_bytes)

    def independent_union(self, selected: float) -> float:
        """Coordinates that any worker selects, if each selects so many independently of the others: the most likely."""
        if self.num_elements == 0:
            return 0.0
        return self.num_elements * (1 - (1 - min(selected / self.num_elements, 1.0)) ** self.num_workers)

    def cheapest(self, selected: float, largest_slice: float, speeds: Speeds) -> Route:
        """Returns the route that takes least for the coordinates expected of a worker; see ``seconds``."""
        taken = self.seconds(selected, largest_slice, speeds)
        return min(taken, key=lambda route: taken[route])

    def seconds(self, selected: float, largest_slice: float, speeds: Speeds) -> dict[Route, float]:
        """Returns the seconds that each route takes for the coordinates expected of a worker.

        Args:
            selected: coordinates of the worker that selects most.
            largest_slice: the most that any worker has for any slice.
            speeds: see ``speeds``.
        """
        n, byte, launch = self.num_workers, speeds.byte, speeds.launch
        union = self.independent_union(selected)
        taken: dict[Route, float] = {
            "dense": 2 * (n - 1).bit_length() * speeds.round + byte * self.dense_bytes(),
            "gather": speeds.round
            + byte * self.gather_bytes(selected)
            + selected * (speeds.select + n * speeds.add)
            + n * speeds.payload
            + GATHER_LAUNCHES * launch,
        }
        if n > 2:
            # Sums that travel densely are copied into place, at the price of memory alone.
            is_sparse = union * (self.sum_bytes + 2) < self.num_elements * self.sum_bytes
            taken["reduce_scatter"] = (
                3 * speeds.round  # coordinates, headers and sizes, averages
                + byte * (self.scatter_bytes(largest_slice) + self.slices_bytes(union))
                + selected * speeds.select
                + (n * largest_slice + (union if is_sparse else 0)) * speeds.add
                + n * speeds.payload
                + REDUCE_SCATTER_LAUNCHES * launch
            )
        return taken

    def break_even_density(self, speeds: Speeds) -> float:
        """Returns the density above which the dense route is the cheapest, in 0…1; 0 where it always is.

        Args:
            speeds: see ``speeds``.
        """
        sparse, dense = 0.0, 1.0
        for _ in range(30):
            density = (sparse + dense) / 2
            selected = density * self.num_elements
            if self.cheapest(selected, selected / self.num_workers, speeds) == "dense":
                dense = density
            else:
                sparse = density
        return sparse
