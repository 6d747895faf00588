"""Check at set-up that all workers have equal settings."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_sparse._version import __version__

MAX_NAMED = 10
_T = TypeVar("_T")


def gather_objects(local_value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the objects of all workers in rank order. Collective.

    NCCL sends objects from the current device, so first make the worker's GPU current.
    """
    gathered = [local_value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local_value, group=group)
    return gathered


def require_agreement(settings: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise on every worker if settings or versions differ. Collective.

    Raises:
        RuntimeError: settings or versions differ. The message lists up to ten, with each rank's value.
    """
    versions = {"lightning_sparse": __version__, "torch": str(torch.__version__)}
    values_by_name = differing(settings | versions, group)
    if values_by_name:
        lines = [
            f"  {name}: " + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            for name, values in values_by_name.items()
        ]
        if len(lines) > MAX_NAMED:
            lines[MAX_NAMED:] = [f"  and {len(lines) - MAX_NAMED} more"]
        raise RuntimeError(
            "The workers differ in model, settings or versions. Make these equal. Differences:\n" + "\n".join(lines)
        )


def differing(settings: dict[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, list[Any]]:
    """Return the values of all ranks, by name, of settings that differ between workers. Collective."""
    gathered = gather_objects(settings, group)
    names = sorted({name for of_rank in gathered for name in of_rank})
    values_by_name = {name: [of_rank.get(name) for of_rank in gathered] for name in names}
    # As text, in which a NaN equals itself.
    return {name: values for name, values in values_by_name.items() if len({*map(repr, values)}) > 1}


def ignored_names(module: nn.Module) -> set[str]:
    """Return names of tensors that DDP ignores, such as a worker's own experts."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def parameter_settings(module: nn.Module) -> dict[str, Any]:
    """Return shape, dtype and ``requires_grad`` of each parameter that DDP does not ignore, which must be equal."""
    ignored = ignored_names(module)
    return {
        f"parameter {name}": "not initialised"
        if nn.parameter.is_lazy(parameter)
        else f"{list(parameter.shape)}, {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in module.named_parameters()
        if name not in ignored
    }
