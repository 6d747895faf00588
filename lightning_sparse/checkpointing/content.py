"""The part of a checkpoint that a sparse strategy writes: its format, and what a resume says that it loses.

All strategies write the same fields under one key, plain containers and tensors that ``weights_only=True`` loads::

    kind            the kind of averaging: a key of ``WRITERS``
    version         of the format
    world_size      number of workers, or of replicas
    ranks           number of ranks in each replica; 1 if the model is not sharded
    unsent_norm     sqrt((1/n) Σ_i ‖e_i‖²) of the unsent values that it holds; None where it holds none
    numbers         ``Snapshot.numbers``; None where no state could be saved
    histories       for every rank of a replica its ``Snapshot.history``
    shared          ``Snapshot.shared``, whole tensors
    workers         for every worker its ``Snapshot.own``, whole tensors; one entry if only their mean was asked for
    extras          for every rank of a replica a list with every worker's ``Snapshot.extra``
    has_folder      whether ``shared`` and ``workers`` are in the folder ``FOLDER`` instead, written by all ranks
    why_incomplete  None, or why tensors are missing that were asked for
    seal            see ``lightning_sparse.engine.snapshot``
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.engine.snapshot import DamagedStateError, unsent_norm

KEY = FOLDER = "lightning_sparse"
VERSION = 1
WRITERS = {
    "gradients": "a ddp_* or hsdp_* strategy or simulated workers",
    "drifts": "a local_* or local_hsdp_* strategy",
}
STARTS = {
    "gradients": "Residuals start from zero and, with a density, calibration begins.",
    "drifts": "All workers begin with its weights as the anchor and, with a density, with a calibration.",
}
UNSENT = {"gradients": "residual", "drifts": "unsent"}
"""The kind of tensors that hold unsent values."""
UNSENT_WORDS = {"gradients": "residuals", "drifts": "unsent drifts"}
MOST_LISTED = 8


def empty_content(kind: str, world_size: int, ranks: int, why_incomplete: str | None) -> dict[str, Any]:
    """Return all fields but the seal, without any state."""
    return {
        "kind": kind,
        "version": VERSION,
        "world_size": world_size,
        "ranks": ranks,
        "unsent_norm": None,
        "numbers": None,
        "histories": [],
        "shared": {},
        "workers": [],
        "extras": [],
        "has_folder": False,
        "why_incomplete": why_incomplete,
    }


def own_content(content: Any, kind: str) -> Mapping[str, Any] | None:
    """Return what a strategy of this kind saved; None, saying what is lost, for the checkpoint of another one.

    Args:
        content: what a checkpoint has under ``KEY``; None if it has nothing.
        kind: of the averaging that resumes.

    Raises:
        DamagedStateError: no version of this package wrote the content.
        RuntimeError: a newer version wrote it.
    """
    if content is None:
        rank_zero_info(f"lightning_sparse: the checkpoint was written without a sparse exchange. {STARTS[kind]}")
        return None
    fields = content if isinstance(content, Mapping) else {}
    writer, version, unsent = fields.get("kind"), fields.get("version"), fields.get("unsent_norm")
    if not isinstance(writer, str) or writer not in WRITERS:
        raise DamagedStateError("kind", f"is {writer!r}, which is none of {', '.join(map(repr, WRITERS))}")
    if not isinstance(version, int) or not isinstance(unsent, (float, type(None))):
        raise DamagedStateError("version", f"is {version!r}")
    if version > VERSION:
        raise RuntimeError(
            f"The checkpoint holds {writer} in format {version}, and this version of lightning_sparse reads formats up "
            f"to {VERSION}. Update lightning_sparse."
        )
    if writer == kind:
        return fields
    who = WRITERS[writer]
    if unsent:
        rank_zero_warn(
            f"lightning_sparse: {who} wrote the checkpoint. The unsent {writer} (norm {unsent:.3g}) are lost. "
            f"{STARTS[kind]}"
        )
    else:
        rank_zero_info(f"lightning_sparse: {who} wrote the checkpoint. It holds no unsent {writer}. {STARTS[kind]}")
    return None


def say_incomplete(kind: str, why: str) -> None:
    """Warn that a checkpoint of the right kind holds no tensors of workers."""
    if kind == "gradients":
        lost = "Unsent values are lost, and residuals start from zero."
        rank_zero_warn(f"lightning_sparse: the checkpoint holds no residuals ({why}). {lost}")
    else:
        rank_zero_warn(f"lightning_sparse: the checkpoint holds no drifts ({why}). {STARTS[kind]}")


def warn_of_incomplete(kind: str, why: str, weights: str) -> None:
    """Warn that a checkpoint is written without tensors of workers.

    Args:
        kind: of averaging.
        why: the reason.
        weights: for drifts, the owner of the weights in the file: ``"anchor's"`` or ``"mean of the workers'"``.
    """
    if kind == "gradients":
        rank_zero_warn(
            f"lightning_sparse: the checkpoint is written without residuals: {why}. A run that resumes from it begins "
            "with residuals of zero; unsent values are lost."
        )
    else:
        rank_zero_warn(
            f"lightning_sparse: the checkpoint is written with the {weights} weights and without drifts: {why}. It "
            "lacks what workers did since the last exchange, and unsent values."
        )


def say_changed_model(lost: Mapping[str, Tensor], new: Sequence[str], what: str) -> None:
    """Warn of saved parameters that the model no longer has, and of parameters that were not saved.

    Args:
        lost: unsent values by name.
        new: names.
        what: the unsent values, in words.
    """
    if not (lost or new):
        return
    said = ["lightning_sparse: the model is not the one of the checkpoint."]
    if lost:
        norm = unsent_norm([lost])
        said.append(f"Not in the model, or of another size, so their {what} (norm {norm:.3g}) are lost: {_list(lost)}.")
    if new:
        said.append(f"Not in the checkpoint, so their {what} start from zero: {_list(new)}.")
    rank_zero_warn(" ".join(said))


def _list(names: Mapping[str, Tensor] | Sequence[str]) -> str:
    listed = list(names)
    more = len(listed) - MOST_LISTED
    return ", ".join(listed[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
