import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
import torchvision
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_sparse import DDPHardThresholdStrategy, SparseDDPStrategy
from recipes import MissingDataError, demo
from recipes.__main__ import main
from recipes.resnet18_cifar10 import data as data_module
from recipes.resnet18_cifar10.data import CIFAR10DataModule, digits, transform
from recipes.resnet18_cifar10.model import (
    ResNet18Classifier,
    SmallImageResNet18,
    parameter_groups,
    relative_learning_rate,
)
from tests.workers import run_workers

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "recipes").rglob("*.yaml"))
RESNET = REPOSITORY / "recipes" / "resnet18_cifar10"
COMPARED = ("hard_threshold", "dense", "top_k")
SMALL = (
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.fast_dev_run=2",
    "--model.width=4",
    "--data.source=builtin",
    "--data.batch_size=8",
    "--data.num_workers=0",
)


@pytest.fixture
def parsed(capsys, monkeypatch):
    """What the command line makes of a recipe: names are imported and arguments checked against signatures."""

    def parse(recipe, *overrides):
        monkeypatch.setattr(sys, "argv", ["recipes", "fit", f"--config={recipe}", *overrides, "--print_config"])
        with pytest.raises(SystemExit, match="0"):
            main()
        return yaml.safe_load(capsys.readouterr().out)

    return parse


def fit_recipe(*arguments):
    sys.argv = ["recipes", "fit", *arguments]
    trainer = main().trainer
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = getattr(trainer.strategy, "state", None)
    return SimpleNamespace(
        strategy=type(trainer.strategy),
        world_size=trainer.world_size,
        steps=trainer.global_step,
        metrics=metrics,
        exchanged=None if state is None else state.last_step,
    )


class TestConfigurations:
    def test_there_are_recipes(self):
        assert {recipe.stem for recipe in RECIPES} >= {*COMPARED, "demo"}

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
    def test_parses(self, recipe, parsed):
        config = parsed(recipe)
        assert config["model"]["class_path"].startswith("recipes.")
        assert config["data"]["class_path"].startswith("recipes.")

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
    def test_header_names_its_own_command(self, recipe):
        path = recipe.relative_to(REPOSITORY).as_posix()
        header = recipe.read_text().split("\nseed_everything")[0]
        assert f"python -m recipes fit --config {path}\n" in header
        assert all(word in header for word in ("# Data", "# Hardware", "# Expect"))

    def test_compared_recipes_differ_in_the_strategy_only(self):
        configs = {name: yaml.safe_load((RESNET / f"{name}.yaml").read_text()) for name in COMPARED}
        strategies = {name: config["trainer"].pop("strategy") for name, config in configs.items()}
        assert configs["hard_threshold"] == configs["dense"] == configs["top_k"]
        assert len({str(strategy) for strategy in strategies.values()}) == 3

    def test_paper_setting(self, parsed):
        config = parsed(RESNET / "hard_threshold.yaml")
        trainer, model, data = config["trainer"], config["model"]["init_args"], config["data"]["init_args"]
        assert trainer["devices"] == 8
        assert data["batch_size"] == 256
        assert trainer["max_epochs"] == 300
        assert trainer["strategy"]["class_path"] == "lightning_sparse.DDPHardThresholdStrategy"
        # A float and not the text "4.73e-3", which YAML makes of it as soon as the dot is missing.
        assert trainer["strategy"]["init_args"]["threshold"] == 0.00473
        assert model == {
            "width": 64,
            "learning_rate": 1.6,
            "warmup_from": 0.1,
            "warmup_epochs": 5.0,
            "milestones": [150.0, 250.0],
            "momentum": 0.9,
            "weight_decay": 1e-4,
        }
        callbacks = {callback["class_path"].rsplit(".", 1)[-1] for callback in trainer["callbacks"]}
        assert callbacks == {"DensityMonitor", "ErrorMonitor", "StepTimer", "LearningRateMonitor", "ModelCheckpoint"}
        assert trainer["logger"]["class_path"].endswith("TensorBoardLogger")

    def test_overrides_on_the_command_line(self, parsed):
        recipe = RESNET / "hard_threshold.yaml"
        assert parsed(recipe, "--trainer.strategy=ddp")["trainer"]["strategy"] == "ddp"
        assert parsed(recipe, "--trainer.strategy=ddp_topk")["trainer"]["strategy"] == "ddp_topk"
        config = parsed(recipe, "--trainer.strategy.threshold=0.5", "--data.root=elsewhere")
        assert config["trainer"]["strategy"]["init_args"]["threshold"] == 0.5
        assert config["data"]["init_args"]["root"] == "elsewhere"


class TestFit:
    @pytest.mark.parametrize(
        ("recipe", "strategy"),
        [
            ("hard_threshold", DDPHardThresholdStrategy),
            ("dense", DDPStrategy),
            ("top_k", SparseDDPStrategy),
            ("demo", DDPHardThresholdStrategy),
        ],
    )
    def test_two_workers(self, recipe, strategy):
        for fit in run_workers(fit_recipe, 2, f"--config={RESNET / recipe}.yaml", *SMALL, process_group=False):
            assert fit.strategy is strategy
            assert fit.world_size == 2
            assert fit.steps == 2
            assert fit.metrics["step_time"] > 0
            assert {"train/loss", "train/accuracy", "val/loss", "val/accuracy"} <= fit.metrics.keys()
            if strategy is DDPStrategy:
                assert "sparse/density" not in fit.metrics
            else:
                assert fit.exchanged.step == 1
                assert fit.exchanged.num_elements == sum(one.numel() for one in SmallImageResNet18(4).parameters())
                assert 0 < fit.exchanged.selected < fit.exchanged.num_workers * fit.exchanged.num_elements
                assert fit.metrics["sparse/density"] == pytest.approx(fit.exchanged.density)

    def test_metrics_are_those_of_all_workers(self):
        first, second = run_workers(fit_recipe, 2, f"--config={RESNET}/dense.yaml", *SMALL, process_group=False)
        for name in ("train/loss", "train/accuracy", "val/loss", "val/accuracy"):
            assert first.metrics[name] == pytest.approx(second.metrics[name])
        assert first.metrics["train/local_loss"] != pytest.approx(second.metrics["train/local_loss"])

    def test_threshold_from_the_command_line_is_in_force(self):
        recipe = f"--config={RESNET}/hard_threshold.yaml"
        (fit,) = run_workers(
            fit_recipe,
            1,
            recipe,
            *SMALL,
            "--trainer.devices=1",
            "--trainer.strategy.threshold=0",
            process_group=False,
        )
        assert fit.exchanged.threshold == 0
        assert fit.exchanged.density == 1

    @pytest.mark.parametrize(
        ("overrides", "sparse"), [((), True), (("--trainer.strategy=ddp",), False)], ids=["sparse", "dense"]
    )
    def test_as_a_user_types_it(self, overrides, sparse):
        command = [sys.executable, "-m", "recipes", "fit", "--config", f"{RESNET}/hard_threshold.yaml"]
        finished = subprocess.run(
            [*command, *SMALL, *overrides],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        output = finished.stdout + finished.stderr
        assert finished.returncode == 0, output
        assert "Starting with 2 processes" in output
        assert ("times fewer" in finished.stdout) == sparse
        assert ("DensityMonitor is idle: DDPStrategy exchanges whole gradients" in output) != sparse


def learn_digits():
    torch.manual_seed(0)
    model = ResNet18Classifier(width=8, learning_rate=0.1, warmup_from=0.02, warmup_epochs=1, milestones=(3,))
    data = CIFAR10DataModule(source="builtin", batch_size=64, num_workers=0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    return {
        "accuracy": trainer.callback_metrics["val/accuracy"].item(),
        "steps": trainer.global_step,
        "steps_per_epoch": model._steps_per_epoch(),
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "test_accuracy": trainer.test(model, data)[0]["test/accuracy"],
    }


class TestModel:
    def test_number_of_parameters_is_the_papers(self):
        assert sum(parameter.numel() for parameter in SmallImageResNet18().parameters()) == 11_173_962

    def test_keeps_the_resolution_in_the_stem(self):
        network = SmallImageResNet18(4).eval()
        shapes = []
        network.layer1.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert shapes == [(2, 4, 32, 32)]

    def test_refuses_a_width_of_nothing(self):
        with pytest.raises(ValueError, match=r"Invalid width=0\. Must be at least 1"):
            SmallImageResNet18(0)

    def test_batch_norm_is_exempt_from_weight_decay(self):
        network = SmallImageResNet18(4)
        names = {parameter: name for name, parameter in network.named_parameters()}
        decayed, exempt = parameter_groups(network, 1e-4)
        assert (decayed["weight_decay"], exempt["weight_decay"]) == (1e-4, 0.0)
        # 20 batch norms: the stem's, 2 in each of 8 blocks, 3 in shortcuts.
        exempt_names = {names[parameter] for parameter in exempt["params"]}
        assert len(exempt_names) == len(exempt["params"]) == 2 * (1 + 16 + 3)
        assert {"bn1.weight", "bn1.bias", "layer2.0.downsample.1.weight", "layer4.1.bn2.bias"} <= exempt_names
        decayed_names = {names[parameter] for parameter in decayed["params"]}
        assert decayed_names == set(names.values()) - exempt_names
        assert {"conv1.weight", "layer2.0.downsample.0.weight", "fc.weight", "fc.bias"} <= decayed_names

    def test_learning_rate_by_epoch(self, monkeypatch):
        steps_per_epoch = 4
        monkeypatch.setattr(ResNet18Classifier, "_steps_per_epoch", lambda self: steps_per_epoch)
        configured = ResNet18Classifier(width=1).configure_optimizers()
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        assert configured["lr_scheduler"]["interval"] == "step"
        assert isinstance(optimizer, torch.optim.SGD)
        assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)
        rates = []
        for _ in range(260 * steps_per_epoch):
            rates.append(optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[1]["lr"] == rates[-1]
            optimizer.step()
            schedule.step()
        expected = {0: 0.1, 2.5: 0.85, 5: 1.6, 149.75: 1.6, 150: 0.16, 249.75: 0.16, 250: 0.016}
        for epoch, rate in expected.items():
            assert rates[int(epoch * steps_per_epoch)] == pytest.approx(rate), epoch

    def test_no_warm_up(self):
        assert relative_learning_rate(0, warmup_from=0.5, warmup_epochs=0, milestones=()) == 1

    def test_learns_digits(self):
        (result,) = run_workers(learn_digits, 1, process_group=False)
        assert result["accuracy"] > 0.8
        assert result["test_accuracy"] == pytest.approx(result["accuracy"])
        assert result["steps"] == 4 * result["steps_per_epoch"] == 4 * 23
        assert result["learning_rate"] == pytest.approx(0.01)


def refuse_to_fetch(*args, **kwargs):
    raise URLError("no route to host")


def fit_without_images(folder):
    torchvision.datasets.cifar.download_and_extract_archive = refuse_to_fetch
    try:
        fit_recipe(f"--config={RESNET}/dense.yaml", *SMALL, "--data.source=cifar10", f"--data.root={folder}")
    except SystemExit as ended:
        return ended.code


class TestData:
    def test_digits(self):
        train, val = digits()
        assert (len(train), len(val)) == (1437, 360)
        images, labels = train.tensors
        assert images.shape == (1437, 3, 8, 8)
        assert images.dtype == torch.float32
        assert torch.cat([images, val.tensors[0]]).mean().abs() < 1e-4
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) == set(range(10))

    def test_digits_are_split_the_same_way_every_time(self):
        for once, again in zip(digits(), digits(), strict=True):
            assert all(map(torch.equal, once.tensors, again.tensors))

    def test_no_picture_is_both_trained_on_and_validated_on(self):
        train, val = ({tuple(image.flatten().tolist()) for image in part.tensors[0]} for part in digits())
        assert train.isdisjoint(val)

    def test_augments_in_training_only(self):
        image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
        plain = [transform(augment=False)(image) for _ in range(2)]
        augmented = [transform(augment=True)(image) for _ in range(8)]
        assert torch.equal(*plain)
        assert len({tuple(one.flatten().tolist()) for one in augmented}) > 1
        assert all(one.shape == (3, 32, 32) and one.dtype == torch.float32 for one in augmented)
        mean, std = torch.tensor(data_module.CIFAR10_MEAN), torch.tensor(data_module.CIFAR10_STD)
        torch.testing.assert_close(plain[0], ((image / 255).permute(1, 2, 0) - mean).div(std).permute(2, 0, 1))

    def test_says_which_file_to_put_where_without_a_network(self, tmp_path, monkeypatch):
        monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", refuse_to_fetch)
        data = CIFAR10DataModule(root=str(tmp_path))
        with pytest.warns(UserWarning, match="CIFAR-10 could not be fetched: .*no route to host"):
            data.prepare_data()
        with pytest.raises(MissingDataError, match=r"Put cifar-10-python\.tar\.gz from http\S+ there") as caught:
            data.setup("fit")
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_missing_images_end_every_worker_with_that_line(self, tmp_path):
        first, second = run_workers(fit_without_images, 2, str(tmp_path), process_group=False)
        assert "Put cifar-10-python.tar.gz" in first
        assert second == 1

    @pytest.mark.skipif(
        "LIGHTNING_SPARSE_DATA" not in os.environ,
        reason="set LIGHTNING_SPARSE_DATA to a folder that holds cifar-10-batches-py to test with the real images",
    )
    def test_real_images(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("fetched what is there already")

        monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", refuse)
        data = CIFAR10DataModule(root=os.environ["LIGHTNING_SPARSE_DATA"], batch_size=1000, num_workers=0)
        data.prepare_data()
        data.setup("fit")
        assert (len(data.train_images), len(data.val_images)) == (50_000, 10_000)
        images, labels = next(iter(data.val_dataloader()))
        assert images.shape == (1000, 3, 32, 32)
        assert labels.bincount().tolist() == pytest.approx([100] * 10, abs=35)
        # A thousand pictures, about a tenth of a deviation from the training set's mean and deviation.
        torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=0.1, rtol=0)
        torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3), atol=0.1, rtol=0)
        images, _ = next(iter(data.train_dataloader()))
        assert images.shape == (1000, 3, 32, 32)


class TestDemo:
    @pytest.fixture
    def runs(self):
        steps = list(range(30))
        every = {
            "val/accuracy": [0.5, 0.75],
            "step_time": [0.02] * 29 + [9.0],
        }
        sparse = {
            "sparse/payload_bytes": [1000.0] * 30,
            "sparse/density": [0.0, 0.02] * 15,
            "sparse/error_norm": [2.0] * 30,
            "sparse/threshold": [0.1] * 30,
        }
        return [
            demo.Run(Path(), {name: steps[-len(series) :] for name, series in values.items()}, values)
            for values in (every | sparse, every)
        ]

    def test_table(self, runs):
        text = demo.table(*runs, num_elements=2500)
        rows = {line[2:35].strip(): line[35:].split() for line in text.splitlines() if line.startswith("  ")}
        assert rows["validation accuracy, last epoch"] == ["75.0", "%", "75.0", "%"]
        assert rows["average density"] == ["1.00", "%", "100", "%"]
        assert rows["gradient bytes sent per worker"] == ["0.0", "MB", "0.3", "MB"]
        assert rows["times fewer than dense"] == ["10", "1"]
        assert rows["median step time"] == ["20", "ms", "20", "ms"]

    def test_picture(self, runs, tmp_path):
        figure = demo.draw(*runs, num_elements=2500)
        accuracy, density, error = figure.axes
        assert [len(line.get_xdata()) for line in accuracy.lines] == [2, 2]
        assert density.get_yscale() == "log"
        assert error.lines[1].get_ydata()[0] == pytest.approx(0.1 * 50)
        figure.savefig(tmp_path / "demo.png")

    def test_model_size_is_that_of_the_recipe(self):
        assert demo.model_size() == 701_466
