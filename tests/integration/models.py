"""Small LightningModules, their data, and callbacks and functions that record a run."""

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import StepStats
from tests.workers import NUM_WORKERS

HAS_SAVE_ON_EXCEPTION = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters

SMALL_BUCKETS_MB = 0.004
"""Less than the middle layer of a Classifier (6.25 kB in float32): several buckets, rebuilt after the first step."""

NOTHING_IS_SENT = 1e9
"""A threshold that no gradient of these models reaches."""

WEIGHTS_ONLY: dict[str, Any] = (
    {"weights_only": True} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}
)
"""Option of functions that load a checkpoint; Lightning before 2.6 lacks it."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer that steps with an inner optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Classifier(LightningModule):
    """Three layers and plain SGD with learning rate 1, so that a weight moves by exactly the exchanged value."""

    default_optimizer = staticmethod(sgd)
    is_manual = False

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Linear(8, 40)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.make_optimizer = make_optimizer or self.default_optimizer
        self.automatic_optimization = not self.is_manual
        self.batches: list[list[Tensor]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.first(inputs).tanh()).tanh())

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0].to(self.first.weight.dtype)), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Normalized(Classifier):
    """Begins with a batch norm, whose statistics differ between workers."""

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__(make_optimizer)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))


class WithEmbedding(Classifier):
    """Begins with an embedding of its inputs, which it takes for words."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8, sparse=sparse)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.words((10 * inputs).long().remainder(40)).mean(1))


class ManualClassifier(Classifier):
    is_manual = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batches.append(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class TwoPlayers(LightningModule):
    """Two networks with an optimizer each, trained in turn as in a GAN.

    Args:
        toggles: whether only the player in training requires gradients.
        zeroes_first: whether to zero gradients before a backward; otherwise after a step.
        set_to_none: argument of ``zero_grad``.
        reaches_both: whether the loss of the judge has gradients for the generator.
    """

    def __init__(
        self, *, toggles: bool = True, zeroes_first: bool = False, set_to_none: bool = True, reaches_both: bool = False
    ) -> None:
        super().__init__()
        self.toggles, self.zeroes_first, self.set_to_none = toggles, zeroes_first, set_to_none
        self.reaches_both = reaches_both
        generator = torch.Generator().manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))
        self.judge = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.automatic_optimization = False

    def generator_loss(self, inputs: Tensor) -> Tensor:
        return F.softplus(-self.judge(self.generator(inputs))).mean()

    def judge_loss(self, inputs: Tensor) -> Tensor:
        fake = self.generator(inputs)
        fake = fake if self.reaches_both else fake.detach()
        return (F.softplus(-self.judge(inputs)) + F.softplus(self.judge(fake))).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.generator_loss, self.judge_loss), strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            if self.zeroes_first:
                optimizer.zero_grad(set_to_none=self.set_to_none)
            self.manual_backward(loss(batch[0]))
            optimizer.step()
            if not self.zeroes_first:
                optimizer.zero_grad(set_to_none=self.set_to_none)
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return sgd(self.generator.parameters()), sgd(self.judge.parameters())


class Recorder(Callback):
    """Records hooks, weights, residuals and exchanges before teardown."""

    def __init__(self) -> None:
        self.comm_hooks: list[str | None] = []
        self.views: list[bool] = []
        self.initial: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.residuals: dict[str, Tensor] = {}
        self.steps: list[StepStats] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.initial = clones(pl_module.named_parameters())
        state = getattr(trainer.strategy, "state", None)
        if state is not None:
            state.subscribe(self.steps.append)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Read here: teardown unwraps the model.
        self.views.append(trainer.strategy.model.gradient_as_bucket_view)
        self.comm_hooks.append(trainer.strategy.model._get_ddp_logging_data().get("comm_hook"))
        self.weights = clones(pl_module.named_parameters())
        state = getattr(trainer.strategy, "state", None)
        if state is not None:
            self.residuals = state.residuals.state_dict()


def data(num_samples: int = 64, batch_size: int = 4) -> DataLoader:
    """Return equal samples on all workers; Lightning gives each worker every n-th of them."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(num_samples, 8, generator=generator)
    labels = torch.randint(0, 3, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size)


def search_restriction() -> str | None:
    """Return None if training restarts at the first batch after a learning rate search, or why not."""
    if RequirementCache("lightning>=2.5.3"):
        return None
    return "Lightning before 2.5.3 goes on in the middle of an epoch after a search for a learning rate"


@contextmanager
def messages_of(messages: list[str]) -> Iterator[None]:
    """Append the messages of ``rank_zero_info`` to a list."""

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]  # depends on its version
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def warnings_of(messages: list[str], words: str = "") -> Iterator[None]:
    """Append the warnings that contain these words to a list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages += [str(warning.message) for warning in caught if words in str(warning.message)]


def world_size() -> int:
    """Return the number of worker processes of the running test."""
    return int(os.environ.get(NUM_WORKERS, 1))


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def quiet_trainer(strategy: Any, *, num_workers: int | None = None, max_steps: int = 3, **options: Any) -> Trainer:
    """Return a Trainer without loggers and progress bar, on the workers of the test by default."""
    if NUM_WORKERS in os.environ:
        os.environ["WORLD_SIZE"] = os.environ[NUM_WORKERS]
    num_workers = num_workers or world_size()
    saves = any(isinstance(callback, Checkpoint) for callback in options.get("callbacks", []))
    options = QUIET | {"enable_checkpointing": saves} | options
    return Trainer(strategy=strategy, accelerator="cpu", devices=num_workers, max_steps=max_steps, **options)


def compiled(module: nn.Module, graphs: list[int], backend: str = "eager") -> Any:
    """Return the module, compiled; each graph appends its number of inputs to a list."""

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(module, backend=note)


def memory(name: str) -> int:
    """Return an entry of this process's /proc/self/status, in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def clones(named_tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors}


def mean_of(workers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of all workers by name, summed in float64."""
    return {
        name: (sum(worker[name].double() for worker in workers) / len(workers)).to(tensor.dtype)
        for name, tensor in workers[0].items()
    }


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the flat gradient of a loss by parameter name, computed without DDP."""
    model.zero_grad()
    loss().backward()
    return {
        name: torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten().clone()
        for name, parameter in model.named_parameters()
    }


def assert_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Compare nested tensors to the last bit; ``what`` starts the message."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}" if what else text
    )


class ScaledPrecision(MixedPrecision):
    """Scales the loss and computes in float32.

    On a CPU Lightning replaces 16-mixed by bf16-mixed, which has no scaler. A plugin keeps its own scaler.
    """

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)
