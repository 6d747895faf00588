"""Tells whoever goes by epochs that one begins."""

from lightning.pytorch.strategies import Strategy

from lightning_sparse.engine import EngineHolder


def tell_epoch(holder: EngineHolder, strategy: Strategy) -> None:
    """Tells the holder's sparsifier of the Trainer's epoch, unless it knows.

    Args:
        holder: of the running fit.
        strategy: of which the learning rates are.
    """
    assert strategy.lightning_module is not None
    epoch = strategy.lightning_module.trainer.current_epoch
    if holder.epoch != epoch:
        rates = [
            float(group["lr"])
            for optimizer in strategy.optimizers
            for group in optimizer.param_groups
            if group.get("lr") is not None  # Adafactor computes its own
        ]
        holder.begin_epoch(epoch, rates)
