"""A few steps on nothing before training begins, so that no kernel is first built in the middle of a backward.

Triton builds a kernel for each combination of dtypes, constants and absent arguments when it is first launched, which
takes a second or more. So the engine's own way is gone through once, for every dtype of the gradients, on tiny buckets
and with collectives that bring back what this worker sends. On a CPU that is when the compiled functions are made.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.engine.engine import Engine
from lightning_sparse.exchange import Exchange, ExchangeMode, Workers
from lightning_sparse.exchange.pending import Pending
from lightning_sparse.kernels import native, warm_up
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.sparsifiers import LayerLayout


def warm_up_steps(
    engine: Engine, weights: Mapping[str, Tensor], *, is_scaled: bool = False, has_unused: bool = False
) -> None:
    """Goes through the steps that training will have. Not collective; leaves the engine and the weights as they are.

    Args:
        engine: the engine of the training to come.
        weights: what will be averaged, by name: the dtypes and devices of the gradients.
        is_scaled: whether losses are scaled.
        has_unused: whether a step may leave some of them out.
    """
    of_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, one in weights.items():
        of_kind.setdefault((one.device, one.dtype.to_real()), []).append(name)
    for (device, dtype), names in of_kind.items():
        if device.type == "cpu":
            native.is_native(torch.empty(0), wire_dtype=torch.float32)
        for some in {tuple(names), (names[0],)}:  # of different thresholds, perhaps, and of one
            layout = LayerLayout(some, (LAYER_ELEMENTS,) * len(some))
            warm_up(device, partial(_run_warmup, engine, layout, dtype, device, is_scaled, has_unused))


LAYER_ELEMENTS = 256
"""Few, and more than what is always sent with a payload."""


class _Alone(Workers):
    """One worker to whom all that it sends comes back at once."""

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        out.copy_(part)
        return Pending([])

    def all_to_all(self, out: Tensor, parts: Tensor) -> Pending:
        out.copy_(parts)
        return Pending([])

    def all_reduce(self, tensor: Tensor) -> Pending:
        return Pending([])


def _run_warmup(
    engine: Engine, layout: LayerLayout, dtype: torch.dtype, device: torch.device, is_scaled: bool, has_unused: bool
) -> None:
    for mode, calibrates in _warmup_modes(engine):
        exchange = Exchange(mode, workers=_Alone(None, 0, 1))
        exchange.has_shortcut = False
        clone = engine.warmup_clone(exchange, layout.names, calibrates=calibrates)
        nothing, first_layer = (), ((0, LAYER_ELEMENTS),)
        # Twice: what the second half of a reduce-scatter is like follows from the step before.
        for left_out in (nothing, nothing, first_layer) if has_unused else (nothing, nothing):
            gradient = torch.zeros(layout.num_elements, dtype=dtype, device=device)
            kept = torch.float64 if dtype == torch.float64 else torch.float32
            residual = Residual(*(torch.zeros(layout.num_elements, dtype=kept, device=device) for _ in range(2)))
            scale = torch.ones(1, device=device) if is_scaled else None
            bucket = FlatBucket(0, layout, gradient, residual, is_last=True, left_out=left_out, loss_scale=scale)
            clone.begin()
            clone.survey([bucket])
            clone.add(bucket)
            clone.finish()


def _warmup_modes(engine: Engine) -> Sequence[tuple[ExchangeMode, bool]]:
    """The routes that this engine's buckets may take, and whether λ is calibrated on the way."""
    mode, n = engine.exchange_mode, engine.workers.num_workers
    routes: list[ExchangeMode] = [mode]
    if mode == "hierarchical" or n == 1:
        routes = ["dense"]
    elif mode == "auto":
        routes = ["dense", "gather", "reduce_scatter"] if n > 2 else ["dense", "gather"]
    modes = [(route, False) for route in routes]
    return [*modes, ("dense", True)] if engine.is_calibrating else modes
