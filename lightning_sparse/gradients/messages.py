"""Messages about gradients that do not train."""

from collections.abc import Collection, Sequence

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn


def say_dropped(names: Collection[str]) -> None:
    """Say that gradients were dropped before an optimizer stepped on them."""
    listed = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    rank_zero_info(
        f"lightning_sparse: gradients were dropped before an optimizer stepped on them ({listed}): they do not train, "
        "as under DDP. If you keep gradients aside and use them later, call state.commit() after each backward. Said "
        "once; see docs/reliability.md."
    )


def warn_of_no_steps(num_backwards: int) -> None:
    """Warn that so many backwards were dropped without any optimizer step."""
    rank_zero_warn(
        f"lightning_sparse: the gradients of {num_backwards} backwards were dropped, and no torch.optim.Optimizer has "
        "stepped on these parameters: what was not sent of them is lost. If you update weights without an optimizer, "
        "or an optimizer holds copies of them, call state.commit() after each update (strategy.state, or what "
        "register_comm_hook returned)."
    )


def warn_of_unexchanged(name: str) -> None:
    """Warn that an optimizer steps on a parameter that DDP does not exchange."""
    rank_zero_warn(
        f"lightning_sparse: an optimizer steps on {name!r}, which DDP does not exchange, so it differs between "
        "workers, as under plain DDP. It was frozen or absent when DDP wrapped the model, or its layer was replaced. "
        "Begin a new fit after the change, or freeze layers only after DDP has wrapped the model."
    )


def warn_of_unowned(names: Sequence[str], steps: int) -> None:
    """Warn of parameters that get gradients on which no optimizer steps."""
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    rank_zero_warn(
        f"lightning_sparse: {len(names)} parameters get gradients, and no optimizer stepped on them in {steps} steps "
        f"({listed}). Their gradients add up, count in the density and in Top-k, and make resumes inexact. Freeze "
        "them, requires_grad_(False), or give them to an optimizer."
    )
