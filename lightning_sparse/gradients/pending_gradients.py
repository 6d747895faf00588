"""Commits changes of residuals when an optimizer steps, or rolls them back.

Under plain DDP, a gradient counts if an optimizer steps on it. With error feedback, a backward also changes residuals,
and these changes must count if and only if the gradient counts:

1. After a backward exchanges gradients, its changes are *pending* for each parameter that it reached.
2. If an optimizer with this parameter steps, the changes are *committed*.
3. If the next backward finds no gradient (``zero_grad``, a step skipped after an overflow of the loss, a backward
   interrupted by an exception), the changes are *rolled back*.
4. If the next backward finds the gradient and adds to it, the changes of both stay pending.

A search for missing gradients runs only if a forward or a backward begins while changes are pending, as between two
optimizers. Otherwise a step costs a few microseconds per parameter.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.engine.optimizer_steps import (
    Arguments,
    StepObserver,
    UnexchangedParameters,
    at_end_of_backward,
    remove_hooks,
    weak_method,
)
from lightning_sparse.engine.residuals import ResidualMemory

STEPS_BEFORE_WARNING = 20
"""Backwards rolled back without any step, or steps with gradients that no optimizer uses, before a warning."""
CAREFUL_EXCHANGES = 2
"""Exchanges whose gradient norms are always stored; later only if a backward ever began with pending changes."""


class _Mark(NamedTuple):
    """Shows whether a gradient and its weights have been written to."""

    address: int
    version: int
    weight_version: int


def _mark_of(parameter: Tensor, gradient: Tensor) -> _Mark:
    return _Mark(gradient.data_ptr(), gradient._version, parameter._version)


class PendingGradients(StepObserver):
    """Commits or rolls back residuals according to a DDP module's optimizer steps.

    Args:
        parameters: the names of all parameters in DDP's buckets.
        residuals: hold the changes of backwards; commit them or roll them back by parameter name.

    Attributes:
        pending: names of parameters for which a backward of this worker is pending.
        is_stepping: whether a step on these parameters runs, in which LBFGS calls backward several times.
        step_receivers: called after every step on these parameters, with the names of parameters for which any worker
            had a gradient; the same on all workers.
        on_drop: called after a roll-back with the names of the parameters without a gradient.
    """

    def __init__(self, parameters: Mapping[Tensor, str], residuals: ResidualMemory) -> None:
        self.is_stepping = False
        self.step_receivers: list[Callable[[set[str]], None]] = []
        self.on_drop: Callable[[set[str]], None] = lambda _: None
        self._parameters = {name: parameter for parameter, name in parameters.items()}
        self._names = {id(parameter): name for parameter, name in parameters.items()}
        self._residuals = residuals
        self.pending: set[str] = set()
        self._pending_anywhere: set[str] = set()
        self._committed_at: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._marks: dict[str, _Mark] = {}
        self._norms: dict[str, Tensor] = {}
        self._unexchanged: UnexchangedParameters | None = None
        self._backward_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._has_checked = self._is_changing = self._began_with_pending = False
        self._num_exchanges = self._num_steps = self._rolled_back_without_a_step = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        super().__init__()

    def follow(self, module: DistributedDataParallel) -> None:
        """Observe every forward of a module."""
        ignored = [weight for name, weight in module.module.named_parameters() if name in module.parameters_to_ignore]
        exchanged = [weight for weight in self._parameters.values() if weight.requires_grad]
        self._unexchanged = UnexchangedParameters(module.module, [*exchanged, *ignored])
        hook = torch.compiler.disable(weak_method(self._forward_begins))  # type: ignore[no-untyped-call]
        self._hooks.append(module.register_forward_pre_hook(hook))

    def _forward_begins(self, module: DistributedDataParallel, _: Any) -> None:
        if torch.is_grad_enabled():
            self.expect_backward()
            if module.gradient_as_bucket_view and self.pending and module.reducer._rebuild_buckets():
                # DDP rebuilds its buckets only once and would do so next, which moves gradients. Inside the forward,
                # which includes Lightning's training_step, this would look like a change by the user.
                module._has_rebuilt_buckets = True
                self.note_gradients()

    def close(self) -> None:
        """Stop observing steps."""
        remove_hooks(self._backward_hooks)
        super().close()
        remove_hooks(self._hooks)

    @property
    def is_consistent(self) -> bool:
        """Whether the committed changes belong to the current weights.

        False while changes are committed, and within an optimizer's step after it has changed a weight.
        """
        if self._is_changing:
            return False
        if not (self.is_stepping and self.pending):
            return True
        marks = [(self._parameters[name], self._marks.get(name)) for name in self.pending]
        return bool(self._marks) and all(mark is None or mark.weight_version == p._version for p, mark in marks)

    @property
    def progress(self) -> int:
        """A number that is equal on workers after the same optimizer steps."""
        return sum(self._committed_at.values())

    def expect_backward(self) -> None:
        """Search for missing gradients now and at the first gradient of the backward."""
        if not self.pending:
            return
        self._began_with_pending = True
        self._roll_back_missing()
        self._has_checked = False
        if not self._backward_hooks:
            # On all parameters, to run before the first gradient is added and before DDP handles unused parameters.
            # Not on the tensors, because torch.autograd.grad calls their hooks but adds no gradient.
            self._backward_hooks += [
                get_gradient_edge(parameter).node.register_prehook(self._before_gradient)
                for parameter in self._parameters.values()
                if parameter.requires_grad
            ]

    def note_gradients(self) -> None:
        """Store address and version of pending gradients, also after DDP has moved them."""
        for name in self.pending:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                self._marks[name] = _mark_of(parameter, parameter.grad)

    def backward_has_ended(self) -> None:
        """Note pending gradients after a backward in which no callback could be queued."""
        if self.pending and not self._marks:
            self._note_gradients_and_norms()

    def begin_exchange(self) -> None:
        """Roll back pending changes without a gradient, at the first bucket."""
        if self.pending and not self._has_checked:
            self._roll_back_missing()  # this backward used no pending parameter

    def end_exchange(self, used: set[str], used_by_any: set[str]) -> None:
        """Make changes pending after all gradients have been exchanged.

        The names are those of parameters that this worker's backward, or any worker's, used.
        """
        remove_hooks(self._backward_hooks)
        self._num_exchanges += 1
        self.pending |= used
        self._pending_anywhere |= used_by_any
        self._marks.clear()
        self._norms.clear()
        # In a static graph's first iteration Lightning flushes DDP's buckets after the backward.
        with suppress(RuntimeError):
            # DDP writes averages at the end of backward, in a callback that it queues after this one.
            at_end_of_backward(lambda: at_end_of_backward(self._note_gradients_and_norms))

    def commit_all(self) -> None:
        """Commit all pending changes."""
        self._change(set(self.pending), commits=True)
        self._end_step(set(self._pending_anywhere))

    def roll_back_all(self) -> None:
        """Roll back all pending changes, even of an interrupted backward."""
        self._change(set(self._parameters), commits=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_gradients_and_norms(self) -> None:
        """Store all pending gradients after DDP has written the averages."""
        self.note_gradients()
        if self._began_with_pending or self._num_exchanges <= CAREFUL_EXCHANGES:
            gradients = {name: self._parameters[name].grad for name in self.pending}
            found = {name: gradient.detach() for name, gradient in gradients.items() if gradient is not None}
            # Norms are read, which synchronises with a GPU, only if a gradient is zero later.
            self._norms = dict(zip(found, torch._foreach_norm(list(found.values())), strict=True)) if found else {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_gradient(self, _: Any) -> None:
        if not self._has_checked:
            self._roll_back_missing()
            # Without an exchange (``no_sync``), autograd adds to the gradient, which is not a change by the user.
            at_end_of_backward(self.note_gradients)

    def _roll_back_missing(self) -> None:
        """Roll back pending changes of parameters with a missing gradient."""
        self._has_checked = True
        gone: set[str] = set()
        changed: dict[int | None, dict[str, Tensor]] = {}
        for name in self.pending:
            parameter, mark = self._parameters[name], self._marks.get(name)
            if parameter.grad is None:
                gone.add(name)
            elif mark is None or mark[:2] != _mark_of(parameter, parameter.grad)[:2]:
                changed.setdefault(self._owners.get(name), {})[name] = parameter.grad
        for gradients in changed.values():
            gone |= self._zeroed(gradients)
        if not gone:
            return
        self._change(gone, commits=False)
        self.on_drop(gone)
        if not self.progress and not self.is_stepping:
            self._rolled_back_without_a_step += 1
            if self._rolled_back_without_a_step == STEPS_BEFORE_WARNING:
                rank_zero_warn(
                    f"lightning_sparse: the gradients of {STEPS_BEFORE_WARNING} backwards were dropped, and no "
                    "torch.optim.Optimizer has stepped on these parameters: their unsent values are lost. If you "
                    "update weights without an optimizer, or an optimizer holds copies of them, call state.commit() "
                    "after each update (strategy.state, or the result of register_comm_hook)."
                )

    def _zeroed(self, changed: dict[str, Tensor]) -> set[str]:
        """Return names of changed gradients that ``zero_grad`` has cleared.

        The gradients are of one optimizer, which clears all or none.
        """
        zero = {name for name, gradient in changed.items() if not gradient.detach().any()}
        were_zero = {name for name in zero if name in self._norms and not bool(self._norms[name])}
        # A gradient that was zero after the exchange proves nothing if it has moved, because it may be a copy. So
        # gradients count as cleared if one became zero, or if all other changed ones are zero.
        addresses = {name: mark.address for name, mark in self._marks.items()}
        in_place = {name for name, gradient in changed.items() if addresses.get(name) == gradient.data_ptr()}
        written = (changed.keys() - were_zero) | in_place
        return zero & written if zero - were_zero or written <= zero else set()

    def _step_begins(self, optimizer: Optimizer, _: Arguments) -> None:
        self.is_stepping |= bool(self._owned_by(optimizer))
        if self._unexchanged is not None and (name := self._unexchanged.first(optimizer)) is not None:
            rank_zero_warn(
                f"lightning_sparse: an optimizer steps on {name!r}, which DDP does not exchange, so it differs between "
                "workers, as under plain DDP. It was frozen or absent when DDP wrapped the model, or its layer was "
                "replaced. Start a new fit after the change, or freeze layers only after DDP has wrapped the model."
            )
            self._unexchanged = None

    def _step_ends(self, optimizer: Optimizer) -> None:
        owned = self._owned_by(optimizer)
        if not owned:
            return
        self.is_stepping = False
        # A fused optimizer reads an overflow from found_inf and skips the step itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(found_inf):
            return
        self._owners.update(dict.fromkeys(owned, id(optimizer)))
        # An optimizer skips parameters without a gradient. Some optimizers drop gradients after the update.
        stepped = {name for name in self.pending & owned if not self._was_skipped(name)}
        self._change(stepped, commits=True)
        self._end_step(self._pending_anywhere & owned)

    def _owned_by(self, optimizer: Optimizer) -> set[str]:
        weights = (id(weight) for group in optimizer.param_groups for weight in group["params"])
        return {self._names[weight] for weight in weights if weight in self._names}

    def _was_skipped(self, name: str) -> bool:
        parameter, mark = self._parameters[name], self._marks.get(name)
        return parameter.grad is None and (mark is None or mark.weight_version == parameter._version)

    def _end_step(self, names: set[str]) -> None:
        self._committed_at.update(dict.fromkeys(names, self._num_exchanges))
        self._pending_anywhere -= names
        self._num_steps += 1
        if self._num_steps == STEPS_BEFORE_WARNING and (unowned := sorted(self.pending - self._owners.keys())):
            listed = ", ".join(unowned[:3]) + (", …" if len(unowned) > 3 else "")
            rank_zero_warn(
                f"lightning_sparse: {len(unowned)} parameters get gradients, but no optimizer stepped on them in "
                f"{STEPS_BEFORE_WARNING} steps ({listed}). Their gradients accumulate, count in the density and in "
                "Top-k, and make resumes inexact. Freeze them, requires_grad_(False), or pass them to an optimizer."
            )
        for call in self.step_receivers:
            call(names)

    def _change(self, names: set[str], *, commits: bool) -> None:
        self._is_changing = True
        (self._residuals.commit if commits else self._residuals.roll_back)(names)
        self.pending -= names
        self._is_changing = False
