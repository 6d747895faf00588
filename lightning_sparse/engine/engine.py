"""One step of sparse averaging, from named flat buckets to their averages.

Every worker passes the same buckets in the same order, of gradients or of drifts. For each bucket:

1. compensate    p = e + g / S in the residual's memory; e: residual, g: gradient or drift, S: loss scale
2. select        the sparsifier picks coordinates of p; in left-out layers, only non-finite ones
3. keep          e' = p − out stays in the residual; out: the values to send
4. exchange      the exchange of out starts

and after the last bucket:

5. finish        every ``bucket.average`` holds (1/n) Σ_i out_i, or the mean over the coordinate's senders; the headers
                 of all workers give the step's statistics
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from lightning_sparse.engine.calibrator import Calibrator
from lightning_sparse.engine.options import DriftOptions, ExchangeOptions
from lightning_sparse.engine.snapshot import Snapshot, not_plain
from lightning_sparse.engine.step_stats import StepStats, statistics_of
from lightning_sparse.exchange.exchange import Exchange
from lightning_sparse.exchange.wire import wire_of
from lightning_sparse.exchange.workers import LostWorkerError, Workers
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.selection.extraction import Extraction
from lightning_sparse.selection.statistics import header_fields
from lightning_sparse.sparsifiers.hard_threshold import Dense, HardThreshold
from lightning_sparse.sparsifiers.protocol import Sparsifier

_Bucket = TypeVar("_Bucket", bound=FlatBucket)


class Engine:
    """Averages buckets sparsely. Collective: all workers make the same calls.

    Args:
        sparsifier: selects coordinates. Copied, so that calibration does not change the caller's sparsifier.
        options: the options of the exchange.
        group: the process group; None is the default group.
        per_layer_stats: whether `StepStats` holds the statistics of every layer.
        workers: replaces the group's workers. Without it, a group of one worker sends nothing; values pass unchanged.

    Raises:
        ValueError: the options do not support the sparsifier's values.

    Attributes:
        sparsifier: the engine's copy, with the calibrated λ; `Dense` for a group of one worker.
        options: the options; for a group of one worker without a ``value_dtype``.
        workers: the workers that exchange values.
        exchange: routes payloads between the workers.
        calibrator: sets λ.
        given_calibrator: sets λ of the given sparsifier, which checkpoints hold; the same object, except for a group of
            one worker.
        per_layer_stats: whether headers hold the statistics of every layer.
        last_step: the statistics of the last step, None before the first.
        wait_seconds: the duration of ``finish`` in the last step on this worker. On a GPU, ``finish`` waits for queued
            backward work and all headers, not for the averages.
        next_step: the number of the next step for the sparsifier; the caller may set it back.
        subscribers: called with the statistics of each step after its exchange; must not communicate.
        combine_shards: turns this rank's statistics into those of the whole model, if it is sharded. All ranks of a
            replica call it and get the same result.
        watch_next: called with every bucket of the next exchange before its values are selected; None afterwards.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        options: ExchangeOptions,
        *,
        group: dist.ProcessGroup | None = None,
        per_layer_stats: bool = False,
        workers: Workers | None = None,
    ) -> None:
        options.validate(sparsifier)
        # Only a density that is compared between workers may determine the sizes of messages.
        density = sparsifier.density if isinstance(sparsifier, HardThreshold) else None
        self.exchange = Exchange(options.exchange, group, options.link_gbit_s, workers, density)
        self.workers = self.exchange.workers
        # As text, because a checkpoint may not support the types in a custom sparsifier's settings.
        self._settings = {name: repr(value) for name, value in sparsifier.settings().items()}
        self._given_sparsifier = self.sparsifier = copy.deepcopy(sparsifier)
        calibrator_of = partial(Calibrator, options=options, logs=self.workers.rank == 0)
        self.given_calibrator = self.calibrator = calibrator_of(self.sparsifier)
        if workers is None and self.workers.num_workers == 1 and self.exchange.has_shortcut:  # nothing to exchange
            # Checkpoints still contain the given sparsifier's λ and history, for a resume on several workers.
            self.sparsifier, options = Dense(), replace(options, value_dtype="float32")
            self.calibrator = calibrator_of(self.sparsifier)
        self.options = options
        self.last_step: StepStats | None = None
        self.next_step = 0
        self.wait_seconds = 0.0
        self.subscribers: list[Callable[[StepStats], None]] = []
        self.combine_shards: Callable[[StepStats], StepStats] = lambda stats: stats
        self.watch_next: Callable[[FlatBucket], None] | None = None
        self.per_layer_stats = per_layer_stats or self.calibrator.needs_layers
        self._extraction = Extraction(
            self.sparsifier,
            num_slices=self.workers.num_workers if self.exchange.counts_slices else 0,
            per_layer=self.per_layer_stats,
        )
        self._buckets: list[FlatBucket] = []
        self._headers: list[Tensor] = []

    def begin(self) -> None:
        """Begin a step, and discard an interrupted step."""
        self._buckets.clear()
        self.exchange.begin()
        self.sparsifier.begin_step(self.next_step, self.workers.rank)

    def add(self, bucket: FlatBucket) -> None:
        """Select a bucket's values and start their exchange. Collective."""
        self._buckets.append(bucket)
        if self.watch_next is not None:
            self.watch_next(bucket)
            if bucket.is_last:
                self.watch_next = None
        gradient, layout, dtype = bucket.gradient, bucket.layout, bucket.residual.after.dtype
        # A layer may have a λ of its own, also in calibration.
        runs = self.sparsifier.runs(layout, dtype) if isinstance(self.sparsifier, HardThreshold) else None
        sends_all = runs is not None and not any(run.threshold for run in runs)
        # If workers send everything, sparse_sums must not keep small sums back.
        is_full = self.calibrator.is_running or (sends_all and self.options.exchange == "sparse_sums")
        bucket.average = gradient
        if gradient.dtype != dtype:  # too narrow for the average
            name = "average", bucket.index
            bucket.average = self.exchange.buffers.take(name, gradient.numel(), dtype, gradient.device)
        averages_senders = isinstance(self.options, DriftOptions) and self.options.average_over == "senders"
        transfer = self.exchange.new_transfer(
            bucket.index,
            wire_of(self.options.value_dtype, dtype, None if is_full else self.sparsifier),
            header_fields(layout, self.per_layer_stats) + (0 if bucket.notes is None else bucket.notes.numel()),
            bucket.average,
            is_last=bucket.is_last,
            is_full=is_full,
            by_senders=averages_senders and not sends_all,
        )
        if not (self.workers.reads_averages or self.sparsifier.needs_averages):
            transfer.take_payloads = lambda *_: None  # nobody reads this worker's average
        header = self._extraction.fill(bucket, transfer, measures_gradient=self.calibrator.is_running)
        if bucket.notes is not None:
            header = torch.cat([header, bucket.notes])
        self.exchange.start(transfer, header)

    def add_all(self, buckets: Iterable[_Bucket]) -> list[_Bucket]:
        """Survey all buckets if the sparsifier needs it, add them and return them. Collective."""
        if self.sparsifier.needs_survey:
            buckets = list(buckets)
            self.sparsifier.survey([bucket.compensated for bucket in buckets])
        added = []
        for bucket in buckets:
            self.add(bucket)
            added.append(bucket)
        return added

    def finish(self) -> list[Tensor]:
        """End the exchange and complete all averages. Collective.

        This is the step's only wait for the device if Triton's kernels select and no payload overflows. Returns all
        workers' notes by bucket: float64, shape (n, numbers), on the CPU. Raises RuntimeError if a worker ended or
        stopped, with its rank if torch reports it.
        """
        begin = perf_counter()
        try:
            headers, self._sent_bytes, self._dense_elements = self.exchange.finish()
            self.wait_seconds = perf_counter() - begin
        except LostWorkerError as error:
            raise RuntimeError(f"Exchange {self.next_step} failed: {error}") from error
        if self.sparsifier.needs_averages:
            for bucket in self._buckets:
                self.sparsifier.observe(bucket.layout, bucket.average)
        lengths = [header_fields(bucket.layout, self.per_layer_stats) for bucket in self._buckets]
        self._headers = [header[:, :length] for header, length in zip(headers, lengths, strict=True)]
        return [header[:, length:] for header, length in zip(headers, lengths, strict=True)]

    def end_step(self, *, extra_bytes: int = 0, dense_bytes: int | None = None, counts: bool = True) -> None:
        """End the step, and pass its statistics to calibration and subscribers.

        Args:
            extra_bytes: bytes that this worker passed to the caller's own collectives in this step.
            dense_bytes: bytes that a worker would have sent with DDP since the last exchange; None for those of the
                exchanged buckets.
            counts: whether training uses the step for certain; if not, the density controller ignores it until
                ``calibrator.confirm``.
        """
        buckets, self._buckets = self._buckets, []
        before = self.last_step
        stats = StepStats(
            step=0 if before is None else before.step + 1,
            payload_bytes=self._sent_bytes + extra_bytes,
            dense_bytes=sum(bucket.gradient.nbytes for bucket in buckets) if dense_bytes is None else dense_bytes,
            dense_elements=self._dense_elements,
            threshold=self.sparsifier.current_threshold,
            is_calibration=self.calibrator.is_running,
            **statistics_of([bucket.layout for bucket in buckets], self._headers),
        )
        self.last_step = stats = self.combine_shards(stats)
        self.next_step += 1
        self.calibrator.observe(stats, counts=counts)
        for receiver in self.subscribers:
            receiver(stats)

    def reset(self) -> None:
        """Return to the state before the first step."""
        self.given_calibrator.begin()
        self.exchange.load_state_dict({})
        self._given_sparsifier.load_state_dict({})
        self.last_step = None
        self.next_step = 0

    def numbers(self) -> Mapping[str, Any]:
        """Return the current numbers for a later ``snapshot``. Cheap enough for every step."""
        return {
            "settings": self._settings,
            **self.given_calibrator.state_dict(),
            "last_step": self.last_step,
            "next_step": self.next_step,
            "exchange": self.exchange.state_dict(),
        }

    def snapshot(self, committed: Mapping[str, Any] | None = None) -> Snapshot:
        """Return ``committed`` numbers, else current ones, and the history.

        Raises:
            TypeError: the sparsifier's ``state_dict`` is not a dict of plain values.
        """
        numbers = dict(self.numbers() if committed is None else committed)
        if numbers["last_step"] is not None:
            numbers["last_step"] = asdict(replace(numbers["last_step"], layers={}))
        sparsifier: object = self._given_sparsifier.state_dict(numbers["next_step"])
        if other := type(sparsifier).__name__ if not isinstance(sparsifier, dict) else not_plain(sparsifier):
            name = type(self._given_sparsifier).__name__
            raise TypeError(f"{name}.state_dict returned {other}. Return a dict of plain values.")
        history = {"exchange": numbers.pop("exchange"), "sparsifier": sparsifier}
        return Snapshot(numbers, history)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from another run's numbers and history.

        λ and its calibration continue only if the sparsifier has the same settings as in that run. Missing history
        starts empty.
        """
        saved, history = snapshot.numbers, snapshot.history
        if saved["settings"] == self._settings:
            self.given_calibrator.load_state_dict(saved)
            self._given_sparsifier.load_state_dict(history.get("sparsifier", {}))
        elif self.workers.rank == 0:
            log_other_settings(self._settings, saved["settings"])
        self.last_step = None if saved["last_step"] is None else StepStats(**saved["last_step"])
        self.next_step = saved["next_step"]
        self.exchange.load_state_dict(history.get("exchange", {}))


def log_other_settings(settings: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Log the sparsifier settings that differ from the checkpoint's."""
    names = [name for name in {**before, **settings} if settings.get(name) != before.get(name)]
    now, then = (", ".join(f"{name}={known.get(name, '(default)')}" for name in names) for known in (settings, before))
    rank_zero_info(
        f"lightning_sparse: the sparsifier differs from the checkpoint's: {now} instead of {then}. The new settings "
        "apply; with a density, the next exchange calibrates λ."
    )
