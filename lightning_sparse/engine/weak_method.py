"""Callbacks that do not keep the object of their method alive."""

import weakref
from collections.abc import Callable
from typing import Any


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method without keeping its object; once that is gone it returns None.

    A state in a circle of references would keep an ended process group until the collector of cycles finds it. That may
    be in a forked process, where the group's threads are missing when it is taken down.
    """
    this = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = this()
        return None if bound is None else bound(*arguments)

    return call
