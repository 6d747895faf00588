"""One step of sparse averaging: named flat buckets in, the same averages on all workers out.

Every worker brings the same buckets in the same order. The engine does not ask what they are: gradients that DDP's hook
brings one by one while backward runs, or how far a worker's parameters have drifted. For each:

1. compensate    p = e + g / S, in the residual's memory
2. select        the sparsifier picks coordinates of p, none of layers that are left out
3. keep          e' = p − out stays in the residual
4. exchange      out sets off

and once all are there:

5. finish        (1/n) Σ_i out_i is in all averages; the numbers of the step are known from all workers' headers
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.engine.control.calibrator import Calibrator
from lightning_sparse.engine.messages import say_other_sparsifier
from lightning_sparse.engine.state.snapshot import Snapshot
from lightning_sparse.engine.step_stats import StepStats, step_stats
from lightning_sparse.engine.transport_options import TransportOptions
from lightning_sparse.exchange import Buffers, Exchange, ExchangeMode, Workers
from lightning_sparse.exchange.pending import LostWorkerError
from lightning_sparse.exchange.wire import Wire, require_wire, wire_of
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.selection.numbers import header_fields
from lightning_sparse.sparsifiers import HardThreshold, Sparsifier, WholeStep


class Engine:
    """What one worker needs to average sparsely, step by step. Collective: all workers make one and call it alike.

    Args:
        sparsifier: chooses what is sent. Copied, so that calibration never changes the caller's own.
        options: how values travel.
        group: the process group; None is the default group.
        per_layer_stats: whether `StepStats` holds numbers of every layer.
        workers: others than the group's.

    Raises:
        ValueError: values are to travel as whole numbers, for which the sparsifier has no grid.

    Attributes:
        sparsifier: the engine's own; a calibrated λ is in it once calibration has ended.
        last_step: the numbers of the last step, None before the first.
        wait_seconds: how long this worker waited in the last step, once it had handed over its last bucket.
        next_step: what the sparsifier is told that the next step's number is; the caller's to set back.
        epoch: the last that the sparsifier was told of; None where it does not know of any.
        calibrator: sets λ.
        subscribers: who is told of each step's numbers; see ``subscribe``.
        of_whole_model: makes of a step's numbers those of the model, where others hold other parts of it: the same
            result on all of them.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        options: TransportOptions,
        *,
        group: dist.ProcessGroup | None = None,
        per_layer_stats: bool = False,
        workers: Workers | None = None,
    ) -> None:
        require_wire(sparsifier, options.value_dtype)
        self.sparsifier = copy.deepcopy(sparsifier)
        self.last_step: StepStats | None = None
        self.next_step = 0
        self.wait_seconds = 0.0
        self.epoch: int | None = None
        # As text: what a sparsifier of the user's own is set with need not be something that a checkpoint can hold.
        self._settings = {name: repr(value) for name, value in sparsifier.settings().items()}
        self._exchange = Exchange(options.exchange, group, options.link_gbit_s, workers)
        self.calibrator = Calibrator(
            self.sparsifier,
            speaks=self.workers.rank == 0,
            holds_density=options.holds_density,
            keeps_rest=options.keeps_rest,
        )
        self._calibrates: bool | None = None
        self._options = options
        self._per_layer_stats = per_layer_stats or self.calibrator.needs_layers
        self._extraction = self._make_extraction()
        self._averages = Buffers()
        self.subscribers: list[Callable[[StepStats], None]] = []
        self.of_whole_model: Callable[[StepStats], StepStats] = lambda stats: stats
        self._buckets: list[FlatBucket] = []
        self._headers: list[Tensor] = []

    def _make_extraction(self) -> Extraction:
        return Extraction(
            self.sparsifier,
            num_slices=self.workers.num_workers if self._exchange.counts_slices else 0,
            per_layer=self._per_layer_stats,
            keeps_rest=self._options.keeps_rest,
        )

    @property
    def workers(self) -> Workers:
        """The workers that take part."""
        return self._exchange.workers

    def subscribe(self, receiver: Callable[[StepStats], None]) -> None:
        """Calls the receiver with the numbers of every step when its exchange is over; it must not communicate."""
        self.subscribers.append(receiver)

    def close(self) -> None:
        """Ends groups of the exchange's own."""
        self._exchange.close()

    @property
    def exchange_mode(self) -> ExchangeMode:
        """The route that was asked for."""
        return self._exchange.mode

    @property
    def is_calibrating(self) -> bool:
        """Whether λ is not known yet, so that everything is sent."""
        return self.calibrator.is_running if self._calibrates is None else self._calibrates

    def warmup_clone(self, exchange: Exchange, names: Sequence[str], *, calibrates: bool) -> "Engine":
        """Returns an engine that does the same with another exchange, and of whose steps nobody is told.

        Args:
            exchange: the other one.
            names: of layers that will have a λ of their own each, if any will.
            calibrates: whether λ is not known yet.
        """
        clone = copy.copy(self)
        clone._exchange, clone._calibrates = exchange, calibrates
        clone._averages, clone._buckets, clone._headers = Buffers(), [], []
        clone.sparsifier = copy.deepcopy(self.sparsifier)
        if isinstance(clone.sparsifier, HardThreshold) and clone.sparsifier.threshold is None and not calibrates:
            clone.sparsifier.fix_threshold(1.0)  # as good as the one that calibration will find
            if self.calibrator.needs_layers:
                clone.sparsifier.fix_layers({name: 1.0 + place for place, name in enumerate(names)})
        clone._extraction = clone._make_extraction()
        return clone

    def forget_sizes(self) -> None:
        """Gives memory back that buckets of other sizes needed; also in the middle of a step."""
        self._averages.forget()
        self._exchange.forget_sizes()

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Tells the sparsifier that an epoch begins."""
        self.epoch = epoch
        self.sparsifier.begin_epoch(epoch, learning_rates)

    def begin(self) -> None:
        """Begins a step; one that was broken off in its middle is forgotten."""
        if self._buckets:
            self._averages.forget()  # what was under way still arrives there
        self._buckets.clear()
        self._exchange.begin()
        self.sparsifier.begin_step(self.next_step, self.workers.rank)

    @property
    def needs_survey(self) -> bool:
        """Whether ``survey`` must be called before a step's first ``add``."""
        return self.sparsifier.needs_survey

    def survey(self, buckets: Sequence[FlatBucket]) -> None:
        """Shows the sparsifier a whole step, all of whose buckets are there; without ``needs_survey`` does nothing."""
        if self.needs_survey:
            dtype = max((bucket.residual.before.dtype for bucket in buckets), key=lambda one: one.itemsize)
            num_elements = sum(bucket.layout.num_elements for bucket in buckets)
            self.sparsifier.survey(WholeStep([partial(one.whole, dtype) for one in buckets], num_elements, dtype))

    def add(self, bucket: FlatBucket) -> None:
        """Takes out of a bucket what is sent, and starts its exchange. Collective."""
        self._buckets.append(bucket)
        gradient, layout, dtype = bucket.gradient, bucket.layout, bucket.residual.after.dtype
        bucket.average = gradient
        if gradient.dtype != dtype:  # the average does not fit it
            bucket.average = self._averages.take(bucket.index, gradient.numel(), dtype, gradient.device)
        shipment = self._exchange.open(
            bucket.index,
            self._wire(dtype),
            header_fields(layout, self._per_layer_stats) + (0 if bucket.notes is None else bucket.notes.numel()),
            bucket.average,
            is_last=bucket.is_last,
            is_full=self.is_calibrating,
        )
        header = self._extraction.fill(bucket, shipment, measures_gradient=self.is_calibrating)
        if bucket.notes is not None:
            header = torch.cat([header, bucket.notes])
        self._exchange.start(shipment, header)

    def add_all(self, buckets: Iterable[FlatBucket]) -> None:
        """Add buckets as they come, or once all are there for a sparsifier that must see the whole step. Collective."""
        if self.needs_survey:
            buckets = list(buckets)
            self.survey(buckets)
        for bucket in buckets:
            self.add(bucket)

    def _wire(self, residual_dtype: torch.dtype) -> Wire:
        return wire_of(self._options.value_dtype, residual_dtype, None if self.is_calibrating else self.sparsifier)

    def finish(self) -> list[Tensor]:
        """Ends the exchange, with the step's only wait for the device: all averages are there. Collective.

        Returns:
            All workers' notes by bucket: float64, shape (n, numbers), on the CPU.

        Raises:
            RuntimeError: a worker ended or stopped; names its rank where torch tells it.
        """
        begin = perf_counter()
        try:
            headers, self._sent_bytes, self._dense_elements = self._exchange.finish()
            self.wait_seconds = perf_counter() - begin
        except LostWorkerError as error:
            raise RuntimeError(f"Exchange {self.next_step} failed: {error}") from error
        lengths = [0 if bucket.notes is None else bucket.notes.numel() for bucket in self._buckets]
        split = [
            torch.split(header, [header.shape[1] - length, length], dim=1)
            for header, length in zip(headers, lengths, strict=True)
        ]
        self._headers = [own for own, _ in split]
        if self.sparsifier.needs_averages:
            for bucket in self._buckets:
                self.sparsifier.observe(bucket.layout, bucket.average)
        return [notes for _, notes in split]

    def account(self, *, more_bytes: int = 0, dense_exchanges: int = 1, counts: bool = True) -> None:
        """Ends the step: calibration and subscribers learn its numbers.

        Args:
            more_bytes: what this worker handed to collectives of the caller's own in this step.
            dense_exchanges: how many dense exchanges of gradients it stands for.
            counts: whether it is part of training for sure. If not, a density that is held takes no notice of it until
                ``calibrator.confirm``.
        """
        buckets, self._buckets = self._buckets, []
        before = self.last_step
        stats = step_stats(
            0 if before is None else before.step + 1,
            [bucket.layout for bucket in buckets],
            self._headers,
            payload_bytes=self._sent_bytes + more_bytes,
            dense_bytes=dense_exchanges * sum(bucket.gradient.nbytes for bucket in buckets),
            dense_elements=self._dense_elements,
            threshold=self.sparsifier.current_threshold,
            is_calibration=self.is_calibrating,
        )
        self.last_step = stats = self.of_whole_model(stats)
        self.next_step += 1
        (self.calibrator.observe if counts else self.calibrator.expect)(stats, before)
        for receiver in self.subscribers:
            receiver(stats)

    def reset(self) -> None:
        """Returns to the state before the first step."""
        self.calibrator.begin()
        self._exchange.load_state_dict({})
        self.sparsifier.load_state_dict({})
        self.last_step = self.epoch = None
        self.next_step = 0

    def numbers(self) -> dict[str, Any]:
        """Return what is equal on all ranks; plain values but for ``last_step``, which is a `StepStats`."""
        return {
            "settings": self._settings,
            **self.calibrator.state_dict(),
            "last_step": self.last_step,
            "next_step": self.next_step,
        }

    def exchange_history(self) -> dict[str, Any]:
        """Return what the exchange has seen of former steps."""
        return self._exchange.state_dict()

    def snapshot(
        self, numbers: Mapping[str, Any] | None = None, exchange_history: Mapping[str, Any] | None = None
    ) -> Snapshot:
        """Return numbers and history, without tensors of an averager.

        Args:
            numbers: the result of ``numbers`` when the state to save was in force; None for the current state.
            exchange_history: the result of ``exchange_history`` at the same moment.

        Raises:
            TypeError: the sparsifier's state is no dict.
        """
        numbers = dict(self.numbers() if numbers is None else numbers)
        last_step, next_step = numbers["last_step"], numbers["next_step"]
        numbers["last_step"] = None if last_step is None else asdict(replace(last_step, layers={}))
        sparsifier: object = self.sparsifier.state_dict(next_step)
        if not isinstance(sparsifier, dict):
            name = type(self.sparsifier).__name__
            raise TypeError(f"{name}.state_dict returned {type(sparsifier).__name__}. Return a dict of plain values.")
        history = self.exchange_history() if exchange_history is None else dict(exchange_history)
        return Snapshot(numbers, {"exchange": history, "sparsifier": sparsifier})

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from another run's numbers and history.

        λ and its calibration continue only if the sparsifier has the same settings as in that run. What the history
        lacks begins anew.
        """
        saved, history = snapshot.numbers, snapshot.history
        if saved["settings"] == self._settings:
            self.calibrator.load_state_dict(saved)
            self.sparsifier.load_state_dict(history.get("sparsifier", {}))
            self.epoch = None
        elif self.workers.num_workers > 1 and self.workers.rank == 0:  # a single worker keeps nothing back
            say_other_sparsifier(self._settings, saved["settings"])
        self.last_step = None if saved["last_step"] is None else StepStats(**saved["last_step"])
        self.next_step = saved["next_step"]
        self._exchange.load_state_dict(history.get("exchange", {}))
