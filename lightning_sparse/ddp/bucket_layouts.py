"""Where each parameter's gradient lies in DDP's buckets."""

from collections.abc import Mapping

from torch import Tensor

from lightning_sparse.ddp.regrouping import BucketLike
from lightning_sparse.engine.memory_format import real_numel, require_strides
from lightning_sparse.sparsifiers import LayerLayout


class BucketLayouts:
    """The layouts of all buckets that DDP has brought.

    Args:
        parameter_names: the name of every parameter that DDP may bring.
    """

    def __init__(self, parameter_names: Mapping[Tensor, str]) -> None:
        self._names = dict(parameter_names)
        self._strides = {name: one.stride() for one, name in self._names.items() if one.requires_grad}
        self._known: dict[tuple[int, ...], LayerLayout] = {}

    def of(self, bucket: BucketLike) -> tuple[LayerLayout, bool]:
        """Returns the layout of a bucket, and whether it is a new one.

        Raises:
            RuntimeError: a parameter's memory format is not what it was when DDP made its buckets.
        """
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        is_new = key not in self._known
        if is_new:
            names = tuple(self._names[parameter] for parameter in parameters)
            self._known[key] = LayerLayout(names, tuple(map(real_numel, parameters)))
        layout = self._known[key]
        require_strides(layout.names, parameters, self._strides)
        num_elements = bucket.buffer().numel()
        assert num_elements == layout.num_elements, f"{num_elements=} of {layout}"
        return layout, is_new
