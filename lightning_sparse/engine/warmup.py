"""A few steps on zeros before training begins, so that no kernel is first built in the middle of a backward.

Triton builds a kernel for each combination of dtypes, constants and absent arguments when it is first launched, which
takes a second or more. So an engine like the training's runs on tiny buckets, for every dtype of the gradients, with
collectives that return this worker's own values. On a CPU this loads the compiled functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import kept_dtype
from lightning_sparse.exchange import ExchangeMode, ThreadWorkers
from lightning_sparse.kernels import native, warm_up
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.sparsifiers import HardThreshold, LayerLayout

LAYER_ELEMENTS = 256
"""Few, and more than what is always sent with a payload."""


def warm_up_steps(
    engine: Engine, weights: Mapping[str, Tensor], *, is_scaled: bool = False, has_unused: bool = False
) -> None:
    """Run every kind of step that training will have. Not collective; leaves engine and weights unchanged.

    Args:
        engine: the engine of the training to come, before its first step.
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
        for some in {tuple(names), (names[0],)}:  # of different thresholds, perhaps, and of one
            layout = LayerLayout(some, (LAYER_ELEMENTS,) * len(some))
            warm_up(device, partial(_run_warmup, engine, layout, dtype, device, is_scaled, has_unused))


def _run_warmup(
    engine: Engine, layout: LayerLayout, dtype: torch.dtype, device: torch.device, is_scaled: bool, has_unused: bool
) -> None:
    for mode, calibrates in _warmup_modes(engine):
        double = _double(engine, mode, layout.names, calibrates=calibrates)
        nothing, first_layer = (), ((0, LAYER_ELEMENTS),)
        # Twice: what the second half of a reduce-scatter is like follows from the step before.
        for left_out in (nothing, nothing, first_layer) if has_unused else (nothing, nothing):
            gradient = torch.zeros(layout.num_elements, dtype=dtype, device=device)
            before, after = torch.zeros(2, layout.num_elements, dtype=kept_dtype(gradient), device=device)
            scale = torch.ones(1, device=device) if is_scaled else None
            residual = Residual(before, after)
            bucket = FlatBucket(0, layout, gradient, residual, is_last=True, left_out=left_out, loss_scale=scale)
            double.begin()
            double.add_all([bucket])
            double.finish()


def _warmup_modes(engine: Engine) -> Sequence[tuple[ExchangeMode, bool]]:
    """Return the routes that this engine's buckets may take, and whether λ is calibrated on the way."""
    mode, n = engine.options.exchange, engine.workers.num_workers
    routes: list[ExchangeMode] = [mode]
    if mode == "hierarchical" or n == 1:
        routes = ["dense"]
    elif mode == "auto":
        routes = ["dense", "gather", "reduce_scatter"] if n > 2 else ["dense", "gather"]
    modes = [(route, False) for route in routes]
    return [*modes, ("dense", True)] if engine.calibrator.is_running else modes


def _double(engine: Engine, mode: ExchangeMode, names: Sequence[str], *, calibrates: bool) -> Engine:
    """Return an engine that takes the same steps alone, on one route."""
    options = replace(engine.options, exchange=mode, link_gbit_s=None)
    (alone,) = ThreadWorkers(1).workers
    double = Engine(engine.sparsifier, options, workers=alone, per_layer_stats=engine.per_layer_stats)
    double.exchange.has_shortcut = False
    if double.calibrator.is_running and not calibrates:
        double.calibrator.set_threshold(1.0)  # any λ: calibration is not over
        if double.calibrator.needs_layers and isinstance(double.sparsifier, HardThreshold):
            double.sparsifier.fix_layers({name: 1.0 + place for place, name in enumerate(names)})
    return double
