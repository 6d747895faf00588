"""The GPT recipe: its data, its model and its local training."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_sparse import LocalHardThresholdStrategy
from recipes import MissingDataError
from recipes.gpt_wikitext.data import GPTDataModule, read_python_source, windows_of
from recipes.gpt_wikitext.model import GPT, GPTLanguageModel
from recipes.weights import validate
from tests.integration.recipes.recipe_runs import DATA, GPT_FOLDER, RECIPES, fit_recipe, needs_data
from tests.workers import run_workers


def test_a_position_sees_only_earlier_positions():
    torch.manual_seed(0)
    network = GPT(vocabulary_size=11, length=8, width=16, num_layers=2, num_heads=2).eval()
    tokens = torch.randint(0, 11, (3, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    torch.testing.assert_close(network(tokens)[:, :5], network(changed)[:, :5], rtol=0, atol=1e-6)
    assert (network(tokens)[:, 5:] - network(changed)[:, 5:]).abs().max() > 1e-3


def test_layers_do_not_begin_equal():
    first, second = GPT().layers.layers
    assert (first.linear1.weight != second.linear1.weight).any()


def test_windows_are_the_text_without_gaps():
    text = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    windows = windows_of(text, 64)
    assert len(windows) == 15
    assert torch.equal(torch.cat([inputs for inputs, _ in windows]), text[:960])
    assert torch.equal(torch.cat([targets for _, targets in windows]), text[1:961])


def test_more_positions_than_the_model_has_raise():
    with pytest.raises(ValueError, match=r"--model\.length=4"):
        GPT(length=4)(torch.zeros(1, 5, dtype=torch.int64))


def test_an_error_names_the_folder_of_the_missing_text(tmp_path):
    module = GPTDataModule(str(tmp_path))
    with pytest.raises(MissingDataError, match=r"wiki\.train\.tokens"):
        module.setup("fit")


BUILTIN = ("--data.source=builtin", "--data.tokenizer=words", "--model.vocabulary_size=200", "--data.length=16")
SMALL = ("--trainer.devices=2", "--model.width=32", "--trainer.logger=false", "--trainer.enable_progress_bar=false")


def fit_builtin(root, steps):
    config = yaml.safe_load((RECIPES / GPT_FOLDER / "laptop.yaml").read_text())
    callbacks = config["trainer"]["callbacks"]
    config["trainer"]["callbacks"] = [entry for entry in callbacks if not re.search("LearningRate|TQDM", str(entry))]
    path = Path(root) / f"{os.environ['RANK']}.yaml"
    path.write_text(yaml.safe_dump(config))
    return fit_recipe(
        f"--config={path}",
        *BUILTIN,
        *SMALL,
        f"--trainer.max_steps={steps}",
        f"--trainer.val_check_interval={steps}",
        "--trainer.limit_val_batches=20",
        f"--trainer.default_root_dir={root}",
        "--trainer.strategy.density=0.05",
        "--model.learning_rate=0.01",
    )


@pytest.mark.slow
def test_local_training_learns_a_text_without_a_download(tmp_path):
    first, second = run_workers(fit_builtin, 2, str(tmp_path), 150, process_group=False)
    assert first.strategy is LocalHardThresholdStrategy
    # 5.3 is the logarithm of the number of words, 1.28 the lowest possible loss.
    assert first.metrics["val/loss"] == second.metrics["val/loss"] < 2.5
    assert first.exchanged == second.exchanged
    assert 0 < first.exchanged.density < 0.5
    # recipes.weights evaluates this run on other windows of the text.
    [shown] = run_workers(validate, 1, tmp_path, ["--trainer.limit_val_batches=40"], process_group=False)
    assert len({tuple(metrics.items()) for metrics in shown.values()}) == 3
    assert all(metrics["val/loss"] == pytest.approx(first.metrics["val/loss"], rel=0.05) for metrics in shown.values())


def test_a_small_vocabulary_raises():
    module = GPTDataModule(source="builtin", tokenizer="words", length=16)
    module.setup("fit")
    model = GPTLanguageModel(vocabulary_size=100)
    model._trainer = SimpleNamespace(datamodule=module)
    with pytest.raises(ValueError, match="200 tokens"):
        model.setup("fit")


def test_fine_tuning_begins_with_pretrained_weights_on_source_code(tmp_path):
    before = GPTLanguageModel(width=32)
    torch.save({"state_dict": before.state_dict()}, tmp_path / "pretrained.ckpt")
    module = GPTDataModule(source="python")
    module.setup("fit")
    assert all(b"import " in bytes(text[:100_000].tolist()) for text in module._texts.values())
    model = GPTLanguageModel(width=32, pretrained=str(tmp_path / "pretrained.ckpt"))
    model._trainer = SimpleNamespace(datamodule=module)
    assert (model.network.decoder.weight != before.network.decoder.weight).any()
    model.setup("fit")
    for weight, expected in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_each_file_of_source_code_is_in_one_split(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    for name in (*"abcdefghijkl", "test/a"):
        (tmp_path / f"{name}.py").write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    texts = {split: bytes(text.tolist()) for split, text in read_python_source().items()}
    assert texts == {"train": b"cdefghij", "val": b"ak", "test": b"bl"}


def test_source_code_as_words_raises():
    with pytest.raises(ValueError, match=r"--data\.tokenizer=bytes"):
        GPTDataModule(source="python", tokenizer="words")


@pytest.mark.full
@needs_data("wikitext-2")
@pytest.mark.parametrize(("tokenizer", "size"), [("bytes", 256), ("words", 1000)])
def test_real_text(tokenizer, size):
    module = GPTDataModule(str(DATA), tokenizer=tokenizer, vocabulary_size=None if tokenizer == "bytes" else size)
    module.prepare_data()
    module.setup("fit")
    assert module.vocabulary_size == size
    inputs, targets = next(iter(module.train_dataloader()))
    assert inputs.shape == targets.shape == (8, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    if tokenizer == "bytes":
        assert b"Homarus gammarus" in bytes(module._texts["val"][:3000].tolist())
