"""A strategy's own part of a checkpoint: whose it is, whether it is whole, and what a resume loses of it.

All strategies save it under one key, with these fields beside their own::

    kind            which strategies wrote it: a key of ``WRITERS``
    version         of the format
    world_size      number of workers, or of replicas
    unsent_norm     sqrt((1/n) Σ_i ‖e_i‖²) of the unsent values that it holds; None where it holds none
    seal            see ``lightning_sparse.engine.saved_state``
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.engine.saved_state import DamagedStateError, unsent_norm

KEY = "lightning_sparse"
VERSION = 1
WRITERS = {
    "gradients": "a ddp_* strategy or simulated workers",
    "drifts": "a local_* strategy",
    "gradients of shards": "an hsdp_* strategy",
    "drifts of shards": "a local_hsdp_* strategy",
}
MOST_LISTED = 8


def own_content(content: Any, kind: str, starts: str) -> Mapping[str, Any] | None:
    """Returns what a strategy of this kind saved; None, saying what is lost, for the checkpoint of another one.

    Args:
        content: what a checkpoint has under ``KEY``; None if it has nothing.
        kind: of the strategy that resumes.
        starts: how it begins without a state of its own, as a sentence.

    Raises:
        DamagedStateError: what is there was written by no version of this package.
        RuntimeError: it was written by a newer version.
    """
    if content is None:
        rank_zero_info(f"lightning_sparse: the checkpoint was written without a sparse exchange. {starts}")
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
            f"lightning_sparse: {who} wrote the checkpoint. The unsent {writer} (norm {unsent:.3g}) are lost. {starts}"
        )
    else:
        rank_zero_info(f"lightning_sparse: {who} wrote the checkpoint. It holds no unsent {writer}. {starts}")
    return None


def say_changed_model(lost: Mapping[str, Tensor], new: Sequence[str], what: str) -> None:
    """Warns of saved parameters that the model no longer has, and of those that were not saved.

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
