"""Rejects training that simulated workers would run differently from real ones."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_sparse.gradients.comm_hook import refuse_sparse_gradients


def refuse(feature: str) -> NoReturn:
    """Raise ValueError for a feature that is not simulated."""
    raise ValueError(f"Simulated workers do not support {feature}. For real workers, use SparseDDPStrategy.")


def require_simulable(module: LightningModule, trainer: Any, scaler: object) -> None:
    """Raise ValueError if a fit would differ from a fit with real workers."""
    if not module.automatic_optimization:
        refuse("manual optimization (automatic_optimization=False)")
    if scaler is not None:
        refuse("precision with a GradScaler; use 'bf16-mixed' or '32-true'")
    if any(parameter.is_complex() for parameter in module.parameters()):
        refuse("complex parameters")
    if any(map(is_lazy, module.parameters())):
        refuse("uninitialised layers: run a batch through the model first, as for DDP")
    refuse_sparse_gradients(module)
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise ValueError(
            "The search for a batch size (BatchSizeFinder, Tuner.scale_batch_size) supports only one worker, as with "
            "DDP. Search with Trainer(devices=1) without a strategy, and set the result."
        )
    connector = trainer._accelerator_connector
    devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
    if devices != 1 or nodes != 1:
        refuse(f"devices={devices} on {nodes} nodes: all run on one device, so set devices=1 and num_nodes=1")
    if trainer._accelerator_connector._layer_sync is not None:
        refuse("sync_batchnorm")
    for owner, base in ((module, LightningModule), (trainer.datamodule, LightningDataModule)):
        if owner is not None and type(owner).on_before_batch_transfer is not base.on_before_batch_transfer:
            refuse("on_before_batch_transfer, which would get the batches of all workers; use on_after_batch_transfer")
    if type(module).on_after_backward is not LightningModule.on_after_backward:
        rank_zero_warn(
            f"lightning_sparse: {type(module).__name__}.on_after_backward is called for each simulated worker with its "
            "own gradients. With real workers, it sees their average. Use on_before_optimizer_step."
        )


def require_known(parameters: Mapping[str, Tensor], reached: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError if a parameter with a gradient was not ``known`` at set-up."""
    for name in sorted(set(reached) - set(known)):
        if parameters[name].requires_grad:  # else the gradient is left from an earlier fit
            raise ValueError(
                f"The parameter {name!r} has a gradient, but was frozen or absent when training was set up, so it is "
                "not exchanged, as in DDP. Set requires_grad at set-up and use a learning rate of 0 until it should "
                "train, or start a new fit."
            )


def require_attributes(module: LightningModule, names: Sequence[str]) -> None:
    """Raise ValueError for a name that is not a plain attribute of the module."""
    reserved = {*dict(module.named_children()), *dict(module.named_parameters()), *dict(module.named_buffers())}
    for name in names:
        if not hasattr(module, name):
            raise ValueError(
                f"Invalid own_attributes: {type(module).__name__} has no {name}. Set it in __init__ or setup."
            )
        if name in reserved or name.startswith("_") or hasattr(LightningModule, name) or name == "training":
            raise ValueError(
                f"Invalid own_attributes: {name} is not a plain attribute of {type(module).__name__}. Omit it: workers "
                "share parameters and modules, and buffers are those of rank 0, as in DDP."
            )
