"""A strategy that trains as n workers would, one after the other on one device."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states, reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.ddp.options import DensityControlMode, ExchangeOptions, require_density_control
from lightning_sparse.ddp.simulation import SimulatedWorker, SimulatedWorkers
from lightning_sparse.exchange import ExchangeMode
from lightning_sparse.exchange.payload import ValueDtype
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategies.checkpoint import VERSION, CheckpointOptions, OnWorldSizeChange, restore
from lightning_sparse.strategies.epochs import tell_epoch
from lightning_sparse.strategies.saving import KEY
from lightning_sparse.strategies.simulated_data import BatchesOfWorkers, loader_of_workers
from lightning_sparse.strategies.step_log import StepLog


class SimulatedWorkersStrategy(SingleDeviceStrategy):
    """Trains on one device as n workers would with :class:`SparseDDPStrategy`: the same numbers, n times the time.

    For studies: what 8 or 20 workers come to, on one GPU or a laptop. One model; each worker has its own residual (4
    bytes a parameter, and as many again), its own shard of the data, its own random numbers. A step takes a batch of
    each worker; with ``exchange="gather"`` and a constant threshold the weights are to the last bit those of n
    processes, and a checkpoint of one continues in the other.

    As in DDP, what the first worker logs and what buffers (batch norm) become in its forward is what remains; a number
    that is logged for an epoch is the mean over all workers. Validation, test and predict see all data at once.

    Each worker's loader comes from ``train_dataloader`` of its own, called with ``trainer.global_rank`` and
    ``trainer.world_size`` of that worker. Where it has no sampler for several workers it gets Lightning's, unless
    ``Trainer(use_distributed_sampler=False)``.

    Args:
        sparsifier: what to send, such as ``HardThreshold(threshold=0.01)``.
        num_workers: n, at least 1.
        local_clip_norm: see :class:`SparseDDPStrategy`.
        value_dtype: see :class:`SparseDDPStrategy`.
        exchange: see :class:`SparseDDPStrategy`; not ``"hierarchical"``.
        density_control: see :class:`SparseDDPStrategy`.
        on_world_size_change: see :class:`SparseDDPStrategy`.
        own_attributes: names of what the module keeps in attributes from one batch to the next, such as the state of a
            recurrent network: every worker has its own, of which a checkpoint holds the first worker's. What is not
            named, and is no parameter, buffer or random number, all have in common.
        device: ``"auto"`` is a GPU if there is one.

    Attributes:
        workers: of the running or last ``fit``, None before.

    Raises:
        ValueError: an invalid option; in ``fit`` manual optimization, a GradScaler, complex parameters or a module with
            its own ``on_before_batch_transfer``, which are not simulated.
        TypeError: something that is not a sparsifier.
    """

    strategy_name = "simulated_workers"

    def __init__(
        self,
        sparsifier: Sparsifier,
        num_workers: int = 8,
        *,
        local_clip_norm: float | None = None,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "gather",
        density_control: DensityControlMode = "calibrate",
        on_world_size_change: OnWorldSizeChange = "mean",
        own_attributes: Sequence[str] = (),
        device: str = "auto",
        **kwargs: Any,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(f"Expected a sparsifier such as HardThreshold(threshold=0.01), got {sparsifier!r}.")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ValueError(f"Invalid {num_workers=}. Must be a whole number of at least 1.")
        if exchange == "hierarchical":
            raise ValueError("exchange='hierarchical' goes by nodes, and simulated workers have none. Use 'gather'.")
        # To be checked as the strategy of real workers checks them.
        options = ExchangeOptions("gradient", local_clip_norm, value_dtype, exchange, density_control)
        require_density_control(sparsifier, density_control)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device=device, **kwargs)
        self.sparsifier = sparsifier
        self.num_workers = num_workers
        self.workers: SimulatedWorkers | None = None
        self.step_log = StepLog()
        self._options = options
        self._checkpoint_options = CheckpointOptions("full", on_world_size_change)
        self._per_layer_stats = False
        self._gradients: list[dict[str, Tensor]] = []
        self._random_states: list[Any] = []
        self._own_attributes = tuple(own_attributes)
        self._attributes: dict[int, dict[str, Any]] = {}

    def request_layer_stats(self) -> None:
        """Asks for per-layer numbers from the next ``fit`` on."""
        self._per_layer_stats = True

    @property
    def state(self) -> SimulatedWorker | None:
        """The first worker, by the name that other sparse strategies have for what they keep."""
        return None if self.workers is None else self.workers.each[0]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as every process of DDP does

    @override
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.step_log.clear()
        self._gradients, self._random_states = [{} for _ in range(self.num_workers)], []
        if trainer.state.fn != "fit":
            return
        module = self.lightning_module
        assert module is not None
        _require_simulable(module, getattr(self.precision_plugin, "scaler", None))
        missing = [name for name in self._own_attributes if not hasattr(module, name)]
        if missing:
            raise ValueError(f"Invalid own_attributes: {type(module).__name__} has no {', '.join(missing)}.")
        self._attributes = {}
        if self.workers is not None:
            self.workers.close()
        self.workers = SimulatedWorkers(
            self.num_workers,
            self.sparsifier,
            {name: one for name, one in _names(module).items() if one.requires_grad},
            local_clip_norm=self._options.local_clip_norm,
            exchange=self._options.exchange,
            value_dtype=self._options.value_dtype,
            holds_density=self._options.density_control == "hold",
            per_layer_stats=self._per_layer_stats,
        )
        self.workers.each[0].subscribe(self.step_log.add)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        with self._as_worker(0):  # a learning rate may follow from how many there are
            super().setup_optimizers(trainer)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self.world_size > 1:
            raise ValueError(
                "Simulated workers do not do all_gather: one has run when another has not. Start real workers with "
                "SparseDDPStrategy for that."
            )
        return super().all_gather(tensor, group, sync_grads)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return loader_of_workers(trainer, self._as_worker, self.num_workers) if trainer.training else dataloader

    @contextmanager
    def _as_worker(self, rank: int) -> Iterator[None]:
        """Within it this process is, to whoever asks the trainer, the worker of that rank."""
        self.global_rank, self.world_size = rank, self.num_workers
        try:
            with self._random_numbers_of(rank):
                yield
        finally:
            self.global_rank, self.world_size = 0, 1

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, BatchesOfWorkers):
            return batch  # one by one, when it is that worker's turn
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        batches, *rest = args
        assert isinstance(batches, BatchesOfWorkers)
        # The first worker last: what it leaves behind remains.
        for rank in range(self.num_workers - 1, 0, -1):
            with self._as_worker(rank), self._own_gradients(rank), self._own_state(rank):
                batch = super().batch_to_device(batches[rank])
                output = super().training_step(batch, *rest, **kwargs)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is not None:
                    assert self.lightning_module is not None
                    accumulated = self.lightning_module.trainer.accumulate_grad_batches
                    self.backward(loss / accumulated, None)
        with self._as_worker(0):
            return super().training_step(super().batch_to_device(batches[0]), *rest, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        calls = 0

        def closure_and_exchange() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ValueError(
                    f"Simulated workers do not do {type(optimizer).__name__}, which calls its closure several times "
                    "for a step. Start real workers with SparseDDPStrategy for that."
                )
            output = closure()
            self._exchange()
            return output

        output = super().optimizer_step(optimizer, closure_and_exchange, model, **kwargs)
        self.step_log.write(self.lightning_module)
        return output

    def _exchange(self) -> None:
        assert self.workers is not None
        assert self.lightning_module is not None
        parameters = _names(self.lightning_module)
        self._gradients[0] = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        reached = set().union(*self._gradients)
        averages = self.workers.average(self._gradients)
        for name, average in averages.items():
            parameters[name].grad = average if name in reached else None
        self._gradients = [{} for _ in range(self.num_workers)]

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.step_log.begin_batch(self.lightning_module)
        assert self.workers is not None
        assert self.lightning_module is not None
        if batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0:
            self._gradients = [{} for _ in range(self.num_workers)]  # what was not stepped on Lightning drops as well
        for worker in self.workers.each:
            tell_epoch(worker, self)

    @contextmanager
    def _own_gradients(self, rank: int) -> Iterator[None]:
        """Within it gradients are this worker's, of the batches since the last step."""
        assert self.lightning_module is not None
        parameters = _names(self.lightning_module)
        firsts = {name: one.grad for name, one in parameters.items()}
        for name, one in parameters.items():
            one.grad = self._gradients[rank].get(name)
        try:
            yield
        finally:
            self._gradients[rank] = {name: one.grad for name, one in parameters.items() if one.grad is not None}
            for name, one in parameters.items():
                one.grad = firsts[name]

    @contextmanager
    def _own_state(self, rank: int) -> Iterator[None]:
        """Within it the module's own attributes are this worker's; after it they and buffers are the first's again."""
        module = self.lightning_module
        assert module is not None
        buffers = {name: one.clone() for name, one in module.named_buffers()}
        firsts = {name: getattr(module, name) for name in self._own_attributes}
        if len(self._attributes) < self.num_workers - 1:
            self._attributes[rank] = copy.deepcopy(firsts)
        for name, value in self._attributes[rank].items():
            setattr(module, name, value)
        try:
            yield
        finally:
            self._attributes[rank] = {name: getattr(module, name) for name in self._own_attributes}
            for name, value in firsts.items():
                setattr(module, name, value)
            for name, one in module.named_buffers():
                if name in buffers:
                    one.copy_(buffers[name])

    @contextmanager
    def _random_numbers_of(self, rank: int) -> Iterator[None]:
        """Within it random numbers are this worker's; all begin with those of the first, which are everybody's."""
        has_cuda = self.root_device.type == "cuda"
        firsts = _collect_rng_states(has_cuda)
        if not self._random_states:
            self._random_states = [firsts] * self.num_workers
        if rank == 0:
            yield
            return
        _set_rng_states(self._random_states[rank])
        try:
            yield
        finally:
            self._random_states[rank] = _collect_rng_states(has_cuda)
            _set_rng_states(firsts)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if "optimizer_states" in checkpoint and self.workers is not None:
            checkpoint[KEY] = {
                "version": VERSION,
                "world_size": self.num_workers,
                "shared": self.workers.each[0].shared_state(),
                "residuals": [
                    {name: one.cpu() for name, one in worker.residuals.state_dict().items()}
                    for worker in self.workers.each
                ],
                "why_no_residuals": None,
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.workers is not None
        saved = checkpoint.get(KEY)
        for worker in self.workers.each:
            restore(worker, saved, self._checkpoint_options.on_world_size_change)

    @override
    def teardown(self) -> None:
        if self.workers is not None:
            self.workers.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Does nothing: it takes a sparsifier."""


def _names(module: LightningModule) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): one for name, one in module.named_parameters()}


def _require_simulable(module: LightningModule, scaler: object) -> None:
    wrong = None
    if not module.automatic_optimization:
        wrong = "manual optimization (automatic_optimization=False)"
    elif scaler is not None:
        wrong = "precision with a GradScaler; use 'bf16-mixed' or '32-true'"
    elif any(one.is_complex() for one in module.parameters()):
        wrong = "complex parameters"
    elif type(module).on_before_batch_transfer is not LightningModule.on_before_batch_transfer:
        wrong = "on_before_batch_transfer, which would be given the batches of all workers; use on_after_batch_transfer"
    if wrong is not None:
        raise ValueError(f"Simulated workers do not do {wrong}. Start real workers with SparseDDPStrategy for that.")
