"""The table of bytes a parameter in docs/performance.md, measured."""

import re
from pathlib import Path

import pytest
import torch

from lightning_sparse import HardThreshold, TopK
from lightning_sparse.exchange import buffers
from tests.distributed.memory import measure
from tests.workers import run_workers

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
ONE_PERCENT = HardThreshold(density=0.01, calibration_steps=2)
HOLD = {"density_control": "hold", "steps": 30}
ROWS = {
    'hard threshold, `exchange="auto"` or `"gather"`': (ONE_PERCENT, HOLD),
    '`exchange="dense"`': (ONE_PERCENT, HOLD | {"exchange": "dense"}),
    '`exchange="reduce_scatter"`': (ONE_PERCENT, HOLD | {"exchange": "reduce_scatter", "steps": 70}),
    '`exchange="hierarchical"`, one node': (ONE_PERCENT, HOLD | {"exchange": "hierarchical"}),
    '10 % in place of 1 %, `"gather"`': (
        HardThreshold(density=0.1, calibration_steps=2),
        HOLD | {"exchange": "gather"},
    ),
    '`exchange="dense"`, a loss scale (16-mixed)': (
        ONE_PERCENT,
        HOLD | {"exchange": "dense", "is_scaled": True},
    ),
    "parameters in bfloat16": (ONE_PERCENT, HOLD | {"dtype": torch.bfloat16}),
    '`error_feedback="none"`': (HardThreshold(threshold=5.0), {"error_feedback": "none"}),
    "`TopK`": (TopK(0.01), {}),
    "local training (`SparseModelAverager`)": (None, {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_bytes_a_parameter(name):
    check(name, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none on this machine")
@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("`TopK`", '`error_feedback="none"`')])
def test_bytes_a_parameter_on_a_gpu(name):
    check(name, "cuda", within=1.0)  # work space of the kernels, and the allocator's blocks


def check(name, device, within=0.5):
    (row,) = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", DOCS.read_text(), re.M)
    written = [float(number) for number in row]
    sparsifier, options = ROWS[name]
    for measured in run_workers(_measure, 2, sparsifier, device, options):
        assert measured == pytest.approx(written, abs=within)


def _measure(sparsifier, device, options):
    buffers.PATIENCE = 10  # steps, in place of 100
    return measure(sparsifier, device, **options)
