"""A strategy that simulates n workers, in turn on one device."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.checkpointing.saving import collect
from lightning_sparse.engine.optimizer_steps import weak_method
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.sparsifiers.checks import require_count
from lightning_sparse.sparsifiers.protocol import Sparsifier
from lightning_sparse.strategies.arguments import require_arguments
from lightning_sparse.strategies.simulated.data import WorkerBatches, WorkerLoaders, make_worker_loaders
from lightning_sparse.strategies.simulated.limits import refuse, require_attributes, require_known, require_simulable
from lightning_sparse.strategies.simulated.turns import RandomNumbers, Turns, named_parameters
from lightning_sparse.strategies.simulated.workers import SimulatedWorker, SimulatedWorkers
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class SimulatedWorkersStrategy(SparseStrategy, SingleDeviceStrategy):
    """Simulates n workers of `SparseDDPStrategy` on one device, in n times the time.

    Use it to study accuracy with 8 or 20 workers on one GPU or a laptop. ``Trainer(accelerator=…, devices=1)`` chooses
    the device. There is one model. Each worker has its own residual (8 bytes per parameter), shard of the data and
    random numbers. A step takes a batch from each worker. With ``exchange="gather"`` and a constant threshold, the
    weights equal those of n processes bit for bit. Simulated workers can resume checkpoints of processes, and vice
    versa.

    As in DDP, logged numbers of a step and buffers (batch norm) are those of rank 0; a number logged for an epoch is
    the mean over all workers. Validation, test and predict use all data at once.

    Each worker's loader is the result of a ``train_dataloader`` call with ``trainer.global_rank`` and
    ``trainer.world_size`` of that worker. A loader without a distributed sampler gets Lightning's, unless you set
    ``Trainer(use_distributed_sampler=False)``.

    Args:
        num_workers: n, at least 1.
        exchange: the route by which sums are computed, as in `SparseDDPStrategy`.
        own_attributes: names of module attributes that persist between batches, such as the state of a recurrent
            network. Every worker has its own copy; a checkpoint contains rank 0's. All other attributes, except
            parameters, buffers and random numbers, are shared by all workers.

    Attributes:
        workers: the workers of the running or last ``fit``, in rank order in ``workers.each``; None before.
        state: the first worker; its ``set_threshold`` sets λ of all workers.

    Raises:
        ValueError: an option is invalid; or ``fit`` needs manual optimization, a GradScaler, complex parameters or the
            module's own ``on_before_batch_transfer``, which are not simulated.
        TypeError: the sparsifier has a wrong type.
    """

    state: SimulatedWorker | None
    _options_class: ClassVar[type] = GradientOptions
    _excluded_options = frozenset({"link_gbit_s"})
    _options: GradientOptions
    _turns: Turns
    _random_numbers: RandomNumbers

    def __init__(
        self,
        sparsifier: Sparsifier,
        num_workers: int = 8,
        *,
        exchange: ExchangeMode = "gather",
        own_attributes: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        require_count("num_workers", num_workers)
        self._options = self._make_options(GradientOptions, kwargs, exchange=exchange)
        if not isinstance(own_attributes, list | tuple) or not all(isinstance(name, str) for name in own_attributes):
            raise TypeError(f"Invalid {own_attributes=}. Must be a list of names, such as ['hidden_state'].")
        super().__init__(sparsifier, **kwargs)
        self.num_workers = num_workers
        self.workers: SimulatedWorkers | None = None
        self._own_attributes = tuple(own_attributes)
        self._loader: WorkerLoaders | None = None
        self._has_run = False

    @override
    def _lightning_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        known = inspect.signature(SingleDeviceStrategy).parameters
        device = arguments.pop("device", known["device"].default)  # a command line passes the default
        if device != known["device"].default:
            raise ValueError(f"Got {device=}. Workers use the device of Trainer(accelerator='gpu', devices=1).")
        require_arguments(self, arguments, known, "Lightning's SingleDeviceStrategy")
        return arguments

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Empty, so that each Trainer sets its own. The strategy uses the first; ``fit`` raises an error for more."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._root_device = devices[0]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as in every process of DDP

    @override
    def setup(self, trainer: Any) -> None:
        has_cuda = self.root_device.type == "cuda"
        # configure_optimizers may create loaders to compute the number of steps.
        self._random_numbers = RandomNumbers(self.num_workers, has_cuda, keeps=False)
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        require_simulable(self._module, trainer, getattr(self.precision_plugin, "scaler", None))
        require_attributes(self._module, self._own_attributes)
        self._turns = Turns(self._module, self.num_workers, self._own_attributes)
        self._random_numbers = RandomNumbers(self.num_workers, has_cuda, keeps=True)
        trained = {name: tensor for name, tensor in named_parameters(self._module).items() if tensor.requires_grad}
        self.workers = SimulatedWorkers(
            self.num_workers, self.sparsifier, trained, self._options, per_layer_stats=self.per_layer_stats
        )
        self._begin_fit(self.workers.each[0])
        self.averagers = self.workers.each

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        with self._as_worker(0):  # a learning rate may depend on the number of workers
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(weak_method(self._step_begins))

    def _step_begins(self, *_: Any) -> None:
        if not self._ignores_steps:
            refuse("steps that bypass Lightning, such as torch's own optimizer.step() in optimizer_step")

    # The current worker.

    @contextmanager
    def _as_worker(self, rank: int) -> Iterator[None]:
        """Use the rank and random numbers of a worker inside the context."""
        before = self.global_rank, self.world_size
        self._set_rank(rank, self.num_workers)
        try:
            with self._random_numbers.of(rank):
                yield
        finally:
            self._set_rank(*before)

    def _set_rank(self, rank: int, world_size: int) -> None:
        self.global_rank = self.local_rank = rank  # all are on one node
        self.world_size = world_size
        setattr(rank_zero_only, "rank", rank)  # noqa: B010 (mypy knows of no such attribute)

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._require_no_turn("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._require_no_turn("broadcast")
        return super().broadcast(obj, src)

    def _require_no_turn(self, collective: str) -> None:
        if self.world_size > 1:
            refuse(f"{collective}, because workers run one after the other")

    # Steps.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not self._module.trainer.training:
            return dataloader
        self._loader = make_worker_loaders(self._module.trainer, self._as_worker, self.num_workers)
        return self._loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, WorkerBatches):
            return batch  # training_step moves each batch in its worker's turn
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._has_run = False
        if batch_idx % self._module.trainer.accumulate_grad_batches == 0:
            self._turns.begin_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        batches, *rest = args
        if not isinstance(batches, WorkerBatches):
            refuse("training_step(dataloader_iter), which reads batches itself")
        if self._has_run:
            refuse("closures that are called several times per step, as by LBFGS or SAM")
        self._has_run = True
        self._turns.share_replaced_attributes()
        results = self._module.trainer._results
        assert results is not None
        output: STEP_OUTPUT = None
        for rank in reversed(range(self.num_workers)):  # rank 0 last, to keep its buffers and logged numbers
            with self._as_worker(rank), self._turns.of(rank):
                batch = super().batch_to_device(batches[rank])
                results.batch, results.batch_size = batch, None  # Lightning weights an epoch's logs by batch size
                output = super().training_step(batch, *rest, **kwargs)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is None:
                    raise ValueError(
                        "training_step returned None. Must return a loss on every worker, as with DDP. To skip a "
                        "batch, return a loss of zero, such as 0 * output.sum()."
                    )
                if rank != 0:  # Lightning calls backward for the returned output
                    self.backward(loss / self._module.trainer.accumulate_grad_batches, None)
        return output

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def closure_and_exchange() -> Any:
            output = closure()
            self._exchange()
            return output

        return super().optimizer_step(optimizer, closure_and_exchange, model, **kwargs)

    @override
    def _after_step(self, stepped: Any) -> None:
        assert self.workers is not None
        self.workers.commit()
        super()._after_step(stepped)

    def _exchange(self) -> None:
        assert self.workers is not None
        parameters, gradients = named_parameters(self._module), self._turns.take_gradients()
        reached = set().union(*gradients)
        require_known(parameters, reached, self.workers.each[0].parameter_sizes)
        for name, average in self.workers.average(gradients).items():
            parameters[name].grad = average if name in reached else None

    # Checkpoints, and the end.

    @override
    def _content(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
        assert self.workers is not None
        workers = self.workers.each
        contents = self.workers.run(lambda rank: collect(workers[rank], workers[rank].workers, self.worker_state))
        return contents[0]  # type: ignore[no-any-return]

    @override
    def teardown(self) -> None:
        if self._loader is not None:
            self._loader.close()
        super().teardown()
