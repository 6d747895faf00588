"""When a gradient becomes part of training: the one place where that is decided, for every kind of loop.

Plain DDP has no memory: a gradient counts if an optimizer steps on it and is gone if none does. Error feedback has one,
so what a backward put into residuals, and what it took out to send, must share the fate of its gradient:

1. A backward has exchanged gradients: what it did is *pending*, for each parameter that it reached.
2. An optimizer that owns the parameter steps: it is *committed*, part of training for good.
3. The next backward finds the gradient gone (``zero_grad``, a step skipped because losses overflowed, a backward that
   an exception broke off): it is *rolled back*, as if that backward had never been.
4. The next backward finds it still there, and adds to it: both together stay pending.

Steps are seen by hooks that torch calls for every optimizer. Gradients that are gone are looked for only if a forward
or a backward begins while something is pending, as between two optimizers, and before the backward adds to the first of
them. Usually nothing is pending then, and all that this costs is a note of each gradient's version.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.engine.memory import ResidualMemory
from lightning_sparse.engine.optimizer_steps import Arguments, UnexchangedParameters, follow_no_steps, follow_steps
from lightning_sparse.gradients.learning_rates import LastLearningRates
from lightning_sparse.gradients.messages import warn_of_no_steps, warn_of_unexchanged, warn_of_unowned

ROLLED_BACK_WITHOUT_A_STEP = 20
"""After so many backwards that were rolled back, and no step ever, it is likely that the steps cannot be seen."""
STEPS_UNTIL_OWNED = 20
"""After so many optimizer steps each parameter with a gradient should have had one."""
CAREFUL_EXCHANGES = 2
"""The norms of gradients are noted after the first exchanges, and later if a gradient ever waited for its step."""


class _Mark(NamedTuple):
    """By which is known whether anybody has written to a gradient, and to its weights."""

    address: int
    version: int
    weight_version: int


def _mark_of(parameter: Tensor, gradient: Tensor) -> _Mark:
    return _Mark(gradient.data_ptr(), gradient._version, parameter._version)


class PendingGradients:
    """Follows backwards and optimizer steps of a DDP module; commits or rolls back each parameter's residual.

    Args:
        parameters: the name of every parameter that DDP may bring.
        memories: hold the changes of backwards; commit them or roll them back by parameter name.

    Attributes:
        is_stepping: whether an optimizer's step runs, which may call backward several times and keep the last (LBFGS).
        on_step: called after every step that concerns these parameters, with the names of those of which any worker's
            gradient met it; the same on all workers.
        on_drop: called with the names of parameters whose gradients are gone, after their backwards were rolled back.
    """

    def __init__(
        self,
        parameters: Mapping[Tensor, str],
        memories: Sequence[ResidualMemory | LastLearningRates],
    ) -> None:
        self.is_stepping = False
        self.on_step: list[Callable[[set[str]], None]] = []
        self.on_drop: list[Callable[[set[str]], None]] = []
        self._names = {id(parameter): name for parameter, name in parameters.items()}
        self._parameters = {name: parameter for parameter, name in parameters.items()}
        self._memories = memories
        self._pending: set[str] = set()
        self._waiting: set[str] = set()
        self._committed_at: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._marks: dict[str, _Mark] = {}
        self._norms: dict[str, Tensor] = {}
        self._has_waited = False
        self._unexchanged: UnexchangedParameters | None = None
        self._watch: list[torch.utils.hooks.RemovableHandle] = []
        self._has_looked = self._is_changing = False
        self._num_exchanges = self._num_steps = self._rolled_back_without_a_step = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        follow_steps(self)

    def follow(self, module: DistributedDataParallel) -> None:
        """Observes every forward of this module."""
        ignored = [weight for name, weight in module.module.named_parameters() if name in module.parameters_to_ignore]
        exchanged = [weight for weight in self._parameters.values() if weight.requires_grad]
        self._unexchanged = UnexchangedParameters(module.module, [*exchanged, *ignored])
        this = weakref.ref(self)

        def forward_begins(module: DistributedDataParallel, _: Any) -> None:
            own = this()
            if own is not None and torch.is_grad_enabled():
                own.expect_backward()
                if module.gradient_as_bucket_view and own._pending and module.reducer._rebuild_buckets():
                    # Gradients lie elsewhere now. DDP does this next, once in its life; only here can it be told from
                    # what the user does: Lightning's whole training_step is inside of the forward.
                    module._has_rebuilt_buckets = True
                    own.backward_is_prepared()

        hook = torch.compiler.disable(forward_begins)  # type: ignore[no-untyped-call]
        self._hooks.append(module.register_forward_pre_hook(hook))

    def close(self) -> None:
        """Follows no more steps."""
        _remove(self._watch)
        follow_no_steps(self)
        _remove(self._hooks)

    @property
    def is_certain(self) -> bool:
        """Whether what is committed now belongs to the weights as they are now.

        Not so once an optimizer's step has changed some of the weights, until it has ended, nor while committing.
        """
        if self._is_changing or not (self.is_stepping and self._pending):
            return not self._is_changing
        versions = [(self._parameters[name]._version, self._marks.get(name)) for name in self._pending]
        return bool(self._marks) and all(mark is None or mark.weight_version == version for version, mark in versions)

    @property
    def progress(self) -> int:
        """The sum over all parameters of the number of the exchange that was committed last.

        The same on all workers whose parameters have seen the same steps.
        """
        return sum(self._committed_at.values())

    @property
    def names(self) -> frozenset[str]:
        """The parameters for which a backward of this worker is pending."""
        return frozenset(self._pending)

    def expect_backward(self) -> None:
        """Called before DDP prepares for a backward: looks for gradients that are gone, again at its first gradient."""
        if not self._pending:
            return
        self._has_waited = True
        self._look()
        self._has_looked = False
        if not self._watch:
            # On all parameters: before the first gradient is added, and before DDP deals with those that get none. Not
            # on the tensors: their hooks are called by torch.autograd.grad too, which adds nothing.
            self._watch += [
                get_gradient_edge(parameter).node.register_prehook(self._gradient_comes)
                for parameter in self._parameters.values()
                if parameter.requires_grad
            ]

    def backward_is_prepared(self) -> None:
        """Called right after DDP has prepared: it may have put gradients into other buckets."""
        if self._pending:
            self._mark()

    def backward_has_ended(self) -> None:
        """Called after a backward in which no callback could be queued for its end."""
        if self._pending and not self._marks:
            self._note()

    def begin_exchange(self) -> None:
        """Called with the first bucket: rolls back pending gradients that are gone."""
        if self._pending and not self._has_looked:
            self._look()  # this backward reached none of it

    def end_exchange(self, used: set[str], used_by_any: set[str]) -> None:
        """Called when all gradients have been exchanged: those of the parameters in use are pending.

        Args:
            used: names of parameters that this worker's backward reached.
            used_by_any: of those that any worker's reached.
        """
        _remove(self._watch)
        self._num_exchanges += 1
        self._pending |= used
        self._waiting |= used_by_any
        self._marks.clear()
        self._norms.clear()
        # In a static graph's first iteration Lightning has DDP flush its buckets after the backward.
        with suppress(RuntimeError):
            # DDP puts the averages in place at the end of backward, by a callback that it asks for after this one.
            _at_end_of_backward(lambda: _at_end_of_backward(self._note))

    def commit_all(self) -> None:
        """Makes everything pending part of training."""
        self._change(set(self._pending), commits=True)
        self._advance(set(self._waiting))

    def roll_back_all(self) -> None:
        """Rolls back everything pending, also of a backward that was broken off in its middle."""
        self._change(set(self._parameters), commits=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note(self) -> None:
        """Notes all that is pending, when DDP has put the averages in place."""
        self._mark()
        if self._has_waited or self._num_exchanges <= CAREFUL_EXCHANGES:
            gradients = {name: self._parameters[name].grad for name in self._pending}
            held = {name: gradient.detach() for name, gradient in gradients.items() if gradient is not None}
            # Read, and waited for on a GPU, only if one of them turns out to be zero later on.
            self._norms = dict(zip(held, torch._foreach_norm(list(held.values())), strict=True)) if held else {}

    def _mark(self) -> None:
        for name in self._pending:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                self._marks[name] = _mark_of(parameter, parameter.grad)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gradient_comes(self, _: Any) -> None:
        if not self._has_looked:
            self._look()
            # Without an exchange (``no_sync``) the gradient is added to what is there, which is no change by the user.
            _at_end_of_backward(self._mark)

    def _look(self) -> None:
        """Rolls back what is pending for parameters whose gradient is gone."""
        self._has_looked = True
        gone: set[str] = set()
        changed: dict[int | None, dict[str, Tensor]] = {}
        for name in self._pending:
            parameter, mark = self._parameters[name], self._marks.get(name)
            if parameter.grad is None:
                gone.add(name)
            elif mark is None or mark[:2] != _mark_of(parameter, parameter.grad)[:2]:
                changed.setdefault(self._owners.get(name), {})[name] = parameter.grad
        for of_optimizer in changed.values():
            gone |= self._zeroed(of_optimizer)
        if not gone:
            return
        self._change(gone, commits=False)
        for call in self.on_drop:
            call(gone)
        if not self.progress and not self.is_stepping:
            self._rolled_back_without_a_step += 1
            if self._rolled_back_without_a_step == ROLLED_BACK_WITHOUT_A_STEP:
                warn_of_no_steps(ROLLED_BACK_WITHOUT_A_STEP)

    def _zeroed(self, changed: dict[str, Tensor]) -> set[str]:
        """Returns which of an optimizer's gradients that were written to in place were set to zero, not scaled."""
        with torch.no_grad():
            zero = {name for name, gradient in changed.items() if not gradient.any()}
        were_zero = {name for name in zero if name in self._norms and not bool(self._norms[name])}
        # An average that was zero before tells nothing. Another tensor in its place is a copy of it; if it was written
        # to, the optimizer's other gradients tell.
        written = {name for name in changed if name not in were_zero or self._is_in_place(name)}
        return zero & written if zero - were_zero or written <= zero else set()

    def _is_in_place(self, name: str) -> bool:
        gradient, mark = self._parameters[name].grad, self._marks.get(name)
        return gradient is not None and mark is not None and gradient.data_ptr() == mark.address

    def _step_begins(self, optimizer: Optimizer, _: Arguments) -> None:
        self.is_stepping = True
        if self._unexchanged is not None and (name := self._unexchanged.first_of(optimizer)) is not None:
            warn_of_unexchanged(name)
            self._unexchanged = None

    def _step_ends(self, optimizer: Optimizer) -> None:
        self.is_stepping = False
        of_optimizer = (self._names.get(id(weight)) for group in optimizer.param_groups for weight in group["params"])
        owned = {name for name in of_optimizer if name is not None}
        # A fused optimizer receives an overflow as found_inf and skips the step by itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if not owned or (isinstance(found_inf, Tensor) and bool(found_inf)):
            return
        self._owners.update(dict.fromkeys(owned, id(optimizer)))
        # An optimizer passes over what has no gradient; some drop gradients themselves after the update.
        stepped = {name for name in self._pending & owned if not self._was_passed_over(name)}
        self._change(stepped, commits=True)
        self._advance(self._waiting & owned)

    def _was_passed_over(self, name: str) -> bool:
        parameter, mark = self._parameters[name], self._marks.get(name)
        return parameter.grad is None and (mark is None or mark.weight_version == parameter._version)

    def _advance(self, names: set[str]) -> None:
        self._committed_at.update(dict.fromkeys(names, self._num_exchanges))
        self._waiting -= names
        self._num_steps += 1
        # Gradients pile up where no optimizer steps on them and none sets them to zero.
        if self._num_steps == STEPS_UNTIL_OWNED and (unowned := sorted(self._pending - self._owners.keys())):
            warn_of_unowned(unowned, STEPS_UNTIL_OWNED)
        for call in self.on_step:
            call(names)

    def _change(self, names: set[str], *, commits: bool) -> None:
        self._is_changing = True
        for memory in self._memories:
            (memory.commit if commits else memory.roll_back)(names)
        self._pending -= names
        self._is_changing = False


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
