"""One exchange of drifts: what departs, and what becomes of anchor and weights when the average is there."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.drift.anchor import AnchorBucket, drifting, lay_out
from lightning_sparse.drift.options import DriftOptions
from lightning_sparse.drift.outer_state import load_outer, outer_by_name
from lightning_sparse.drift.untrained_tensors import UntrainedTensors, ignored_names
from lightning_sparse.drift.weight_ownership import WeightOwnership
from lightning_sparse.engine import Engine, FlatBucket
from lightning_sparse.engine.grouping import as_real, local
from lightning_sparse.engine.messages import say_new_layers
from lightning_sparse.selection.bucket import Residual

T = TypeVar("T")


class DriftExchange:
    """The anchors of a module's parameters, and how drifts from them are exchanged.

    Args:
        module: whose parameters are anchored, as they are when they first require a gradient.
        engine: exchanges.
        options: see `DriftOptions`.
        may_change: whether layers of the module may be replaced between two exchanges.

    Attributes:
        buckets: the anchored parameters.
        anchored: these parameters by name.
        untrained: what the module has beside them.
        ownership: the right to step on these parameters.
        is_changing: whether an exchange has begun to change weights and has not ended, or was broken off.
        largest_drift: the largest distance of any worker's weight from the anchor, just before the last exchange.
        of_whole_model: makes of that of these parameters the model's, where others hold other parts of it.
    """

    def __init__(self, module: nn.Module, engine: Engine, options: DriftOptions, *, may_change: bool = True) -> None:
        self.options = options
        self.buckets: list[AnchorBucket] = []
        self.anchored: dict[str, Tensor] = {}
        self._may_change = may_change
        self.is_changing = False
        self.largest_drift = 0.0
        self.of_whole_model: Callable[[float], float] = lambda largest: largest
        self._module, self._engine = module, engine
        self._outer: torch.optim.Optimizer | None = None
        self._flight: list[FlatBucket] = []
        self._starts: list[Tensor] = []
        self.untrained = UntrainedTensors(module)
        self.ownership = WeightOwnership()
        self.take_in_new()

    @property
    def is_sent_off(self) -> bool:
        """Whether something travels that has not landed."""
        return bool(self._flight)

    def depart(self) -> None:
        """Takes out of the drifts what is sent, and starts its exchange. Collective."""
        self.is_changing = True
        self.take_in_new()
        self._engine.begin()
        self._engine.add_all(self._departing())
        self.is_changing = False

    def _departing(self) -> Iterator[FlatBucket]:
        for bucket in self.buckets:
            if self.options.overlap:
                self._starts.append(bucket.read(torch.empty_like(bucket.drift)))
            bucket.form_drift()
            if self.options.keep_drift:
                residual = Residual(bucket.zeros[: bucket.kept.numel()], bucket.kept)
            else:
                residual = Residual(bucket.kept.mul_(self.options.drift_decay), bucket.kept)
            notes = _largest(bucket.drift)
            is_last = bucket is self.buckets[-1]
            if is_last:
                notes = torch.cat([notes, self.untrained.prints(only_buffers=True).to(notes.device)])
            self._flight.append(FlatBucket(bucket.index, bucket.layout, bucket.drift, residual, is_last, notes=notes))
            yield self._flight[-1]

    def land(self) -> None:
        """Moves the anchor by the average of what was sent, and this worker along with it. Collective.

        Does nothing where nothing was sent off.

        Raises:
            RuntimeError: the averager must not change the weights any more, or the process group has ended.
        """
        if not self._flight:
            return
        if not dist.is_initialized():
            raise RuntimeError(
                "The process group ended while drifts were on their way. Call flush() on every worker before "
                "destroy_process_group()."
            )
        self.ownership.require()
        self.is_changing = True
        flight, self._flight = self._flight, []
        starts, self._starts = self._starts, []
        notes = self._engine.finish()
        self.largest_drift = self.of_whole_model(max(float(one[:, 0].max()) for one in notes))
        self.untrained.average(self._engine.workers, notes[-1][:, 1:], only_buffers=True)
        self._move_anchor([one.average for one in flight])
        for place, bucket in enumerate(self.buckets):
            if not starts:
                bucket.write(bucket.anchor) if not self.options.keep_drift else bucket.write_less(bucket.kept)
                continue
            # It went on in the meantime.
            target = bucket.anchor
            if self.options.keep_drift:
                target = torch.sub(bucket.anchor, bucket.kept, out=bucket.drift)
            unused = bucket.kept if self.options.keep_drift else bucket.drift
            bucket.write(bucket.read(unused).sub_(starts[place]).add_(target))
        self._engine.account(dense_exchanges=self.options.every_n_steps)
        self.is_changing = False

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters of each bucket."""
        return [list(bucket.layout.names) for bucket in self.buckets]

    def take_in_as(self, layout: list[list[str]]) -> None:
        """Anchors what had an anchor in another run: it was unfrozen before the save, and will be again."""
        held: dict[str, Tensor] = dict(self._module.named_parameters())
        for names in layout:
            known = {name: held[name] for name in names if name in held and name not in self.anchored}
            self._take_in(known, is_shared=True)

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """What moves the anchors; None subtracts the average."""
        return self._outer

    def restart(self) -> None:
        """Makes the weights of now the anchor, and forgets what came before. Not collective."""
        if self._flight:
            for bucket in self.buckets:
                bucket.drift = torch.zeros_like(bucket.drift)  # what travels still arrives in the old ones
        self._flight, self._starts = [], []
        for bucket in self.buckets:
            bucket.read(bucket.anchor)
            bucket.kept.zero_()
        if self._outer is not None:
            self._outer.state.clear()

    def anchor(self) -> dict[str, Tensor]:
        """Returns x by parameter name: the weights' shapes, complex ones as real, views of what exchanges change."""
        shapes = dict(self._module.named_parameters())
        return {
            name: part.view(as_real(local(shapes[name])).shape)
            for bucket in self.buckets
            for name, part in bucket.by_name(bucket.anchor).items()
        }

    def views(self, tensor_of: Callable[[AnchorBucket], Tensor]) -> dict[str, Tensor]:
        """Returns by name what exchanges change, each flat, in the order of the parameter's indices."""
        return {name: part for bucket in self.buckets for name, part in bucket.by_name(tensor_of(bucket)).items()}

    def copy_by_name(self, saved: Mapping[str, Tensor], tensor_of: Callable[[AnchorBucket], Tensor]) -> None:
        """Copies saved tensors, as far as they still fit."""
        for bucket in self.buckets:
            for name, part in bucket.by_name(tensor_of(bucket)).items():
                if name in saved and saved[name].numel() == part.numel():
                    part.copy_(saved[name])

    def _move_anchor(self, averages: list[Tensor]) -> None:
        if self._outer is None:
            for bucket, average in zip(self.buckets, averages, strict=True):
                bucket.anchor.sub_(average)
            return
        for bucket, average in zip(self.buckets, averages, strict=True):
            bucket.anchor.grad = average
        self._outer.step()
        for bucket in self.buckets:
            bucket.anchor.grad = None

    def take_in_new(self) -> None:
        """Anchors parameters that require a gradient by now. Collective, the same on all workers.

        Raises:
            RuntimeError: layers were replaced that must not be.
        """
        ignored = ignored_names(self._module)
        named: dict[str, Tensor] = {name: one for name, one in self._module.named_parameters() if name not in ignored}
        gone = [name for name, one in self.anchored.items() if named.get(name) is not one]
        if gone:
            self._follow_change(named, gone)
        else:
            new = drifting([pair for pair in named.items() if pair[0] not in self.anchored])
            if self.anchored:
                say_new_layers(new.keys(), ())
            self._take_in(new)
            self.untrained.take_in_new()

    def _follow_change(self, named: Mapping[str, Tensor], gone: list[str]) -> None:
        """Anchors the parameters of a module whose layers were replaced, added or removed. Collective.

        A parameter that has only another name by now keeps its anchor; new ones begin with their mean over the workers.
        """
        if not self._may_change:
            raise RuntimeError(
                f"The model has other parameters than when the averager was made: {gone[0]!r} was replaced or removed. "
                "Call fully_shard first, and make a new averager after it."
            )
        known = {id(one): name for name, one in self.anchored.items()}
        names_before = {name: known[id(one)] for name, one in named.items() if id(one) in known}
        new = drifting([pair for pair in named.items() if pair[0] not in names_before])
        self._engine.workers.average([local(one) for one in new.values()])
        anchors, kept = self.views(lambda bucket: bucket.anchor), self.views(lambda bucket: bucket.kept)
        tensors, numbers = outer_by_name(self._outer, self.buckets)

        def renamed(by_name: Mapping[str, T]) -> dict[str, T]:
            return {name: by_name[before] for name, before in names_before.items() if before in by_name}

        self.buckets, self.anchored = [], {}
        outer, self._outer = self._outer, None
        self._take_in({name: one for name, one in named.items() if name in names_before} | new, is_shared=True)
        self.copy_by_name(renamed(anchors), lambda bucket: bucket.anchor)
        self.copy_by_name(renamed(kept), lambda bucket: bucket.kept)
        if outer is not None:
            options = {key: value for key, value in outer.param_groups[0].items() if key != "params"}
            outer.param_groups[:] = [{**options, "params": [bucket.anchor for bucket in self.buckets]}]
            load_outer(outer, self.buckets, {key: renamed(parts) for key, parts in tensors.items()}, renamed(numbers))
            self._outer = outer
        self.untrained.take_in_new()
        self._engine.forget_sizes()
        say_new_layers(new.keys(), set(gone) - set(names_before.values()))

    def _take_in(self, parameters: dict[str, Tensor], *, is_shared: bool = False) -> None:
        """Anchors parameters, the first time they require a gradient; what they have drifted by then is averaged."""
        if not parameters:
            return
        if self.anchored and not is_shared:
            self._engine.workers.average([local(one) for one in parameters.values()])
        self.anchored |= parameters
        self.ownership.take(parameters.values())
        new = lay_out(parameters, len(self.buckets))
        self.buckets += new
        if self.options.outer_optimizer is not None:
            anchors = [bucket.anchor for bucket in new]
            if self._outer is None:
                self._outer = self.options.outer_optimizer(anchors)
            else:
                self._outer.add_param_group({"params": anchors})


def _largest(values: Tensor) -> Tensor:
    """Returns max |v|, shape (1,): in a fifteenth of the time of torch's norm for infinity."""
    if not values.numel():
        return values.new_zeros(1, dtype=torch.float64)
    lowest, highest = torch.aminmax(values)
    return torch.maximum(highest, -lowest).double().view(1)
