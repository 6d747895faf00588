"""The cells of "Notebooks" in docs/guides/clusters.md, run in a Jupyter kernel, and the checkpoints that they write."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import PROJECT, blocks

BEFORE = """
import torch
from lightning.pytorch import LightningModule


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


model = Model()
loader = torch.utils.data.DataLoader(torch.randn(4096, 32), 16)
model.layers(torch.randn(4096, 32)).sum().backward()  # on all cores, before workers are forked
first = model.layers[0].weight.detach().clone()
"""
AFTER_FIRST = """
trainer.save_checkpoint("after.ckpt")
saved = torch.load(kept.best_model_path, weights_only=True)
after = torch.load("after.ckpt", weights_only=True)
assert saved["global_step"] == 100
assert len(saved["lightning_sparse"]["workers"]) == 2
assert not after["lightning_sparse"]["workers"]
assert not torch.equal(model.layers[0].weight, first)
assert torch.equal(saved["state_dict"]["layers.0.weight"], model.layers[0].weight)
assert torch.equal(after["state_dict"]["layers.0.weight"], model.layers[0].weight)
"""
AFTER_SECOND = """
last = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
assert last["global_step"] == 200
assert last["lightning_sparse"]["numbers"]["last_step"]["step"] == 199
"""


MISSING = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}. `pip install nbclient ipykernel`.")
def test_the_cells_of_the_page_train_save_and_resume_in_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.chdir(tmp_path)
    page = (PROJECT / "docs/guides/clusters.md").read_text()
    fit, go_on = (block.code for block in blocks(page, "python") if "_notebook" in block.code)
    cells = [BEFORE, fit, AFTER_FIRST, go_on, AFTER_SECOND]
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()  # raises the error of a cell
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "2 processes" in printed[1]
    assert "holds no residuals (it is saved by a process that is not a worker" in printed[2]
    assert "Restored all states" in printed[3]
    assert "calibrat" not in printed[3]  # λ comes from the checkpoint
