"""The one command line of all recipes: ``python -m recipes fit|validate|test|predict --config <recipe>.yaml``.

Every entry of the YAML can be overridden behind it: ``--trainer.strategy=ddp``, ``--data.root=<folder>``.
"""

import sys
import warnings

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only

import lightning_sparse  # noqa: F401  (registers the strategy names)
from recipes import MissingDataError


def main() -> LightningCLI:
    """Runs Lightning's command line with the model and the data that the YAML names, and returns it when it is done."""
    # Lightning 2.6 still uses what torch deprecated since; nothing that the reader of a recipe's output could change.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    try:
        return LightningCLI(
            seed_everything_default=1,
            # A recipe's model brings the optimizer and the schedule that its result depends on.
            auto_configure_optimizers=False,
            # Lightning refuses to write config.yaml a second time, also when a run is repeated on purpose.
            save_config_kwargs={"overwrite": True},
        )
    except MissingDataError as error:
        # Every worker comes here; eight tracebacks would hide the one line that helps.
        sys.exit(str(error) if rank_zero_only.rank == 0 else 1)


if __name__ == "__main__":
    main()
