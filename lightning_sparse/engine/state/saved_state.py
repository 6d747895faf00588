"""A seal on saved state: what every entry was when it was saved, so that a changed one is found before it is loaded.

A flipped bit, a value that became NaN or an entry that is missing would otherwise train for hours before anybody sees
it. The seal is a dict beside the state, from the path of each entry to a short description; tensors are described by
dtype, shape, norm and the sum of its bits. It finds damage and edits, and is no protection against forgery.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isclose, isnan, sqrt
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.selection.numbers import squared_norm

SEAL = "seal"
NORM_TOLERANCE = 1e-4
"""Relative. Another processor adds squares in another order."""


class DamagedStateError(RuntimeError):
    """Saved state that is not as it was when it was saved.

    Args:
        path: of the first entry that differs, such as ``shared/next_step``.
        problem: how it differs.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"lightning_sparse cannot resume: in the saved state, {path} {problem}. The state was edited or damaged "
            "after it was saved. Resume from another checkpoint, or load its weights alone."
        )


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state with its seal.

    Args:
        state: nested dicts and lists of tensors and plain values.
    """
    return {**state, SEAL: {path: _description(entry) for path, entry in _entries_of(state)}}


def require_seal(state: Any, *, but: tuple[str, ...] = ()) -> None:
    """Raises ``DamagedStateError`` where an entry is not as it was when ``sealed`` returned the state.

    Args:
        state: what ``sealed`` returned, here or in another run.
        but: paths of parts that need not be looked at, such as ``workers/3``.
    """
    seal = state.get(SEAL) if isinstance(state, Mapping) else None
    if not isinstance(seal, Mapping):
        raise DamagedStateError("its seal", "is missing")

    def counts(path: str) -> bool:
        return not any(path.startswith(f"{part}/") for part in but)

    held = {path: entry for path, entry in _entries_of(state) if counts(path)}
    for path in (path for path in seal if counts(path) and path not in held):
        raise DamagedStateError(path, "is missing")
    for path, entry in held.items():
        if path not in seal:
            raise DamagedStateError(path, "was added")
        now, then = _description(entry), seal[path]
        if not _is_same(now, then):
            raise DamagedStateError(path, f"is {_in_words(now)} and was {_in_words(then)}")


def unsent_norm(of_workers: Sequence[Mapping[str, Tensor]]) -> float | None:
    """Returns sqrt((1/n) Σ_i ‖e_i‖²) of the workers' unsent values by name; None of no workers."""
    if not of_workers:
        return None
    squares = [float(squared_norm(tensor.flatten())) for worker in of_workers for tensor in worker.values()]
    return sqrt(sum(squares) / len(of_workers))


def _entries_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and value of every entry, containers before what they contain."""
    if path:
        yield path, tree
    if isinstance(tree, Mapping):
        for name, entry in tree.items():
            if path or name != SEAL:
                key = name if isinstance(name, str) else repr(name)
                yield from _entries_of(entry, f"{path}/{key}" if path else key)
    elif isinstance(tree, (list, tuple)):
        for place, entry in enumerate(tree):
            yield from _entries_of(entry, f"{path}/{place}")


def _description(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return [str(entry.dtype), list(entry.shape), _norm(entry), _sum_of_bits(entry)]
    if isinstance(entry, (Mapping, list, tuple)):
        return f"a {'dict' if isinstance(entry, Mapping) else 'list'} of {len(entry)}"
    return repr(entry)


def _is_same(now: Any, then: Any) -> bool:
    if not (isinstance(now, list) and isinstance(then, list) and len(then) == len(now)):
        return bool(now == then)
    (*kind, norm, bits), (*kind_then, norm_then, bits_then) = now, then
    if [*kind, bits] != [*kind_then, bits_then] or not isinstance(norm_then, float):
        return False
    return isclose(norm, norm_then, rel_tol=NORM_TOLERANCE) or (isnan(norm) and isnan(norm_then))


def _in_words(description: Any) -> str:
    if isinstance(description, list) and len(description) == 4:
        dtype, shape, norm, _ = description
        return f"a tensor of {dtype}, shape {shape} and norm {norm}"
    return str(description)[:80]


def _norm(tensor: Tensor) -> float:
    held = as_real(local(tensor))
    if not held.is_floating_point():
        held = held.double()
    elif held.itemsize < 4:
        held = held.float()
    return float(squared_norm(held.flatten()).sqrt())


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's words, modulo 2⁶⁴: another number after any single change."""
    octets = as_real(local(tensor)).contiguous().flatten().view(torch.uint8)
    words = octets if octets.numel() % 4 else octets.view(torch.int32)
    return int(words.sum(dtype=torch.int64))
