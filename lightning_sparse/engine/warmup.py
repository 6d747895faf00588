"""Runs a few steps on zeros before training, to compile kernels before the first backward.

Triton compiles a kernel for each combination of dtypes, constants and absent arguments at its first launch, which takes
a second or more. So a copy of the engine runs on tiny buckets, for every dtype of the gradients, with collectives that
return this worker's own values. CPUs only load the compiled functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import residual_dtype
from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.exchange.in_process import ThreadWorkers
from lightning_sparse.kernels import native
from lightning_sparse.kernels.launching import is_available, run_or_disable
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.sparsifiers.protocol import LayerLayout

LAYER_ELEMENTS = 256
"""Small, but larger in dense form than the smallest payload, so sparse routes stay sparse."""


def warm_up_steps(
    engine: Engine, weights: Mapping[str, Tensor], *, is_scaled: bool = False, has_unused: bool = False
) -> None:
    """Run every kind of step on a GPU that training has, and load the functions for CPUs. Not collective.

    Does not change engine and weights.

    Args:
        engine: the engine of the training, before its first step.
        weights: the averaged tensors by name, with the dtypes and devices of the gradients.
        is_scaled: whether losses are scaled.
        has_unused: whether a step may leave some weights out.
    """
    of_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, weight in weights.items():
        of_kind.setdefault((weight.device, weight.dtype.to_real()), []).append(name)
    for (device, dtype), names in of_kind.items():
        if device.type == "cpu":
            native.is_native(torch.empty(0), wire_dtype=torch.float32)
        for layer_names in {tuple(names), (names[0],)}:  # layers with perhaps different thresholds, and one layer
            layout = LayerLayout(layer_names, (LAYER_ELEMENTS,) * len(layer_names))
            if is_available(device):
                run_or_disable(device, partial(_run_warmup, engine, layout, dtype, device, is_scaled, has_unused))


def _run_warmup(
    engine: Engine, layout: LayerLayout, dtype: torch.dtype, device: torch.device, is_scaled: bool, has_unused: bool
) -> None:
    for mode, calibrates in _warmup_modes(engine):
        warmup_engine = _single_worker_engine(engine, mode, layout.names, calibrates=calibrates)
        nothing, first_layer = (), ((0, LAYER_ELEMENTS),)
        # Twice, because the second half of a reduce-scatter depends on the previous step.
        for left_out in (nothing, nothing, first_layer) if has_unused else (nothing, nothing):
            gradient = torch.zeros(layout.num_elements, dtype=dtype, device=device)
            before, after = torch.zeros(2, layout.num_elements, dtype=residual_dtype(gradient), device=device)
            scale = torch.ones(1, device=device) if is_scaled else None
            residual = Residual(before, after)
            bucket = FlatBucket(0, layout, gradient, residual, is_last=True, left_out=left_out, loss_scale=scale)
            warmup_engine.begin()
            warmup_engine.add_all([bucket])
            warmup_engine.finish()


def _warmup_modes(engine: Engine) -> Sequence[tuple[ExchangeMode, bool]]:
    """Return the possible routes of this engine's buckets, each with whether it calibrates λ."""
    mode, n = engine.options.exchange, engine.workers.num_workers
    routes: list[ExchangeMode] = [mode]
    if n == 1:
        routes = ["dense"]
    elif mode == "auto":
        routes = ["dense", "gather", "reduce_scatter"] if n > 2 else ["dense", "gather"]
    modes = [(route, False) for route in routes]
    return [*modes, ("dense", True)] if engine.calibrator.is_running else modes


def _single_worker_engine(engine: Engine, mode: ExchangeMode, names: Sequence[str], *, calibrates: bool) -> Engine:
    """Return an engine that runs this engine's steps on one worker and one route."""
    options = replace(engine.options, exchange=mode, link_gbit_s=None)
    (alone,) = ThreadWorkers(1).workers
    warmup_engine = Engine(engine.sparsifier, options, workers=alone, per_layer_stats=engine.per_layer_stats)
    warmup_engine.exchange.has_shortcut = False
    if warmup_engine.calibrator.is_running and not calibrates:
        warmup_engine.calibrator.set_threshold(1.0)  # stands for a λ not yet known
        if warmup_engine.calibrator.needs_layers and isinstance(warmup_engine.sparsifier, HardThreshold):
            warmup_engine.sparsifier.fix_threshold(1.0, {name: 1.0 + place for place, name in enumerate(names)})
    return warmup_engine
