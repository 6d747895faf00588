"""Runs a program under plain DDP, the sparse exchange or the oracle, and records the training.

A program is a function of a ``World``: a training as a user would write it, except for calls in which the four kinds
of world differ (wrapping a module, a strategy, a backward, ``no_sync``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse import (
    DDPGradientAverager,
    HardThreshold,
    SparseDDPStrategy,
    Sparsifier,
    StepStats,
    register_comm_hook,
)
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.exchange.exchange import ExchangeMode
from tests.integration.models import SMALL_BUCKETS_MB
from tests.integration.programs.oracle import (
    Oracle,
    OracleStrategy,
    Select,
    at_least,
    backward_of,
    follow_steps,
    follow_zeroing,
)

Kind = Literal["ddp", "zero", "sparse", "oracle"]
PAIRS: tuple[tuple[Kind, Kind], ...] = (("ddp", "zero"), ("oracle", "sparse"))
"""Pairs of worlds that must agree; the first is the reference."""


@dataclass
class Run:
    """The record of a training on one worker.

    Attributes:
        stepped_on: the gradients of each optimizer step.
        seen: tensors that the program recorded, for comparison.
        texts: texts that the program recorded, for comparison.
        notes: records without comparison.
        sent: number of sent coordinates, of this worker in the oracle, of all workers in the sparse kinds.
    """

    kind: Kind
    comm_hooks: list[str | None] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    non_finite: list[bool] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)
    stepped_on: list[list[Tensor | None]] = field(default_factory=list)
    global_step: int = 0
    epochs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    seen: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    texts: list[str] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    sent: int = 0
    held: int = 0
    offered: int = 0
    num_exchanges: int = 0
    num_rolled_back: int = 0

    def moved(self, name: str) -> bool:
        return not torch.equal(self.state[name], self.initial[name])


class World:
    """One kind of data-parallel training.

    Args:
        kind: kind of training.
        make_sparsifier: creates the sparsifier of the sparse kind.
        select: selection of the oracle.
        exchange: route of the sparse kinds.
    """

    def __init__(
        self, kind: Kind, make_sparsifier: Callable[[], Sparsifier], select: Select, exchange: ExchangeMode
    ) -> None:
        self.kind, self.exchange = kind, exchange
        self.run = Run(kind)
        self._make_sparsifier, self._select = make_sparsifier, select
        self._oracles: list[tuple[str, Oracle]] = []
        self._states: list[tuple[str, DDPGradientAverager]] = []
        self._modules: list[tuple[str, nn.Module]] = []
        self._watched: set[int] = set()

    def sparsifier(self) -> Sparsifier:
        return HardThreshold(threshold=0.0) if self.kind == "zero" else self._make_sparsifier()

    # For a Trainer.

    def strategy(self, **ddp_options: Any) -> DDPStrategy:
        if self.kind == "oracle":
            return OracleStrategy(partial(self._make_oracle, ""))
        ddp_options = {"bucket_cap_mb": SMALL_BUCKETS_MB} | ddp_options
        if self.kind == "ddp":
            return DDPStrategy(**ddp_options)
        return SparseDDPStrategy(self.sparsifier(), exchange=self.exchange, **ddp_options)

    # For a custom loop.

    def wrap(
        self,
        model: nn.Module,
        name: str = "",
        grad_scaler: torch.amp.GradScaler | None = None,
        make_ddp: Callable[..., nn.Module] = DistributedDataParallel,
        **ddp_options: Any,
    ) -> nn.Module:
        """Return the module to call; several modules of a program need names."""
        self.follow_module(model, name)
        if self.kind == "oracle":
            self._make_oracle(name, model, scale=(lambda: 1.0) if grad_scaler is None else grad_scaler.get_scale)
            return model
        if make_ddp is DistributedDataParallel:
            ddp_options = {"bucket_cap_mb": SMALL_BUCKETS_MB} | ddp_options
        wrapped = make_ddp(model, **ddp_options)
        if self.kind in ("zero", "sparse"):
            options = GradientOptions(exchange=self.exchange)
            state = register_comm_hook(wrapped, self.sparsifier(), options, grad_scaler=grad_scaler)
            self.follow_state(state, name)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        with self.backwards():
            loss.backward()

    def backwards(self) -> Any:
        """A context around a backward, for programs that do not call ``loss.backward()`` themselves."""
        return backward_of(*(oracle for _, oracle in self._oracles)) if self._oracles else nullcontext()

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        if self.kind != "oracle":
            with module.no_sync():
                yield
            return
        with ExitStack() as stack:
            for _, oracle in self._oracles:
                stack.enter_context(oracle.no_sync())
            yield

    def watch(self, *optimizers: Optimizer) -> None:
        """Record the gradients of each step, and notify the oracle of steps."""
        for optimizer in optimizers:
            for _, oracle in self._oracles:
                follow_steps(optimizer, oracle)
                follow_zeroing(optimizer, oracle)
            self.note_steps(optimizer)

    def commit(self) -> None:
        for _, oracle in self._oracles:
            oracle.commit()
        for _, state in self._states:
            state.commit()

    # Records.

    def follow_module(self, module: nn.Module, name: str = "") -> None:
        self._modules.append((name, module))
        self.run.initial |= {name + key: tensor.detach().clone() for key, tensor in module.state_dict().items()}

    def follow_state(self, state: DDPGradientAverager, name: str = "") -> None:
        self._states.append((name, state))
        state.subscribe(self._note_exchange)

    def note_steps(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._watched:
            return
        self._watched.add(id(optimizer))

        def note(optimizer: Optimizer, *_: Any) -> None:
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            self.run.stepped_on.append(
                [None if gradient is None else gradient.detach().clone() for gradient in gradients]
            )

        optimizer.register_step_post_hook(note)

    def finish(self) -> Run:
        """Record the final state."""
        run = self.run
        for name, module in self._modules:
            run.state |= {name + key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
        for name, oracle in self._oracles:
            run.residuals |= {name + key: tensor.flatten().clone() for key, tensor in oracle.committed.items()}
            run.sent += oracle.sent
            run.held += oracle.held
            run.offered += oracle.offered
            run.num_exchanges += oracle.num_exchanges
            run.num_rolled_back += oracle.num_rolled_back
        for name, state in self._states:
            run.residuals |= {name + key: residual.clone() for key, residual in state.residuals.state_dict().items()}
        return run

    def _make_oracle(self, name: str, model: nn.Module, scale: Callable[[], float]) -> Oracle:
        oracle = Oracle(model, self._select, scale)
        self._oracles.append((name, oracle))
        return oracle

    def _note_exchange(self, step: StepStats) -> None:
        self.run.densities.append(step.density)
        self.run.non_finite.append(step.non_finite > 0)
        self.run.num_exchanges += 1
        self.run.sent += step.selected
        self.run.offered += step.num_workers * step.num_elements


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        program: the training.
        check: gets the runs of both workers in a world, and fails unless the subject of the row took effect.
        threshold: λ of the sparse exchange and of its oracle, which sends some values and keeps others.
            None compares only λ = 0; a comment beside it gives the reason.
        rolls_back: whether the oracle rolls exchanges back because the program drops gradients.
        make_sparsifier: replaces the hard threshold.
        select: replaces the selection of the oracle.
        exchange: the route of both sparse kinds. With two workers all routes give the same bits.
        leaves_out: whether a backward skips some parameters, so that λ = 0 does not send everything.
        is_refused: whether the sparse exchange raises, so that there is no comparison with ddp.
        warns_of: names in warnings of rank 0 with a sparse exchange but not with ddp.
        kinds: the worlds of the row.
        missing: returns why plain DDP of these versions cannot run it, or None.
    """

    program: Callable[[World], None]
    check: Callable[[list[Run]], None]
    threshold: float | None = 0.05
    rolls_back: bool = False
    make_sparsifier: Callable[[], Sparsifier] | None = None
    select: Select | None = None
    exchange: ExchangeMode = "auto"
    leaves_out: bool = False
    is_refused: bool = False
    warns_of: frozenset[str] = frozenset()
    kinds: tuple[Kind, ...] = ("ddp", "zero", "oracle", "sparse")
    missing: Callable[[], str | None] = lambda: None

    def world(self, kind: Kind) -> World:
        threshold = 0.0 if self.threshold is None else self.threshold
        make_sparsifier = self.make_sparsifier or partial(HardThreshold, threshold=threshold)
        return World(kind, make_sparsifier, self.select or at_least(threshold), self.exchange)

    @property
    def worlds(self) -> tuple[Kind, ...]:
        """DDP comes first, because Lightning gives some warnings once per process."""
        return tuple(kind for kind in self.kinds if self.threshold is not None or kind in ("ddp", "zero"))
