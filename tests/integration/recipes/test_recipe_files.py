"""Tables over all recipes: YAML files, sizes, schedules, a short training on two workers, bad input."""

import math
import re
import sys
from functools import partial, reduce
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy

from lightning_sparse import DDPHardThresholdStrategy, SparseDDPStrategy
from recipes import MissingDataError
from recipes.__main__ import main
from recipes.cifar10_94.model import ShortTrainingNetwork
from recipes.compare.variants import expand_variants
from recipes.gpt_wikitext.data import GPTDataModule
from recipes.gpt_wikitext.model import GPT, GPTLanguageModel
from recipes.logistic_regression.data import load as load_examples
from recipes.lstm_wikitext2.data import WikiText2DataModule
from recipes.lstm_wikitext2.markov_chain import MarkovChain
from recipes.lstm_wikitext2.model import LSTMLanguageModel, TiedLSTM
from recipes.mean_loss import MeanLoss
from recipes.missing_data import failing_together
from recipes.ncf_movielens.data import MovieLensDataModule
from recipes.ncf_movielens.model import NeuMF
from recipes.resnet18_cifar10.architectures import build_network
from recipes.resnet18_cifar10.data import CIFARDataModule
from recipes.resnet18_cifar10.model import ImageClassifier
from tests.integration.recipes.recipe_runs import (
    COMPARISONS,
    CONFIGS,
    GPT_FOLDER,
    LSTM,
    NCF,
    RESNET,
    SMALL,
    fit_recipe,
    fit_without_network,
)
from tests.workers import on_workers, run_workers

ALL_VARIANTS = {
    f"{path.parent.name}/{path.stem}: {variant.label}": (
        next(filter(Path.exists, map(path.with_name, ("laptop.yaml", "hard_threshold.yaml")))),
        variant.with_tuned(str(variant.start)),
    )
    for path in COMPARISONS
    for content in [yaml.safe_load(path.read_text())]
    for variant in expand_variants(content.get("variants", content), content.get("densities", []))
}
VARIANTS = dict(
    {
        (recipe, *(re.sub(r"=[-\d.e]+$", "=", word) for word in arguments)): (name, (recipe, arguments))
        for name, (recipe, arguments) in ALL_VARIANTS.items()
    }.values()
)
"""Variants that differ in more than numbers."""
COMPARED = dict.fromkeys((RESNET, NCF, LSTM), ("hard_threshold", "dense", "top_k"))
COMPARED[GPT_FOLDER] = ("hard_threshold", "dense", "drift")


@pytest.fixture
def parsed(capsys, monkeypatch):
    """Return a function that parses a recipe on the command line and returns its configuration."""

    def parse(recipe, *overrides):
        monkeypatch.setattr(sys, "argv", ["recipes", "fit", f"--config={recipe}", *overrides, "--print_config"])
        with pytest.raises(SystemExit, match="0"):
            main()
        return yaml.safe_load(capsys.readouterr().out)

    return parse


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_parses_and_its_header_names_its_own_command(name, parsed):
    config = parsed(CONFIGS[name])
    assert config["model"]["class_path"].startswith("recipes.")
    assert config["data"]["class_path"].startswith("recipes.")
    if isinstance(config["trainer"]["val_check_interval"], int):  # an epoch may have fewer batches
        assert config["trainer"]["check_val_every_n_epoch"] is None
    header = CONFIGS[name].read_text().split("\nseed_everything")[0]
    assert f"python -m recipes fit --config recipes/{name}.yaml\n" in header
    assert all(word in header for word in ("# Data", "# Hardware", "# Expect"))
    folder, recipe = name.split("/")
    if folder in (RESNET, NCF, LSTM) and recipe in COMPARED[folder]:
        callbacks = {entry["class_path"].rsplit(".", 1)[-1] for entry in config["trainer"]["callbacks"]}
        assert callbacks >= {"DensityMonitor", "ErrorMonitor", "StepTimer", "ModelCheckpoint"}
        assert ("LearningRateMonitor" in callbacks) == (folder != NCF)
        assert config["trainer"]["logger"]["class_path"].endswith("TensorBoardLogger")
    if folder == LSTM:
        assert config["trainer"]["strategy"]["init_args"]["local_clip_norm"] == 0.4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning calls deprecated functions of jsonargparse
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_a_comparison_has_valid_options(variant, monkeypatch):
    recipe, arguments = VARIANTS[variant]
    monkeypatch.setattr(sys, "argv", ["recipes"])
    command = [f"--config={recipe}", *arguments, "--seed_everything=false"]
    strategy = LightningCLI(args=command, run=False, auto_configure_optimizers=False).config.trainer.strategy
    options = {} if strategy == "ddp" else strategy.init_args
    given = [options.get(name) for name in ("threshold", "density", "sparsifier")]
    assert sum(value is not None for value in given) == (strategy != "ddp")  # replaces the density of the recipe


@pytest.mark.parametrize("folder", COMPARED)
def test_compared_recipes_differ_in_the_strategy_only(folder):
    texts = [CONFIGS[f"{folder}/{name}"].read_text() for name in COMPARED[folder]]
    configs = [yaml.safe_load(text) for text in texts]
    strategies = [config["trainer"].pop("strategy") for config in configs]
    assert configs[0] == configs[1] == configs[2]
    assert len({str(strategy) for strategy in strategies}) == 3
    # Also equal as text, except for the header and the strategy.
    bodies = [text.split("\nseed_everything")[1] for text in texts]
    assert len({re.sub(r"\n  strategy:.*?\n  (?=\w)", "\n  ", body, flags=re.DOTALL) for body in bodies}) == 1


# Floats need a dot: YAML reads 1e-4 and 473e-5 as text.
PAPER = yaml.safe_load("""
resnet18_cifar10: {
  trainer.devices: 8, trainer.max_epochs: 300, data.init_args.batch_size: 256,
  trainer.strategy.class_path: lightning_sparse.DDPHardThresholdStrategy, trainer.strategy.init_args.threshold: 0.00473,
  model.init_args: {
    architecture: resnet18, num_classes: 10, width: 64, learning_rate: 1.6, warmup_from: 0.1, warmup_epochs: 5.0,
    milestones: [150.0, 250.0], momentum: 0.9, weight_decay: 0.0001, normalisation: batch, channels_last: false}}
ncf_movielens: {
  trainer.devices: 8, trainer.max_epochs: 30, trainer.strategy.init_args.threshold: 0.0000013,
  data.init_args.batch_size: 131_072, data.init_args.negatives: 4, data.init_args.heterogeneous: false,
  model.init_args: {
    factors: 64, mlp_sizes: [256, 256, 128, 64], dropout: 0.5, learning_rate: 0.0045, betas: [0.25, 0.5],
    num_users: null, num_items: null}}
lstm_wikitext2: {
  trainer.devices: 8, trainer.max_epochs: 90, trainer.strategy.init_args.density: 0.00025, data.init_args.columns: 128,
  data.init_args.bptt: 30, data.init_args.tokenizer: wikitext, data.init_args.train_share: 1,
  model.init_args: {
    vocabulary_size: 33_278, hidden_size: 650, num_layers: 3, dropout: 0.4, learning_rate: 20.0, momentum: 0.0,
    warmup_from: 1.25, warmup_epochs: 5.0, milestones: [60.0, 80.0]}}
""")


def value_at(config, place):
    return reduce(lambda part, name: part[name], place.split("."), config)


@pytest.mark.parametrize("folder", PAPER)
def test_recipes_have_the_settings_of_the_paper(folder, parsed):
    config = parsed(CONFIGS[f"{folder}/hard_threshold"])
    assert {place: value_at(config, place) for place in PAPER[folder]} == PAPER[folder]


METRICS_OF_ALL = {
    RESNET: ("train/loss", "train/accuracy", "val/loss", "val/accuracy"),
    NCF: ("train/loss", "val/hr10", "val/ndcg10"),
    LSTM: ("train/loss", "train/perplexity", "val/perplexity", "val/perplexity_mean_of_windows"),
}
STRATEGIES = {
    "hard_threshold": DDPHardThresholdStrategy,
    "dense": DDPStrategy,
    "top_k": SparseDDPStrategy,
    "laptop": DDPHardThresholdStrategy,
    "demo": DDPHardThresholdStrategy,
}


OTHER_NETWORKS = [
    ("--model.architecture=googlenet", "--model.width=64", "--data.device_augmentation=true"),
    ("--model.architecture=senet18", "--data.device_augmentation=true"),
]


@pytest.mark.parametrize(
    ("folder", "recipe", "arguments"),
    [(folder, recipe, ()) for folder in SMALL for recipe in (*COMPARED[folder], "laptop")]
    + [(RESNET, "demo", ()), *((RESNET, "hard_threshold", arguments) for arguments in OTHER_NETWORKS)],
    ids=lambda given: given if isinstance(given, str) else "".join(given[:1]),
)
def test_a_recipe_trains_on_two_workers(folder, recipe, arguments):
    strategy = DDPHardThresholdStrategy if (folder, recipe) == (LSTM, "dense") else STRATEGIES[recipe]
    command = (f"--config={CONFIGS[f'{folder}/{recipe}']}", *SMALL[folder], *arguments)
    fits = run_workers(fit_recipe, 2, *command, process_group=False)
    for fit in fits:
        assert fit.strategy is strategy
        assert (fit.world_size, fit.steps) == (2, 2)
        assert fit.metrics["step_time"] > 0
        if strategy is DDPStrategy:
            assert fit.exchanged is None
            assert "sparse/density" not in fit.metrics
        else:
            assert (fit.exchanged.step, fit.exchanged.num_elements) == (1, fit.num_parameters)
            assert fit.metrics["sparse/density"] == pytest.approx(fit.exchanged.density)
            is_dense = (folder, recipe) == (LSTM, "dense")
            assert fit.exchanged.density == 1 if is_dense else fit.exchanged.density < 1
            # After calibration, few residuals reach λ.
            assert fit.exchanged.density > 0 or (folder, recipe) == (LSTM, "hard_threshold")
        if folder == LSTM:
            assert fit.metrics["val/perplexity"] == pytest.approx(math.exp(fit.metrics["val/loss"]), rel=1e-5)
            assert 1 < fit.metrics["val/perplexity"] < fit.metrics["val/perplexity_mean_of_windows"] * (1 + 1e-6)
        if folder == NCF:  # the data module determines the size of the embeddings
            assert (fit.hparams["num_users"], fit.hparams["num_items"]) == (1000, 400)
            assert fit.num_parameters == 1400 * 8 + (8 * 8 + 8) + (8 * 4 + 4) + (8 + 1)
        if arguments:
            assert f"--model.architecture={fit.hparams['architecture']}" == arguments[0]
    first, second = (fit.metrics for fit in fits)
    for name in METRICS_OF_ALL[folder]:
        assert first[name] == pytest.approx(second[name])
    assert first["train/local_loss"] != pytest.approx(second["train/local_loss"])


@pytest.mark.slow
def test_the_recipe_for_one_gpu_continues_from_its_last_checkpoint(tmp_path):
    sizes = [argument for argument in SMALL[RESNET] if not argument.startswith("--trainer")]
    command = (f"--config={CONFIGS[f'{RESNET}/one_gpu']}", *sizes, "--trainer.accelerator=cpu", "--ckpt_path=last")

    def fit(folder, epochs, *more):
        options = [f"--trainer.logger.save_dir={tmp_path / folder}", f"--trainer.max_epochs={epochs}"]
        options += ["--trainer.check_val_every_n_epoch=6"]
        return run_workers(fit_recipe, 1, *command, *options, *more, process_group=False)[0]

    whole, part = fit("whole", 12), fit("in parts", 11)
    resumed = fit("in parts", 12, "--model.learning_rate=0.1")  # no effect, because the checkpoint has the rate
    assert (part.steps, resumed.steps, whole.steps, resumed.exchanged.step) == (11, 12, 12, 11)
    for name in ("val/loss", "val/accuracy", "sparse/density", "sparse/error_norm", "sparse/total_error"):
        assert resumed.metrics[name] == whole.metrics[name], name


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (partial(build_network, "resnet18"), 11_173_962),
        (partial(build_network, "googlenet"), 6_166_250),
        (partial(build_network, "senet18"), 11_260_354),
        (partial(NeuMF, num_users=138_493, num_items=26_744), 31_832_577),
        (TiedLSTM, 31_819_578),
        # The vocabulary of torchtext's basic_english gives the paper's "about 28.9 M".
        (partial(TiedLSTM, vocabulary_size=28_783), 28_893_333),
        (GPT, 279_168),
        (partial(ShortTrainingNetwork, 10, (64, 256, 256)), 1_971_352),
    ],
)
def test_number_of_parameters(make, number):
    with torch.device("meta"):
        network = make()
    assert sum(parameter.numel() for parameter in network.parameters()) == number


@pytest.mark.parametrize(
    ("make", "expected", "momentum"),
    [
        (
            partial(ImageClassifier, width=1),
            {0: 0.1, 2.5: 0.85, 5: 1.6, 149.75: 1.6, 150: 0.16, 249.75: 0.16, 250: 0.016},
            {"momentum": 0.9, "nesterov": True},
        ),
        (
            partial(LSTMLanguageModel, vocabulary_size=5, hidden_size=2, num_layers=1),
            {0: 1.25, 2.5: 10.625, 5: 20, 59.75: 20, 60: 2, 79.75: 2, 80: 0.2, 89.75: 0.2},
            {"momentum": 0, "weight_decay": 0},
        ),
    ],
    ids=[RESNET, LSTM],
)
def test_learning_rate_by_epoch(make, expected, momentum, monkeypatch):
    steps_per_epoch = 4
    monkeypatch.setattr("recipes.learning_rate.steps_per_epoch", lambda module: steps_per_epoch)
    configured = make().configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert configured["lr_scheduler"]["interval"] == "step"
    assert isinstance(optimizer, torch.optim.SGD)
    assert all(group.items() >= momentum.items() for group in optimizer.param_groups)
    rates = []
    for _ in range(int(max(expected) + 1) * steps_per_epoch):
        rates.append({group["lr"] for group in optimizer.param_groups})
        optimizer.step()
        schedule.step()
    for epoch, rate in expected.items():
        assert list(rates[int(epoch * steps_per_epoch)]) == [pytest.approx(rate)], epoch


WORDS = {f"wikitext-2/wiki.{split}.tokens": "a b \n" * 200 for split in ("train", "valid", "test")}
ELSEWHERE = {f"0/{name}": text for name, text in WORDS.items()} | {"1/wikitext-2/wiki.train.tokens": ""}
"""Files of two workers; only those of worker 1 are unusable."""
RATINGS = "userId,movieId,rating,timestamp\n1,2,3.0,4\n1,3,4.0,5\n1,two,4.0,6\n"
MISSING = "is missing and could not be fetched"


@pytest.mark.parametrize(
    ("folder", "files", "message"),
    [
        (RESNET, {}, rf"^cifar-10-python\.tar\.gz {MISSING}.* Put the file from http\S+ at ROOT/cifar-10-p\S+\.gz\.$"),
        (NCF, {}, rf"^ml-20m\.zip {MISSING}.* Put the file from https\S+ at ROOT/ml-20m\.zip\.$"),
        (NCF, {"ml-20m/ratings.csv": RATINGS}, r"ratings\.csv, row 4: movieId 'two' is not a whole number"),
        (LSTM, {}, rf"^wikitext-2-v1\.zip {MISSING}.* Put the file from https\S+ at ROOT/.*data\.source=builtin\.$"),
        (LSTM, WORDS | {"wikitext-2/wiki.valid.tokens": ""}, r"ROOT/wikitext-2/wiki\.valid\.tokens is empty"),
        pytest.param(LSTM, ELSEWHERE, "^Rank 1: .*is empty", marks=pytest.mark.representative),
    ],
    ids=["no images", "no ratings", "wrong ratings", "no text", "empty text", "empty text on worker 1"],
)
def test_unusable_data_end_all_workers_with_a_single_line(folder, files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = tmp_path / "RANK" if "Rank 1" in message else tmp_path
    first, second = run_workers(fit_without_network, 2, folder, str(root), process_group=False)
    assert re.search(message.replace("ROOT", re.escape(str(tmp_path))), first), first
    assert "\n" not in first
    assert second == 1


THREE_OF_EACH = {"num_users": 3, "num_items": 3}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (NeuMF, THREE_OF_EACH | {"factors": 0}, r"Invalid factors=0\. Must be at least 1"),
        (NeuMF, THREE_OF_EACH | {"mlp_sizes": (5, 4)}, r"\(5, 4\)\. Must be positive and begin with an"),
        (NeuMF, THREE_OF_EACH | {"dropout": 1.0}, r"Invalid dropout=1\.0\. Must be within \[0, 1\)"),
        (MovieLensDataModule, {"batch_size": 0}, "Must be at least 1; the paper's is"),
        (TiedLSTM, {"vocabulary_size": 0}, r"Invalid vocabulary_size=0\. Must be at least 1"),
        (TiedLSTM, {"dropout": 1.0}, r"Invalid dropout=1\.0\. Must be within \[0, 1\)"),
        (MarkovChain, {"num_words": 4}, "Invalid successors=5"),
        (WikiText2DataModule, {"columns": 0}, r"Invalid columns=0\. Must be at least 1"),
        (WikiText2DataModule, {"vocabulary_size": 1}, r"Invalid vocabulary_size=1\. Must be at least 2"),
        (WikiText2DataModule, {"train_share": 0.0}, r"Invalid train_share=0\.0\. Must be within \(0, 1\]"),
        (WikiText2DataModule, {"heterogeneous": True, "source": "builtin"}, r"=True with source='builtin'"),
        (ImageClassifier, {"width": 0}, r"Invalid width=0\. Must be at least 1"),
        (ImageClassifier, {"architecture": "googlenet", "width": 32}, "Invalid width=32 for googlenet. Must be 64"),
        (ImageClassifier, {"architecture": "vgg"}, r"'vgg'\. Must be one of resnet18, googlenet, senet18"),
        (ImageClassifier, {"normalisation": "layer"}, r"Invalid normalisation='layer'\. Must be batch or group"),
        (CIFARDataModule, {"num_train_images": 0}, r"Invalid num_train_images=0\. Must be at least 1"),
        (GPTDataModule, {"length": 0}, "length=0"),
        (GPTDataModule, {"source": "builtin"}, "tokenizer=words"),
        (
            GPTDataModule,
            {"tokenizer": "words", "vocabulary_size": 1},
            r"Invalid vocabulary_size=1\. Must be at least 2",
        ),
        (GPTDataModule, {"vocabulary_size": 1000}, r"Got vocabulary_size=1000 with tokenizer='bytes'"),
        (GPT, {"width": 10, "num_heads": 4}, "multiple"),
        (GPTLanguageModel, {"learning_rate": 0.0}, "learning_rate"),
        (GPTLanguageModel, {"optimizer": "SGD"}, r"Invalid optimizer='SGD'\. Must be adamw or sgd"),
        (load_examples, {"root": Path(), "dataset": "iris"}, r"Invalid dataset='iris'\. Must be one of a9a, gisette"),
    ],
)
def test_invalid_arguments_raise(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@on_workers(2)
def test_an_error_of_any_kind_ends_all_workers():
    act, error = mock.Mock(), MissingDataError
    if dist.get_rank():
        error = act.side_effect = PermissionError
    with pytest.raises(error), failing_together():
        act()


def test_a_mean_loss_keeps_nan():
    loss = MeanLoss()
    for value in (1.0, math.nan):
        loss.update(torch.tensor(value), torch.tensor(1))
    assert loss.compute().isnan()
