"""Errors for what simulated workers would do differently from real ones."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor

from lightning_sparse.gradients.comm_hook import refuse_sparse_gradients


def refuse(what: str) -> NoReturn:
    """Raise ValueError for something that is not simulated."""
    raise ValueError(f"Simulated workers do not do {what}. Start real workers with SparseDDPStrategy for that.")


def loss_of(output: Any) -> Tensor:
    """Return the loss from the output of a training step."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        refuse("a training_step that returns None, which DDP does not either")
    return loss


def require_simulable(module: LightningModule, trainer: Any, scaler: object) -> None:
    """Raise ValueError where a fit would differ from one with real workers."""
    own = "on_before_batch_transfer"
    if not module.automatic_optimization:
        refuse("manual optimization (automatic_optimization=False)")
    if scaler is not None:
        refuse("precision with a GradScaler; use 'bf16-mixed' or '32-true'")
    if any(parameter.is_complex() for parameter in module.parameters()):
        refuse("complex parameters")
    refuse_sparse_gradients(module)
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise ValueError(
            "The search for a batch size (BatchSizeFinder, Tuner.scale_batch_size) is for one worker, as with DDP. "
            "Search with Trainer(devices=1) without a strategy, and set what it finds."
        )
    devices = len(trainer._accelerator_connector._parallel_devices)
    if devices != 1 or trainer.num_nodes != 1:
        refuse(f"devices={devices} on {trainer.num_nodes} nodes: all are on one, so devices=1 it must be")
    if trainer._accelerator_connector._layer_sync is not None:
        refuse("sync_batchnorm")
    for owner, base in ((module, LightningModule), (trainer.datamodule, LightningDataModule)):
        if owner is not None and getattr(type(owner), own) is not getattr(base, own):
            refuse(f"{own}, which would be given the batches of all workers; use on_after_batch_transfer")
    if type(module).on_after_backward is not LightningModule.on_after_backward:
        rank_zero_warn(
            f"lightning_sparse: {type(module).__name__}.on_after_backward is called for each simulated worker and sees "
            "that worker's own gradients; with real ones it sees their average. Use on_before_optimizer_step."
        )


def require_known(parameters: Mapping[str, Tensor], reached: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError if a parameter has a gradient and is not exchanged.

    Args:
        parameters: of the module, by name.
        reached: names of the parameters that have a gradient.
        known: names of the parameters that were trained when training was set up.
    """
    for name in sorted(set(reached) - set(known)):
        if parameters[name].requires_grad:  # else it is left from an earlier fit
            raise ValueError(
                f"The parameter {name!r} has a gradient, and was frozen or not there when training was set up: it is "
                "not exchanged, nor would DDP exchange it. Leave requires_grad on at set-up and its learning rate 0 "
                "until it is to train, or begin a new fit then."
            )


def advise(exception: BaseException) -> None:
    """Add a remedy to torch's message that there is no process group."""
    if "process group has not been initialized" in str(exception):
        exception.args = (
            f"{exception} Simulated workers have none. In train_dataloader ask the trainer instead: "
            "DistributedSampler(dataset, trainer.world_size, trainer.global_rank), or leave the sampler to Lightning.",
        )


def require_attributes(module: LightningModule, names: Sequence[str]) -> None:
    """Raise ValueError for a name that is no attribute of the module's own."""
    held = {*dict(module.named_children()), *dict(module.named_parameters()), *dict(module.named_buffers())}
    for name in names:
        if not hasattr(module, name):
            raise ValueError(f"Invalid own_attributes: {type(module).__name__} has no {name}.")
        if name in held or name.startswith("_") or hasattr(LightningModule, name) or name == "training":
            raise ValueError(f"Invalid own_attributes: {name} is no attribute of {type(module).__name__}'s own.")
