"""Command line of all recipes except logistic_regression.

Run ``python -m recipes fit|validate|test --config <recipe>.yaml``. Arguments after the file override its entries:
``--trainer.strategy=ddp``, ``--data.root=<folder>``.
"""

import sys
import warnings

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only

import lightning_sparse  # noqa: F401  (registers the strategy names)
from recipes import MissingDataError


def main() -> LightningCLI:
    """Run Lightning's command line and return it when the training is done."""
    # Lightning 2.6 uses an API that torch has deprecated; users of a recipe cannot change that.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    try:
        return LightningCLI(
            seed_everything_default=1,
            # Each recipe's model configures the optimizer and the schedule that its result depends on.
            auto_configure_optimizers=False,
            # Without this, Lightning refuses to overwrite config.yaml when you repeat a run.
            save_config_kwargs={"overwrite": True},
        )
    except MissingDataError as error:
        # Every worker raises this error; only rank 0 prints it, and without a traceback.
        sys.exit(str(error) if rank_zero_only.rank == 0 else 1)


if __name__ == "__main__":
    main()
