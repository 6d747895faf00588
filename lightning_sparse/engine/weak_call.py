"""Calling a method of an object without keeping the object."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns what calls a method without keeping its object, and does nothing once that is gone.

    A state in a circle of references would keep an ended process group until the collector of cycles finds it. That may
    be in a forked process, where the group's threads are missing when it is taken down.
    """
    this = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = this()
        if bound is not None:
            bound(*arguments)

    return call
