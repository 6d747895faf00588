"""Whether all workers were started alike, asked once at set-up."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MOST_NAMED = 10


def current_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: over NCCL, what objects are sent from, and not all may share the first GPU."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


def require_agreement(settings: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raises on every worker if the workers' settings differ. Collective: every worker calls this at set-up.

    Args:
        settings: plain values by name.
        group: the process group; None is the default group.

    Raises:
        RuntimeError: names the settings that differ, the first ten of them, with the value of each rank.
    """
    gathered, differing = _compared(settings, group)
    if differing:
        lines = [
            f"  {name}: " + ", ".join(f"rank {rank}: {settings.get(name)!r}" for rank, settings in enumerate(gathered))
            for name in differing[:MOST_NAMED]
        ]
        if len(differing) > MOST_NAMED:
            lines.append(f"  and {len(differing) - MOST_NAMED} more")
        raise RuntimeError(
            "The workers disagree on what is exchanged. Start all of them with the same model, settings and "
            "versions. What differs:\n" + "\n".join(lines)
        )


@contextmanager
def raised_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises on every worker what any of them raises inside, so that none waits for the others. Collective.

    Inside, workers must not communicate. Without a process group errors pass through.

    Raises:
        RuntimeError: on workers that raised nothing, with the message of the first that did.
    """
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    messages: list[str | None] = [None if raised is None else str(raised)]
    if dist.is_initialized():
        messages *= dist.get_world_size(group)
        dist.all_gather_object(messages, None if raised is None else str(raised), group=group)
    if raised is not None:
        raise raised
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"Rank {rank}: {message}")


def differing(settings: dict[str, Any], group: dist.ProcessGroup | None = None) -> list[str]:
    """Returns the names of settings that differ between workers, the same on all. Collective."""
    return _compared(settings, group)[1]


def _compared(settings: dict[str, Any], group: dist.ProcessGroup | None) -> tuple[list[dict[str, Any]], list[str]]:
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, settings, group=group)
    names = sorted({name for settings in gathered for name in settings})
    return gathered, [name for name in names if any(other.get(name) != gathered[0].get(name) for other in gathered)]


def parameter_settings(module: nn.Module) -> dict[str, Any]:
    """Returns what must be the same of a model on every worker, as settings: each parameter's shape, dtype and use.

    Not of parameters that DDP is told to ignore, as the experts of a mixture that live on one worker each.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {
        f"parameter {name}": "not initialised"
        if nn.parameter.is_lazy(parameter)
        else f"{list(parameter.shape)}, {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in module.named_parameters()
        if name not in ignored
    }
