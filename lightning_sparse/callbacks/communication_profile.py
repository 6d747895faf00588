"""Whether sparse exchange pays on this machine: the times of steps that were measured, and what follows from them."""

from dataclasses import dataclass

from lightning_sparse.exchange.cost_model import Costs, speeds
from lightning_sparse.exchange.estimate import duration

NOT_WORTH_IT = 1.03
"""So many times as fast is within what such a measurement varies."""
FASTEST_LINK = 1000.0
"""In Gbit/s: what a link is taken for whose bytes cost nothing that could be measured."""


@dataclass(frozen=True)
class CommunicationProfile:
    """Seconds of an optimizer step, by how it exchanges: medians, of the slowest worker.

    Attributes:
        compute_seconds: without any exchange.
        dense_seconds: with everything sent, which takes what plain DDP takes, up to 5 %.
        sparse_seconds: at the density.
        density: that was sent in the sparse steps, in 0…1.
        num_elements: d.
        num_workers: n.
        payload_element_bytes: bytes of a coordinate that is sent.
        exchanges_per_step: 1 for gradients; less where only every so manieth step exchanges.
        on_gpu: whether it was measured on GPUs.
        spread_seconds: interquartile range of a step, the largest of the three.
        asked_density: the density that was asked for; None for that which was sent.
    """

    compute_seconds: float
    dense_seconds: float
    sparse_seconds: float
    density: float
    num_elements: int
    num_workers: int
    payload_element_bytes: float
    exchanges_per_step: float = 1.0
    on_gpu: bool = False
    spread_seconds: float = 0.0
    asked_density: float | None = None

    @property
    def exchange_share(self) -> float:
        """Share of a dense step that is exchange which nothing hides, in 0…1."""
        return max(0.0, 1 - self.compute_seconds / self.dense_seconds)

    @property
    def says_something(self) -> bool:
        """Whether steps vary by less than a dense exchange costs, and none is the fastest."""
        return self.dense_seconds - self.compute_seconds > self.spread_seconds

    @property
    def times_faster(self) -> float:
        """How many times as fast a sparse step is as a dense one."""
        return self.dense_seconds / self.sparse_seconds

    @property
    def link_gbit_s(self) -> float:
        """The rate in Gbit/s of a link over which a dense exchange would take as long, by the cost model."""
        costs = Costs(self.num_workers, self.num_elements, 4, 4)
        exposed = max(0.0, self.dense_seconds - self.compute_seconds) / self.exchanges_per_step
        own = 0.0 if self.on_gpu else speeds(FASTEST_LINK, on_gpu=False).byte
        return min(FASTEST_LINK, 8e-9 / max(exposed / costs.dense_bytes() - own, 8e-9 / FASTEST_LINK))

    @property
    def break_even(self) -> float:
        """The density at which a sparse step takes what a dense one takes, in 0…1, by the cost model at that rate."""
        rates = speeds(self.link_gbit_s, on_gpu=self.on_gpu)
        received = (self.num_workers - 1) * self.payload_element_bytes * rates.byte
        of_a_coordinate = received + rates.select + self.num_workers * rates.add
        slope = self.exchanges_per_step * self.num_elements * of_a_coordinate
        return min(1.0, max(0.0, self.density + (self.dense_seconds - self.sparse_seconds) / slope))

    def __str__(self) -> str:
        """The verdict in two sentences."""
        missed = ""
        if self.asked_density is not None and not 0.5 < self.density / self.asked_density < 2:
            missed = f" (asked for: {100 * self.asked_density:.2g} %)"
        measured = (
            f"a step takes {duration(self.compute_seconds)} without any exchange, {duration(self.dense_seconds)} "
            f"with a dense one ({100 * self.exchange_share:.0f} % of it is exchange), and "
            f"{duration(self.sparse_seconds)} at a density of {100 * self.density:.3g} %{missed}."
        )
        if not self.says_something:
            return (
                f"{measured} Steps vary by {duration(self.spread_seconds)}, more than a dense exchange costs: there "
                "is little to gain, or the machine is too busy to tell. Measure when it is not, with more num_steps."
            )
        if self.times_faster < NOT_WORTH_IT:
            return f"{measured} Sparse exchange does not pay here: take strategy='ddp'."
        break_even = (
            f"; break-even is at a density of about {100 * self.break_even:.2g} %" if self.break_even < 0.99 else ""
        )
        return f"{measured} Sparse is {self.times_faster:.3g} times as fast{break_even}."
