"""Tells who follows of every step of every optimizer, by one pair of hooks for all of them.

torch calls its hooks one after the other and fails if one is removed meanwhile. Who follows may go at any moment, when
the collector of cycles comes by. So each is held by a weak reference, and the hooks stay until the last is closed.
"""

import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Follower(Protocol):
    """Who follows steps."""

    def _step_begins(self, optimizer: Optimizer) -> None: ...

    def _step_ends(self, optimizer: Optimizer) -> None: ...


_followers: list["weakref.ref[Follower]"] = []
_hooks: list[torch.utils.hooks.RemovableHandle] = []


def follow_steps(follower: Follower) -> None:
    """Tells it of steps for as long as it lives, or until ``follow_no_steps``."""
    _followers[:] = [one for one in _followers if one() is not None] + [weakref.ref(follower)]
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_steps_begin))
        _hooks.append(register_optimizer_step_post_hook(_steps_end))


def follow_no_steps(follower: Follower) -> None:
    """Tells it of no more steps."""
    _followers[:] = [one for one in _followers if one() not in (None, follower)]
    if not _followers:
        for hook in _hooks:
            hook.remove()
        _hooks.clear()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _steps_begin(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    for follower in [one() for one in _followers]:
        if follower is not None:
            follower._step_begins(optimizer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _steps_end(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    for follower in [one() for one in _followers]:
        if follower is not None:
            follower._step_ends(optimizer)
