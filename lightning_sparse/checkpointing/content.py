"""The format of checkpoints, and messages about state that a checkpoint lacks.

All strategies write the same fields under one key, plain containers and tensors that ``weights_only=True`` loads::

    kind            the kind of averaging: a key of ``WRITERS``
    version         the version of the format
    world_size      number of workers, or of replicas
    ranks           number of ranks per replica; 1 if the model is not sharded
    has_unsent      whether any saved unsent value is not zero
    numbers         ``Snapshot.numbers``; None if no state could be saved
    histories       ``Snapshot.history`` of every rank of a replica
    shared          ``Snapshot.shared``, whole tensors
    workers         ``Snapshot.own`` of every worker, whole tensors, and with shards its optimizer states; a single
                    entry for their mean
    extras          for every rank of a replica, a list of every worker's ``Snapshot.extra``, with its optimizer and
                    precision states if workers have their own
    in_folder       whether the folder ``FOLDER`` holds ``shared`` and ``workers``
    why_incomplete  the reason why tensors of workers are missing, None if they are not
"""

from collections.abc import Mapping
from typing import Any, Literal

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

WorkerState = Literal["full", "small"]

KEY = FOLDER = "lightning_sparse"
SHARED, OPTIMIZERS = "shared", "optimizers"
"""Names of tensors that all workers share, and of a worker's optimizer states as nested dicts."""
VERSION = 1
WRITERS = {
    "gradients": "a ddp_* or hsdp_* strategy or simulated workers",
    "drifts": "a local_* or local_hsdp_* strategy",
}
FRESH_STARTS = {
    "gradients": "Residuals start from zero and, with a density, the next exchange calibrates λ.",
    "drifts": "All workers start with the checkpoint's weights as the anchor and, with a density, the next exchange "
    "calibrates λ.",
}
"""By kind: how a resumed run starts if the checkpoint has no state of its kind."""
INCOMPLETE = {
    "gradients": ("residuals", "A resume starts with residuals of zero; unsent values are lost."),
    "drifts": ("drifts", f"The workers' own weights are lost. In a resume: {FRESH_STARTS['drifts']}"),
}
"""The tensors of workers, and the consequence if a checkpoint has none."""


def empty_content(kind: str, why_not: str | None, num_workers: int = 1, ranks: int = 1) -> dict[str, Any]:
    """Return the content of a checkpoint without numbers and tensors."""
    content: dict[str, Any] = {"kind": kind, "version": VERSION, "why_incomplete": why_not}
    content |= {"world_size": num_workers, "ranks": ranks, "has_unsent": False, "numbers": None}
    return content | {"histories": [], "shared": {}, "workers": [], "extras": [], "in_folder": False}


def own_content(content: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any] | None:
    """Return a checkpoint's entry if averaging of this kind saved it, else None after a message.

    Raises:
        RuntimeError: a newer version wrote it.
    """
    if content is None:
        rank_zero_info(f"lightning_sparse: the checkpoint was written without a sparse exchange. {FRESH_STARTS[kind]}")
        return None
    writer, has_unsent = content["kind"], content["has_unsent"]
    if content["version"] > VERSION:
        raise RuntimeError(
            f"The checkpoint holds {writer} in format {content['version']}, but this version of lightning_sparse "
            f"reads formats up to {VERSION}. Update lightning_sparse."
        )
    if writer == kind:
        return content
    said = f"The unsent {writer} are lost." if has_unsent else f"It holds no unsent {writer}."
    tell = rank_zero_warn if has_unsent else rank_zero_info
    tell(f"lightning_sparse: {WRITERS[writer]} wrote the checkpoint. {said} {FRESH_STARTS[kind]}")
    return None


def warn_of_incomplete(kind: str, why: str) -> None:
    """Warn that a checkpoint is written, or was read, without tensors of workers."""
    missing, consequence = INCOMPLETE[kind]
    rank_zero_warn(f"lightning_sparse: the checkpoint holds no {missing} ({why}). {consequence}")
