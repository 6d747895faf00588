"""What each route costs: bytes that reach a worker, and which route is cheapest. From shared numbers only.

Every worker must come to the same choice, and a repeated run too, so nothing is timed: the choice follows from the
numbers of the last step's headers.
"""

from dataclasses import dataclass
from typing import Literal

Route = Literal["gather", "reduce_scatter", "dense"]

CPU_ENCODE_BYTES = 16.0
CPU_DECODE_BYTES = 4.0
"""What selecting and packing a coordinate, and adding a received one, cost on a CPU, in bytes that travel in that time:
34 ns and 8 ns at a density of 20 % (benchmarks/selection.py prints the times), where a Gloo all-reduce needs 2.1 ns a
byte at 10 Gbit/s. On a slower network the same coordinates weigh less, so that there a bucket goes dense earlier than
it had to. That keeps a step from ever being much slower than plain DDP's, and costs some of what could be saved above a
density of 10 %."""
GPU_BYTES = 0.25
"""The same on a GPU, whose memory is two orders of magnitude faster than a network."""
ROUND_BYTES = 32_768
"""What a round of messages costs however small they are, likewise: 50 µs at 5 Gbit/s."""


@dataclass(frozen=True)
class Costs:
    """Bytes that reach one worker on each route for one bucket, and the costs by which routes are compared.

    Args:
        num_workers: n.
        num_elements: d of the bucket.
        value_bytes: bytes of a value on the wire.
        sum_bytes: bytes of an element of the averaged gradient, which dense routes send.
        fixed_bytes: bytes of a payload without coordinates.
    """

    num_workers: int
    num_elements: int
    value_bytes: int
    sum_bytes: int
    fixed_bytes: int = 0

    def gather_bytes(self, selected: float) -> float:
        """The payloads of all others, with so many coordinates each."""
        return (self.num_workers - 1) * (self.fixed_bytes + selected * (self.value_bytes + 2))

    def dense_bytes(self) -> float:
        """What a ring all-reduce brings to each worker."""
        return 2 * (self.num_workers - 1) / self.num_workers * self.num_elements * self.sum_bytes

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

    def cheapest(self, selected: float, largest_slice: float, *, on_gpu: bool) -> Route:
        """Returns the route that costs least for the coordinates expected of a worker.

        Args:
            selected: coordinates of the worker that selects most.
            largest_slice: the most that any worker has for any slice.
            on_gpu: whether tensors are on a GPU.
        """
        n = self.num_workers
        encode, decode = (GPU_BYTES, GPU_BYTES) if on_gpu else (CPU_ENCODE_BYTES, CPU_DECODE_BYTES)
        union = self.independent_union(selected)
        costs: dict[Route, float] = {
            "dense": 2 * (n - 1).bit_length() * ROUND_BYTES + self.dense_bytes(),
            "gather": ROUND_BYTES + self.gather_bytes(selected) + selected * (encode + n * decode),
        }
        if n > 2:
            # Sums that travel densely are copied into place, at the price of memory alone.
            is_sparse = union * (self.sum_bytes + 2) < self.num_elements * self.sum_bytes
            costs["reduce_scatter"] = (
                3 * ROUND_BYTES  # coordinates, headers and sizes, averages
                + self.scatter_bytes(largest_slice)
                + self.slices_bytes(union)
                + selected * encode
                + (n * largest_slice + (union if is_sparse else 0)) * decode
            )
        return min(costs, key=lambda route: costs[route])
