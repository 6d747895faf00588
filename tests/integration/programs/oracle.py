"""A reference of sparse training with error feedback in plain tensors, without DDP and the package.

Modules stay unchanged. Every worker runs its backward alone, and then gathers masked dense tensors from all::

    backward   content = old .grad + g              of every parameter that this worker used
               p = e + content / S                  e of the last backward, if its gradient still waits for a step
               out = p where abs(p) >= λ            .grad = S · (Σ of all workers' out, in rank order) / n
               e' = p − out                         pending
               .grad += (Σ of old .grad of workers that did not use a parameter which others used) / n
    step       commits e' of the optimizer's parameters
    backward   rolls back pending residuals without a gradient
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

Select = Callable[[Tensor], Tensor]
"""Returns the mask of sent elements of the flat p of all used parameters."""


def at_least(threshold: float) -> Select:
    # In float64, where λ is exact; NaN is sent.
    return lambda compensated: (compensated.double().abs() < threshold).logical_not()


class Oracle:
    """The error feedback of this worker for a module.

    Attributes:
        committed: e by parameter name, as real numbers.
        sent: number of coordinates that this worker has sent so far.
        held: number of coordinates that it kept, counted in each exchange.
        offered: number of all coordinates, counted in each exchange.
        num_rolled_back: number of backwards of parameters that were rolled back.
    """

    def __init__(self, module: nn.Module, select: Select, scale: Callable[[], float] = lambda: 1.0) -> None:
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        named = module.named_parameters()
        self.parameters = {
            name.replace("_orig_mod.", ""): parameter
            for name, parameter in named
            if parameter.requires_grad and name not in ignored
        }
        self._synchronizes = True
        self._select, self._scale = select, scale
        self._pending: dict[str, Tensor] = {}
        self.begin_anew({name: torch.zeros_like(real(tensor.detach())) for name, tensor in self.parameters.items()})
        self._zeroed: set[str] = set()
        self._had_gradient: set[str] = set()
        self._old: dict[str, Tensor | None] = {}

    # Set by the loop that runs the training.

    def begin_backward(self) -> None:
        self._roll_back({name for name in self._pending if self._is_gone(name)})
        self._zeroed.clear()
        self._old = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None

    def end_backward(self, *, failed: bool = False) -> None:
        used = {name for name, parameter in self.parameters.items() if parameter.grad is not None}
        for name, parameter in self.parameters.items():
            new, parameter.grad = parameter.grad, self._old[name]
            if parameter.grad is None:
                parameter.grad = new
            elif new is not None:
                parameter.grad.copy_(parameter.grad + new.detach())
        self._old.clear()
        if self._synchronizes and not failed:
            self.exchange(used)

    def step_ends(self, optimizer: Optimizer) -> None:
        mine = {id(parameter): name for name, parameter in self.parameters.items()}
        names = {
            mine.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]
        } & self._pending.keys()
        if any(not self._is_finite(name) for name in names) and self._scale() != 1.0:
            return  # a fused optimizer skips a step that overflows by itself
        self.commit({name for name in names if not self._is_gone(name)})

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Receive the in-place zeroing of gradients, which zero gradients do not reveal."""
        self._zeroed |= {
            name
            for name, parameter in self.parameters.items()
            if any(parameter is other for group in optimizer.param_groups for other in group["params"])
        }

    def begin_anew(self, committed: dict[str, Tensor]) -> None:
        self.committed = committed
        self._pending.clear()
        self.sent = self.held = self.offered = self.num_rolled_back = self.num_exchanges = 0

    def commit(self, names: Any = None) -> None:
        for name in set(self._pending if names is None else names):
            self.committed[name] = self._pending.pop(name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    # Steps of the algorithm.

    def exchange(self, used: set[str]) -> None:
        flags = torch.tensor([float(name in used) for name in self.parameters])
        dist.all_reduce(flags)
        shared = [name for name, flag in zip(self.parameters, flags.tolist(), strict=True) if flag]
        old = {name: name not in used for name in shared}
        compensated = {
            name: self._pending.get(name, self.committed[name])
            + real(self._gradient(name, not old[name])) / self._scale()
            for name in shared
        }
        added = torch.cat([real(self._gradient(name, old[name])).flatten() for name in shared])
        dist.all_reduce(added)
        flat = torch.cat([tensor.flatten() for tensor in compensated.values()])
        is_sent = self._select(flat)
        out = torch.where(is_sent, flat, 0)
        outs = [torch.empty_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(outs, out)
        total = torch.zeros_like(out)
        for sent in outs:
            total += sent
        average = total / len(outs) * self._scale() + added / len(outs)
        rest = torch.where(is_sent, 0, flat)
        sizes = [tensor.numel() for tensor in compensated.values()]
        for name, mine, theirs in zip(shared, rest.split(sizes), average.split(sizes), strict=True):
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            real(parameter.grad).copy_(theirs.view_as(real(parameter.grad)))
            self._pending[name] = mine.view_as(self.committed[name]).clone()
            if theirs.any():
                self._had_gradient.add(name)
            else:
                self._had_gradient.discard(name)
        self.sent += int(is_sent.sum())
        self.held += int(rest.count_nonzero())
        self.offered += is_sent.numel()
        self.num_exchanges += 1

    def _gradient(self, name: str, is_part: bool) -> Tensor:
        gradient = self.parameters[name].grad
        return gradient.detach() if is_part and gradient is not None else torch.zeros_like(self.parameters[name])

    def _roll_back(self, names: set[str]) -> None:
        self.num_rolled_back += len(names)
        for name in names:
            del self._pending[name]

    def _is_gone(self, name: str) -> bool:
        gradient = self.parameters[name].grad
        if gradient is None or name in self._zeroed:
            return True
        return name in self._had_gradient and not gradient.any()

    def _is_finite(self, name: str) -> bool:
        gradient = self.parameters[name].grad
        return gradient is None or bool(real(gradient).isfinite().all())


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def follow_steps(optimizer: Optimizer, oracle: Oracle) -> None:
    optimizer.register_step_post_hook(lambda *_: oracle.step_ends(optimizer))


def follow_zeroing(optimizer: Any, oracle: Oracle) -> None:
    zero_grad = optimizer.zero_grad

    def zero_and_notify(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        if not set_to_none:
            oracle.zero_grad(optimizer)

    optimizer.zero_grad = zero_and_notify


class OracleStrategy(DDPStrategy):
    """Trains an unwrapped copy of the module on every worker; the oracle exchanges."""

    def __init__(self, make_oracle: Callable[..., Oracle]) -> None:
        self._followed: set[Optimizer] = set()
        super().__init__()
        self.make_oracle = make_oracle
        self.oracle: Oracle | None = None
        self._saved: dict[str, Tensor] | None = None

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.oracle = self.make_oracle(model, scale=self._scale)
        return model

    def _register_ddp_hooks(self) -> None:
        pass

    def _scale(self) -> float:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)
        for given in optimizers:
            for optimizer in {given, getattr(given, "base_optimizer", given)} - self._followed:
                follow_steps(optimizer, self.oracle)
                follow_zeroing(optimizer, self.oracle)
                self._followed.add(optimizer)
        for wrapped in self._lightning_optimizers:  # the optimizer of a user, with its own methods
            follow_zeroing(wrapped, self.oracle)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with backward_of(self.oracle):  # later code must see the exchanged gradients
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def block_backward_sync(self) -> Any:
        return self.oracle.no_sync()

    # A search for a learning rate restores the initial state.

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._saved = {name: tensor.clone() for name, tensor in self.oracle.committed.items()}
        super().save_checkpoint(*args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.oracle.begin_anew({name: tensor.clone() for name, tensor in self._saved.items()})


@contextmanager
def backward_of(*oracles: Oracle) -> Iterator[None]:
    for oracle in oracles:
        oracle.begin_backward()
    failed = True
    try:
        yield
        failed = False
    finally:
        for oracle in oracles:
            oracle.end_backward(failed=failed)
