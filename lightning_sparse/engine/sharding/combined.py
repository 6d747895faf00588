"""Statistics of a step over all shards of a replica."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_sparse.engine import LayerStats, StepStats
from lightning_sparse.engine.step_stats import layer_stats
from lightning_sparse.exchange import Workers
from lightning_sparse.selection.numbers import STEP_NUMBERS, combined

OF_STEP = [number for number in STEP_NUMBERS if number.shards]
OF_LAYER = [number for number in OF_STEP if number.per_layer]


def of_all_shards(own: StepStats, names: Sequence[str], workers: Workers, device: torch.device) -> StepStats:
    """Returns the statistics of the whole model. Collective: every rank of the replica calls this.

    Bytes count what all ranks of the replica handed to collectives between replicas. A parameter of which several ranks
    hold copies, as under tensor parallelism, counts once per copy.

    Args:
        own: the statistics of this rank's shards.
        names: the names of all parameters, in the same order on all ranks.
        workers: the ranks of the replica.
        device: the device of their group.
    """
    if workers.num_workers == 1:
        return own
    names = names if own.layers else ()
    layers = [own.layers.get(name, LayerStats(0, 0, 0.0, 0.0)) for name in names]
    numbers = [getattr(own, number.name) for number in OF_STEP]
    numbers += [getattr(layer, number.name) for layer in layers for number in OF_LAYER]
    rows = workers.gather_numbers(numbers, device)
    totals = iter(combined(rows, OF_STEP + OF_LAYER * len(layers), "shards"))
    of_step = {number.name: next(totals) for number in OF_STEP}
    of_layers = {name: layer_stats(OF_LAYER, [next(totals) for _ in OF_LAYER], own.num_workers) for name in names}
    trained = {name: layer for name, layer in of_layers.items() if layer.num_elements}  # others are frozen
    return replace(own, **of_step, layers=trained)
