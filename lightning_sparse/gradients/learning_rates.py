"""The learning rates of the last steps, for residuals in units of the learning rate."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.selection.bucket import FlatBucket, Residual


def learning_rates_of(optimizers: Sequence[Optimizer]) -> dict[Tensor, float]:
    """Return the current learning rate of every parameter of the optimizers.

    Raises:
        ValueError: an optimizer has no learning rate, such as Adafactor with ``lr=None``.
    """
    rates: dict[Tensor, float] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("lr") is None:
                raise ValueError(
                    f"{type(optimizer).__name__} has a parameter group without a learning rate (lr=None). "
                    "error_feedback='learning_rate' needs one: set lr=…, or use error_feedback='gradient'."
                )
            # float() synchronises once per group if the rate is a CUDA tensor.
            rates.update(dict.fromkeys(group["params"], float(group["lr"])))
    return rates


class LastLearningRates:
    """Stores lr_{t-1} by parameter name, where t counts optimizer steps on the parameter.

    Algorithm 1 of Sahu et al. (NeurIPS 2021) keeps residuals in units of lr · gradient. In gradient units they are
    multiplied by lr_{t-1} / lr_t. Like a residual, a new rate is pending until its backward is committed.
    """

    def __init__(self, parameter_names: Mapping[Tensor, str]) -> None:
        self._names = parameter_names
        self._committed: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        self._ratios: dict[str, float] = {}

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Compute lr_{t-1} / lr_t for a backward before a step of these optimizers; 1 at first.

        A rate of 0 has no ratio, so a step with this rate does not change the residual and lr_{t-1}.
        """
        self._ratios = {}
        for parameter, rate in learning_rates_of(optimizers).items():
            name = self._names.get(parameter)
            if name is not None and rate != 0:
                self._ratios[name] = self._pending.get(name, self._committed.get(name, rate)) / rate
                self._pending[name] = rate

    def rescale(self, bucket: FlatBucket) -> None:
        """Rescale a bucket's residual to this backward's rates if they have changed."""
        if any(ratio != 1.0 for ratio in self._ratios.values()):
            before, after, _ = bucket.residual
            after.copy_(before)
            for name, start, end in bucket.layout.spans():
                if self._ratios.get(name, 1.0) != 1.0:
                    after[start:end].mul_(self._ratios[name])
            bucket.residual = Residual(after, after)

    def commit(self, names: set[str]) -> None:
        """Commit the pending rates of these parameters."""
        self._committed |= {name: self._pending.pop(name) for name in names & self._pending.keys()}

    def roll_back(self, names: set[str]) -> None:
        """Discard the pending rates of these parameters."""
        for name in names & self._pending.keys():
            del self._pending[name]

    def state_dict(self) -> dict[str, float]:
        """Return the committed rates."""
        return dict(self._committed)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Replace all rates."""
        self._committed, self._pending = dict(state), {}
