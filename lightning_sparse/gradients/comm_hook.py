"""DDP's communication hook and its registration."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.grouping import require_one_device
from lightning_sparse.engine.options import GradientOptions, checked, settings_of
from lightning_sparse.exchange.agreement import require_agreement
from lightning_sparse.gradients.buckets import AverageFuture
from lightning_sparse.gradients.ddp_averager import DDPGradientAverager
from lightning_sparse.sparsifiers.protocol import Sparsifier, require_sparsifier


def register_comm_hook(
    ddp_module: torch.nn.Module,
    sparsifier: Sparsifier,
    options: GradientOptions | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    per_layer_stats: bool = False,
) -> DDPGradientAverager:
    """Make a DistributedDataParallel module exchange gradients sparsely. Collective: all workers.

    Use it with plain PyTorch or Fabric. For the Lightning Trainer, use a strategy instead.

    Args:
        ddp_module: a ``DistributedDataParallel``, or the result of ``Fabric(strategy="ddp").setup(...)``, without a
            communication hook.
        sparsifier: selects coordinates; copied.
        options: see `GradientOptions`.
        grad_scaler: the loss scaler, if any, so that thresholds and residuals are in units of the unscaled gradient.
        per_layer_stats: whether to report density and error of every layer; adds two numbers per layer to each step.

    Returns:
        The state, whose ``last_step`` holds the statistics of the last step.

    Raises:
        TypeError: the module is not a DistributedDataParallel, or another argument has a wrong type.
        ValueError: the sparsifier does not support an option, or the module is on several devices.
        RuntimeError: settings differ between workers (on every worker), or DDP has no buckets to exchange.
    """
    options = checked(options, GradientOptions)
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"Invalid {grad_scaler=}. Must be a torch.amp.GradScaler, or None if losses are not scaled.")
    if isinstance(ddp_module, torch.nn.Module):
        ddp_module = _unwrapped(ddp_module)
    if not isinstance(ddp_module, DistributedDataParallel):
        raise TypeError(
            f"Expected a torch.nn.parallel.DistributedDataParallel module, got {type(ddp_module).__name__}. "
            "Wrap the model first: DistributedDataParallel(model)."
        )
    require_sparsifier(sparsifier)
    if getattr(ddp_module, "_use_python_reducer", False):
        raise RuntimeError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", with which DDP has no buckets to exchange. '
            'Set it to "ddp_optimizer" (the default) before the model is wrapped.'
        )
    refuse_sparse_gradients(ddp_module.module, ddp_module.parameters_to_ignore)
    # Remove the prefix of a compiled module, so that residuals also fit the uncompiled module.
    names = {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in ddp_module.module.named_parameters()
        if name not in ddp_module.parameters_to_ignore
    }
    require_one_device({name: parameter for parameter, name in names.items() if parameter.requires_grad})
    settings = settings_of(sparsifier, options, per_layer_stats)
    bucket_settings = ("bucket_bytes_cap", "find_unused_parameters", "static_graph")
    settings |= {name: getattr(ddp_module, name) for name in bucket_settings}
    with torch.accelerator.device_index(ddp_module.device.index):
        require_agreement(settings, ddp_module.process_group)
        state = DDPGradientAverager(
            sparsifier,
            options,
            names,
            group=ddp_module.process_group,
            # The public get_scale() synchronises. A disabled scaler has no _scale, and a new scaler has None.
            loss_scale=partial(getattr, grad_scaler, "_scale", None),
            per_layer_stats=per_layer_stats,
            allows_unused_parameters=bool(ddp_module.find_unused_parameters or ddp_module.static_graph),
            is_static_graph=bool(ddp_module.static_graph),
        )
        state.warm_up(is_scaled=grad_scaler is not None and grad_scaler.is_enabled())
    ddp_module.register_comm_hook(state, sparse_hook)
    state.pending_gradients.follow(ddp_module)
    ddp_module.register_forward_pre_hook(_refuse_join)
    return state


# A compiled optimizer step calls backward in its closure. The exchange must stay out of the compiled graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def sparse_hook(state: DDPGradientAverager, bucket: GradBucket) -> AverageFuture:
    """Exchange a bucket sparsely, as DDP's communication hook. Collective; DDP calls it.

    Returns:
        A future of the bucket's buffer with S · (1/n) Σ_i out_i, the same bits on every worker.
    """
    # A replay would always send as many values as the recorded step.
    if bucket.index() == 0 and bucket.buffer().device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A sparse exchange cannot be part of a CUDA graph: payload sizes differ between steps, and the host reads "
            "them. Record only work before the exchange, as torch.cuda.make_graphed_callables does for parts of a "
            "model, or use Lightning's 'ddp'."
        )
    return state.receive(bucket)


def refuse_sparse_gradients(module: torch.nn.Module, ignored: Collection[str] = ()) -> None:
    """Raise ValueError if a layer has sparse gradients, which DDP does not put into buckets.

    Layers whose weight DDP ignores may have them.
    """
    for name, layer in module.named_modules():
        is_sparse = isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
        if is_sparse and layer.weight.requires_grad and f"{name}.weight" not in ignored:
            raise ValueError(
                f"The layer {name!r} is {type(layer).__name__}(sparse=True), whose gradient is a sparse tensor. Set "
                "sparse=False: the exchange then sends only rows whose gradients reach the threshold. Use Adam or SGD "
                "instead of SparseAdam. With sparse gradients, use a local_* strategy or Lightning's 'ddp'."
            )


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the wrappers of Fabric and ``torch.compile``."""
    children = vars(module)["_modules"]  # a compiled module returns attributes of the module inside
    inner = children.get("_forward_module", children.get("_orig_mod"))
    return module if inner is None else _unwrapped(inner)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_join(module: DistributedDataParallel, _: Any) -> None:
    # A worker without batches observes no steps, so its λ and other state would differ.
    if module._join_config.enable:
        raise RuntimeError(
            "torch's Join is not supported with a sparse exchange. Give all workers equally many batches, for example "
            "with DistributedSampler(dataset, drop_last=True)."
        )
