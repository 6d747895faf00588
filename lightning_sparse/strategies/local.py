"""Lightning strategy for local training: every worker steps its own optimizer, drifts are exchanged sparsely."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from typing_extensions import override

from lightning_sparse.checkpointing.content import warn_of_incomplete
from lightning_sparse.checkpointing.saving import (
    collect_together,
    content_of_launcher,
    is_in_trouble,
    mean_of,
    why_not_together,
)
from lightning_sparse.drift import DriftOptions, SparseModelAverager
from lightning_sparse.exchange import require_agreement
from lightning_sparse.sparsifiers import Dense, Sparsifier
from lightning_sparse.strategies.arguments import process_group_arguments
from lightning_sparse.strategies.local_training import LocalTraining


class SparseLocalStrategy(LocalTraining, DDPStrategy):
    """Local training in which workers send only those coordinates of their drift that a sparsifier selects.

    There is no DDP module and no exchange of gradients: every worker steps its own optimizer, and every
    ``every_n_steps`` optimizer steps its weights' drift from what all share is exchanged. See
    `SparseModelAverager`. Right for Adam and its like, which need gradients as they come.

    Validation, test, predict, checkpoints and what is left after ``fit`` are the mean of the workers' weights.

    Logs ``sparse/density``, ``sparse/error_norm`` and ``sparse/threshold`` (parameter units), ``sparse/largest_drift``
    (the largest distance of a weight from the anchor before the exchange) and ``sparse/payload_bytes`` with the
    optimizer step of every exchange.

    Args:
        **kwargs: ``process_group_backend``, ``timeout``, ``start_method``, ``parallel_devices``, … of Lightning's
            ``DDPStrategy``. Arguments that concern DDP's own exchange are refused.

    Attributes:
        state: the `SparseModelAverager` of the running or last ``fit``, None before; also called ``averager``.

    Raises:
        ValueError: an invalid option, or an argument that needs a DDP module.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    _by_threshold = "LocalHardThresholdStrategy"
    _is_in_a_step = False
    _why_not: str | None = None

    @override
    def _lightning_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return process_group_arguments(arguments, type(self))

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        require_agreement(asdict(self._checkpoint_options))
        sparsifier, options = self._what_is_sent()
        self._follow_drifts(SparseModelAverager(self.model, sparsifier, options, per_layer_stats=self._per_layer_stats))

    def _what_is_sent(self) -> tuple[Sparsifier, DriftOptions]:
        if self.world_size > 1:
            return self.sparsifier, self._options
        return Dense(), replace(self._options, value_dtype="float32")

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in self.optimizers):
            raise ValueError(
                "ZeroRedundancyOptimizer steps each parameter on one worker only, with that worker's gradient. In "
                "local training gradients are not averaged: use the optimizer that is inside of it."
            )

    # Whether a forward may still need the weights for its backward.

    @override
    def _exchange(self) -> None:
        self._is_in_a_step = False
        super()._exchange()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._is_in_a_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            if self.lightning_module is None or not self.lightning_module.automatic_optimization:
                self._is_in_a_step = False

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._is_in_a_step = False

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._is_in_a_step = False
        super().on_train_batch_start(batch, batch_idx)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self.state is not None:
            self.state.close()

    # Checkpoints.

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning asks every worker, and then calls save_checkpoint on it.
        averager = self.state
        if averager is None or self._has_ended:
            return super().lightning_module_state_dict()
        if averager.shared.is_shown:  # while validation looks at the mean
            return copy.deepcopy(super().lightning_module_state_dict())
        weights = None
        self._why_not = why_not_together(averager, self._timeout, self._obstacles())
        if self._why_not is None:
            try:
                weights = averager.shared.mean(averager.save_barrier.workers_apart())
            except RuntimeError as error:  # a worker died or left
                if averager.workers.rank != 0:
                    raise
                averager.save_barrier.give_up_apart()
                self._why_not = f"averaging weights failed: {str(error).splitlines()[0]}"
        if weights is None:
            assert self._why_not is not None
            weights = averager.shared.anchor()
            if averager.workers.rank == 0:
                warn_of_incomplete("drifts", self._why_not, "anchor's")
        with averager.shared.shown(weights):
            return super().lightning_module_state_dict()

    def _obstacles(self) -> list[str]:
        """Return why no checkpoint can hold drifts at this moment, in words that workers agree on."""
        assert self.state is not None
        obstacles = {
            "the weights were changed since all workers had the same": self.state.shared.was_written_to,
            # Values that arrive would change weights that a backward needs.
            "an exchange is still travelling": self.state.is_sent_off and (is_in_trouble() or self._is_in_a_step),
        }
        return [why for why, is_so in obstacles.items() if is_so]

    @override
    def _content(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any] | None:
        if self.state is None:
            return content_of_launcher(self, "drifts")
        word = self._checkpoint_options.optimizer_checkpoint
        extra = {} if word == "first" else {"optimizer_states": checkpoint["optimizer_states"]}
        if word == "full" and self._precision_key in checkpoint:
            extra["precision_state"] = checkpoint[self._precision_key]
        why_not, self._why_not = self._why_not, None
        content = collect_together(
            self.state,
            self._checkpoint_options,
            self._timeout,
            obstacles=self._obstacles(),
            why_not=why_not,
            extra=extra,
        )
        if content is not None and word == "mean" and content["extras"]:
            of_workers = [extra.pop("optimizer_states") for extra in content["extras"][0]]
            checkpoint["optimizer_states"] = mean_of(of_workers)
        return content

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        own = self._restore(checkpoint)  # Lightning restores after the model was set up
        states = own.get("optimizer_states", checkpoint["optimizer_states"])
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        if "precision_state" in own:  # Lightning has loaded rank 0's
            self.precision_plugin.load_state_dict(own["precision_state"])

    @property
    def _precision_key(self) -> str:
        return type(self.precision_plugin).__qualname__
