"""The numbers of a step of all shards together."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_sparse.engine import LayerStats, StepStats
from lightning_sparse.exchange import Workers
from lightning_sparse.exchange.replicas import summed


def of_all_shards(own: StepStats, names: Sequence[str], workers: Workers, device: torch.device) -> StepStats:
    """Returns the numbers of the whole model from those of each rank's shards. Collective: the ranks of a replica.

    Bytes are those of a replica: what all of its ranks handed to collectives between replicas. A parameter that ranks
    hold copies of, as under tensor parallelism, counts as often.

    Args:
        own: of this rank's shards.
        names: of all parameters, in the same order on all ranks.
        workers: the ranks of the replica.
        device: theirs.
    """
    if workers.num_workers == 1:
        return own
    layers = [own.layers.get(name, LayerStats(0, 0, 0.0, 0.0)) for name in (names if own.layers else ())]
    numbers: list[float] = [
        own.num_elements,
        own.selected,
        own.squared_error,
        own.squared_gradient_norm,
        own.non_finite,
        own.payload_bytes,
        own.dense_bytes,
        own.dense_elements,
    ]
    for one in layers:
        numbers += [one.num_elements, one.selected, one.squared_error]
    total = summed(numbers, workers, device)
    of_layers = {}
    for name, place in zip(names if layers else (), range(8, len(total), 3), strict=True):
        size, selected = int(total[place]), int(total[place + 1])
        if size:  # not frozen
            of_layers[name] = LayerStats(size, selected, selected / (own.num_workers * size), total[place + 2])
    return replace(
        own,
        num_elements=int(total[0]),
        selected=int(total[1]),
        squared_error=total[2],
        squared_gradient_norm=total[3],
        non_finite=int(total[4]),
        payload_bytes=int(total[5]),
        dense_bytes=int(total[6]),
        dense_elements=int(total[7]),
        layers=of_layers,
    )
