"""Observes steps of torch optimizers with one pair of global hooks for all observers.

torch fails if a hook is removed while its hooks run, and an observer may be garbage-collected at any time. So observers
are weak references, and the hooks stay until the last observer is closed.
"""

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from traceback import walk_stack
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of ``Optimizer.step``; the first positional one is the optimizer itself."""
_observers: weakref.WeakKeyDictionary["StepObserver", None] = weakref.WeakKeyDictionary()
"""In the order of registration."""
_hooks: list[torch.utils.hooks.RemovableHandle] = []
STEP_FRAMES = ("step", "wrapper")
"""The names of an optimizer's step and of torch's wrapper around it."""


class StepObserver(ABC):
    """Is notified of the steps of all optimizers until it is closed or deleted."""

    def __init__(self) -> None:
        _observers[self] = None
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_steps_begin))
            _hooks.append(register_optimizer_step_post_hook(_steps_end))

    def close(self) -> None:
        """Stop observing steps."""
        _observers.pop(self, None)
        if not _observers:
            remove_hooks(_hooks)

    @abstractmethod
    def _step_begins(self, optimizer: Optimizer, arguments: Arguments) -> Arguments | None: ...

    @abstractmethod
    def _step_ends(self, optimizer: Optimizer) -> None: ...


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _steps_begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    changed = None
    for observer in list(_observers):
        changed = observer._step_begins(optimizer, changed or (args, kwargs)) or changed
    return changed


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _steps_end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for observer in list(_observers):
        observer._step_ends(optimizer)


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive.

    The function returns None after the object is deleted. Otherwise, a reference cycle would keep an ended process
    group until the garbage collector runs, perhaps in a forked process, which lacks the group's threads.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*arguments)

    return call


class ParameterStepObserver(StepObserver):
    """Observes each optimizer step on given parameters.

    An optimizer that wraps another (Lookahead, SAM) counts as one optimizer. Steps inside a backward, by hooks of
    single parameters, count together as one step when this backward ends.

    Args:
        observed: the parameters, which the caller keeps alive.
        page: the page of the documentation that warnings name.

    Attributes:
        on_begin: a strategy's function, called before each step with optimizer and arguments; may return other
            arguments.
        on_step: a strategy's function, called after each step with the optimizer.
    """

    on_begin: Callable[[Optimizer, Arguments], Arguments | None] | None = None
    on_step: Callable[[Optimizer], None] | None = None

    def __init__(self, observed: Iterable[Tensor], page: str) -> None:
        self._ids = set(map(id, observed))
        self._page = page
        self._has_warned = False
        self._outer: Optimizer | None = None
        self._awaited_backward = -1
        super().__init__()

    @abstractmethod
    def _before(self, optimizer: Optimizer) -> None:
        """Check a step that begins, before ``on_begin``."""

    @abstractmethod
    def _after(self, optimizer: Optimizer) -> None:
        """Check an ended step before ``on_step``; several inside a backward count once."""

    def _warn(self, text: str) -> None:
        """Warn once."""
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"lightning_sparse: {text}. See docs/{self._page}.md.")

    def _step_begins(self, optimizer: Optimizer, arguments: Arguments) -> Arguments | None:
        is_inner = self._outer is not None and self._outer is not optimizer and _is_inside(self._outer)
        stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if is_inner or self._ids.isdisjoint(stepped):
            return None
        self._before(optimizer)
        self._outer = optimizer
        return None if self.on_begin is None else self.on_begin(optimizer, arguments)

    def _step_ends(self, optimizer: Optimizer) -> None:
        if self._outer is not optimizer:
            return
        self._outer = None
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            self._end(optimizer)
        elif backward != self._awaited_backward:
            self._awaited_backward = backward
            at_end_of_backward(lambda: self._end(optimizer))

    def _end(self, optimizer: Optimizer) -> None:
        self._after(optimizer)
        if self.on_step is not None:
            self.on_step(optimizer)


def remove_hooks(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    """Remove hooks, and clear their list."""
    while hooks:
        hooks.pop().remove()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward ends."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _is_inside(outer: Optimizer) -> bool:
    """Return whether the optimizer's step is on any thread's stack; a step that raised called no hook at its end."""
    frames = [frame for top in sys._current_frames().values() for frame, _ in walk_stack(top)]
    return any(frame.f_code.co_name in STEP_FRAMES and frame.f_locals.get("self") is outer for frame in frames)


class UnexchangedParameters:
    """Finds parameters of a module on which an optimizer steps without an exchange.

    They were frozen or absent when the module was set up, or their layer was replaced afterwards. ``exchanged`` also
    holds parameters that DDP ignores on purpose. The module is not kept alive.
    """

    def __init__(self, module: nn.Module, exchanged: Iterable[Tensor]) -> None:
        self._module = weakref.ref(module)
        self._exchanged = {id(parameter): parameter for parameter in exchanged}

    def first(self, optimizer: Optimizer | None = None) -> str | None:
        """Return the name of the first unexchanged parameter with a gradient, or None.

        Args:
            optimizer: if given, only its parameters count.
        """
        if (module := self._module()) is None:
            return None
        groups = [{"params": module.parameters()}] if optimizer is None else optimizer.param_groups
        weights = [weight for group in groups for weight in group["params"]]
        found = {id(weight) for weight in weights if id(weight) not in self._exchanged and weight.grad is not None}
        named = module.named_parameters() if found else ()  # a walk over all parameters takes long
        return next((name for name, parameter in named if id(parameter) in found), None)


def changes_weights(optimizer: Optimizer) -> bool:
    """Return whether a step can change weights: a learning rate is not 0."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return any(rate is None or float(rate) != 0 for rate in rates)
