"""Python imports this when it starts, where ``PYTHONPATH`` names the folder: see ``tests/warm_start/__init__.py``."""

import gc
import os
import sys

if "LIGHTNING_SPARSE_WARM_START" in os.environ:
    import client

    client.hand_over(os.environ["LIGHTNING_SPARSE_WARM_START"])

if "multiprocessing.forkserver" not in sys.orig_argv[-1]:  # workers collect garbage as ever
    gc.set_threshold(50_000, 20, 100)  # a fifth of the time of imports would go into looking for garbage
