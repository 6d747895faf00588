"""The ResNet recipe: its networks, its images, its demo."""

import hashlib
import pickle
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.models.feature_extraction import create_feature_extractor

from recipes import MissingDataError, demo
from recipes.learning_rate import steps_per_epoch
from recipes.resnet18_cifar10 import images as images_module
from recipes.resnet18_cifar10.architectures import Architecture, build_network
from recipes.resnet18_cifar10.data import DEVIATIONS, MEANS, CIFARDataModule, crop_randomly, flip_randomly
from recipes.resnet18_cifar10.images import IGNORED_LABEL, ImageBatches, pad_to_multiple, read_digits, slice_by_label
from recipes.resnet18_cifar10.model import ImageClassifier, parameter_groups
from tests.integration.models import quiet_trainer
from tests.integration.recipes.recipe_runs import CONFIGS, DATA, RESNET, SMALL, fit_recipe, needs_data
from tests.workers import of_all_workers, on_workers, run_workers


@pytest.mark.full
@on_workers(1, process_group=False)
def test_the_model_learns_digits():
    torch.manual_seed(0)
    model = ImageClassifier(width=8, learning_rate=0.1, warmup_from=0.02, warmup_epochs=1, milestones=(3,))
    data = CIFARDataModule(source="builtin", batch_size=64, num_workers=0)
    trainer = quiet_trainer("auto", num_workers=1, max_steps=-1, max_epochs=4)
    trainer.fit(model, data)
    accuracy = trainer.callback_metrics["val/accuracy"].item()
    assert accuracy > 0.8
    assert trainer.global_step == 4 * steps_per_epoch(model) == 4 * 23
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    assert trainer.test(model, data)[0]["test/accuracy"] == pytest.approx(accuracy)


class TestNetworks:
    @pytest.mark.parametrize(
        ("architecture", "width", "stages"),
        [
            ("resnet18", 4, {"layer1": (4, 32), "layer2": (8, 16), "layer3": (16, 8), "layer4": (32, 4)}),
            ("senet18", 4, {"layer1": (4, 32), "layer2": (8, 16), "layer3": (16, 8), "layer4": (32, 4)}),
            ("googlenet", 64, {"inception3b": (480, 32), "inception4e": (832, 16), "inception5b": (1024, 8)}),
        ],
    )
    def test_keeps_the_resolution_in_the_stem(self, architecture, width, stages):
        network = build_network(architecture, num_classes=7, width=width).eval()
        found = create_feature_extractor(network, [*stages, "fc"])(torch.zeros(2, 3, 32, 32))
        assert {name: tuple(output.shape) for name, output in found.items()} == {
            name: (2, channels, size, size) for name, (channels, size) in stages.items()
        } | {"fc": (2, 7)}


@on_workers(2, process_group=False)
def test_the_model_rejects_data_with_another_number_of_classes():
    trainer = quiet_trainer("ddp", num_workers=2, fast_dev_run=1)
    with pytest.raises(ValueError, match=r"^The data has 10 classes, the model 100\. Add --model\.num_classes=10\.$"):
        trainer.fit(ImageClassifier(width=1, num_classes=100), CIFARDataModule(source="builtin", num_workers=0))
    assert trainer.global_step == 0


class TestModel:
    def test_batch_norm_is_exempt_from_weight_decay(self):
        network = build_network("resnet18", width=4)
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

    @pytest.mark.parametrize("architecture", get_args(Architecture))
    def test_group_normalisation_replaces_all_batch_normalisation(self, architecture):
        width = 64 if architecture == "googlenet" else 4
        with_batch, with_group = (
            ImageClassifier(architecture, width=width, normalisation=normalisation)
            for normalisation in ("batch", "group")
        )
        kinds = [type(module) for module in with_group.modules()]
        assert not any(issubclass(kind, _BatchNorm) for kind in kinds)
        assert kinds.count(torch.nn.GroupNorm) == sum(isinstance(module, _BatchNorm) for module in with_batch.modules())
        assert not list(with_group.network.buffers())
        assert with_group(torch.randn(2, 3, 32, 32)).shape == (2, 10)
        for model in (with_batch, with_group):
            assert len(parameter_groups(model, 1e-4)[1]["params"]) == 2 * kinds.count(torch.nn.GroupNorm)

    @pytest.mark.parametrize("width", [1, 3, 9, 10])
    def test_group_normalisation_supports_any_width(self, width):
        assert ImageClassifier(width=width, normalisation="group")(torch.randn(2, 3, 8, 8)).shape == (2, 10)


@on_workers(2, process_group=False)
def test_each_worker_has_its_classes_in_another_order_each_epoch():
    data = CIFARDataModule(source="builtin", batch_size=128, num_workers=0, heterogeneous=True)
    seen = []
    listener = LambdaCallback(
        on_train_epoch_start=lambda *_: seen.append([]),
        on_train_batch_start=lambda trainer, module, batch, index: seen[-1].extend(batch[1].tolist()),
    )
    options = {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 0, "callbacks": [listener]}
    trainer = quiet_trainer("ddp_hardthreshold", num_workers=2, **options)
    trainer.fit(ImageClassifier(width=1, normalisation="group"), data)
    first, second = seen
    assert sorted(first) == sorted(second)
    assert first != second
    labels = sorted(read_digits()[0].tensors[1].tolist())
    assert of_all_workers(sorted(first)) == [labels[:719], labels[-719:]]


class TestHeterogeneousData:
    @pytest.mark.parametrize(("number", "workers"), [(12, 3), (13, 3), (14, 3), (7, 7), (5, 1)])
    def test_slices_hold_every_image_and_are_of_one_size(self, number, workers):
        labels = torch.randint(4, (number,))
        everything = ImageBatches(torch.arange(number), labels)
        slices = [slice_by_label(everything, worker, workers) for worker in range(workers)]
        assert len({len(own) for own in slices}) == 1
        images = torch.cat([own.tensors[0] for own in slices])
        assert set(images.tolist()) == set(range(number))
        assert len(images) - number < workers
        assert torch.equal(torch.cat([own.tensors[1] for own in slices]), labels[images])
        assert all(torch.equal(own.tensors[1], own.tensors[1].sort().values) for own in slices)


def write_images(dataset, root, *, images_per_file=4):
    """Write a small data set in CIFAR's format; return its folder."""
    folder = Path(root) / dataset.base_folder
    folder.mkdir()
    random = np.random.default_rng(0)
    labels = "labels" if dataset is CIFAR10 else "fine_labels"
    for number, (name, _) in enumerate((*dataset.train_list, *dataset.test_list)):
        content = {
            "data": random.integers(0, 256, (images_per_file, 3 * 32 * 32), dtype=np.uint8),
            labels: [(number + image) % 10 for image in range(images_per_file)],
        }
        (folder / name).write_bytes(pickle.dumps(content))
    classes = {dataset.meta["key"]: [f"class {number}" for number in range(10)]}
    (folder / dataset.meta["filename"]).write_bytes(pickle.dumps(classes))
    return folder


def checksums(folder):
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def expect(dataset, md5, patch):
    """Replace the checksums that torchvision expects."""
    patch(dataset, "train_list", [[name, md5[name]] for name, _ in dataset.train_list])
    patch(dataset, "test_list", [[name, md5[name]] for name, _ in dataset.test_list])
    patch(dataset, "meta", dataset.meta | {"md5": md5[dataset.meta["filename"]]})


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def dataset(request, monkeypatch):
    """Return a data set; a download fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("fetched an existing file")

    monkeypatch.setattr(images_module, "fetch", refuse)
    return request.param


@pytest.fixture
def folder(dataset, tmp_path, monkeypatch):
    """Return the folder of a small data set."""
    folder = write_images(dataset, tmp_path)
    expect(dataset, checksums(folder), monkeypatch.setattr)
    return folder


def opened(dataset, folder, **options):
    options = {"root": str(folder.parent), "batch_size": 4, "num_workers": 0, **options}
    data = CIFARDataModule(source="cifar10" if dataset is CIFAR10 else "cifar100", **options)
    data.prepare_data()
    data.setup("fit")
    return data


class TestData:
    def test_the_split_of_digits_is_fixed_and_disjoint(self):
        train, val = read_digits()
        assert (len(train), len(val)) == (1437, 360)
        images, labels = train.tensors
        assert images.shape == (1437, 3, 8, 8)
        assert images.dtype == torch.float32
        assert torch.cat([images, val.tensors[0]]).mean().abs() < 1e-4
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) == set(range(10))
        for once, again in zip((train, val), read_digits(), strict=True):
            assert all(map(torch.equal, once.tensors, again.tensors))
        trained, validated = ({tuple(image.flatten().tolist()) for image in part.tensors[0]} for part in (train, val))
        assert trained.isdisjoint(validated)

    def test_reads_the_same_images_as_torchvision(self, dataset, folder):
        data = opened(dataset, folder)
        assert data.num_classes == (10 if dataset is CIFAR10 else 100)
        for train, images in ((True, data.train_images), (False, data.val_images)):
            expected = dataset(folder.parent, train=train)
            assert len(images) == len(expected)
            assert images.tensors[0].dtype == torch.uint8
            for (image, label), (picture, target) in zip(images, expected, strict=True):
                assert torch.equal(image.permute(1, 2, 0), torch.from_numpy(np.array(picture)))
                assert label == target

    def test_augments_in_training_only(self, dataset, folder):
        data = opened(dataset, folder, num_train_images=1)
        plain = [torch.cat([images for images, _ in data.val_dataloader()]) for _ in range(2)]
        assert torch.equal(*plain)
        mean, deviation = (torch.tensor(of[data.source]) for of in (MEANS, DEVIATIONS))
        scaled = data.val_images.tensors[0].movedim(1, -1) / 255
        torch.testing.assert_close(plain[0], ((scaled - mean) / deviation).movedim(-1, 1))
        augmented = [images for _ in range(8) for images, _ in data.train_dataloader()]
        assert all(images.shape == (1, 3, 32, 32) and images.dtype == torch.float32 for images in augmented)
        assert len({tuple(images.flatten().tolist()) for images in augmented}) > 1

    @pytest.mark.parametrize("training", [True, False])
    def test_augments_equally_on_the_device_and_in_the_loader(self, dataset, folder, training):
        batches = []
        for device_augmentation in (False, True):
            data = opened(dataset, folder, device_augmentation=device_augmentation)
            data.trainer = SimpleNamespace(training=training, world_size=1)
            torch.manual_seed(0)
            loader = data.train_dataloader() if training else data.val_dataloader()
            batch = next(iter(loader))
            assert batch[0].dtype == (torch.uint8 if device_augmentation else torch.float32)
            batches.append(data.on_after_batch_transfer(batch, 0))
        (images, labels), (images_of_device, labels_of_device) = batches
        assert torch.equal(images, images_of_device)
        assert torch.equal(labels, labels_of_device)

    def test_crops_each_image_at_its_own_place(self):
        torch.manual_seed(0)
        # Pixel values encode positions; padding is zero.
        image = torch.arange(1, 1 + 32 * 32, dtype=torch.int32).view(1, 32, 32)
        cropped = crop_randomly(image.expand(2000, 3, 32, 32), padding=4)
        assert cropped.shape == (2000, 3, 32, 32)
        assert cropped.dtype == torch.int32
        rows, columns = torch.arange(32).view(1, 1, 32, 1), torch.arange(32).view(1, 1, 1, 32)
        inside = cropped > 0
        down = torch.where(inside, (cropped - 1) // 32 - rows, 0)
        right = torch.where(inside, (cropped - 1) % 32 - columns, 0)
        places = set()
        for moved_down, moved_right, kept in zip(down, right, inside, strict=True):
            ((y, x),) = {*zip(moved_down[kept].tolist(), moved_right[kept].tolist(), strict=True)}
            assert kept.sum() == 3 * (32 - abs(y)) * (32 - abs(x))
            places.add((y, x))
        assert places == {(y, x) for y in range(-4, 5) for x in range(-4, 5)}

    def test_flips_each_image_or_not(self):
        torch.manual_seed(0)
        images = torch.randint(0, 256, (1000, 3, 4, 4), dtype=torch.uint8)
        flipped = flip_randomly(images)
        mirrored, same = ((flipped == other).flatten(1).all(1) for other in (images.flip(-1), images))
        assert torch.equal(same, ~mirrored)
        # 63 is four standard deviations of a thousand fair coins.
        assert mirrored.sum().item() == pytest.approx(500, abs=63)

    def test_takes_the_first_images(self, dataset, folder):
        data = opened(dataset, folder, num_train_images=3, num_val_images=2)
        assert torch.equal(data.train_images.tensors[1], torch.tensor([0, 1, 2]))
        assert len(data.val_images) == 2
        with pytest.raises(ValueError, match=r"Invalid num_val_images=5\. Must be at most 4"):
            opened(dataset, folder, num_val_images=5)

    def test_fills_up_with_ignored_images(self):
        images = ImageBatches(torch.ones(7, 3, 2, 2), torch.arange(7))
        filled = pad_to_multiple(images, 3)
        assert filled.tensors[1].tolist() == [*range(7), IGNORED_LABEL, IGNORED_LABEL]
        assert filled.tensors[0].sum(dim=(1, 2, 3)).tolist() == [12.0] * 7 + [0.0] * 2
        assert len(pad_to_multiple(images, 7)) == 7

    @pytest.mark.full
    @needs_data("cifar-10-batches-py")
    def test_real_images(self, monkeypatch):
        monkeypatch.setattr(images_module, "fetch", None)
        data = CIFARDataModule(root=str(DATA), batch_size=1000, num_workers=0)
        data.prepare_data()
        data.setup("fit")
        images, labels = data.train_images.tensors
        assert images.shape == (50_000, 3, 32, 32)
        assert labels.bincount().tolist() == [5000] * 10
        assert data.val_images.tensors[1].bincount().tolist() == [1000] * 10
        values = torch.arange(256).double() / 255
        for channel in range(3):
            share = images[:, channel].flatten().bincount(minlength=256).double() / images[:, channel].numel()
            mean = share @ values
            assert mean.item() == pytest.approx(MEANS["cifar10"][channel], abs=5e-5)
            deviation = (share @ (values - mean).square()).sqrt()
            assert deviation.item() == pytest.approx(DEVIATIONS["cifar10"][channel], abs=5e-5)
        batch, _ = next(iter(data.train_dataloader()))
        assert batch.shape == (1000, 3, 32, 32)
        assert batch.dtype == torch.float32


class TestUnpack:
    @pytest.fixture
    def archive(self, dataset, folder, monkeypatch):
        """Return the archive of the small data set, and remove the folder."""
        archive = shutil.make_archive(str(folder.parent / "fetched"), "gztar", folder.parent, folder.name)
        shutil.rmtree(folder)
        return Path(archive)

    def test_fetches_and_unpacks(self, dataset, folder, archive, monkeypatch):
        fetched = []
        monkeypatch.setattr(images_module, "fetch", lambda *args, **kwargs: fetched.append((args, kwargs)) or archive)
        for _ in range(2):
            assert len(opened(dataset, folder).val_images) == 4
        assert fetched == [((dataset.url, folder.parent / dataset.filename), {"md5": dataset.tgz_md5})]
        assert {path.name for path in folder.parent.iterdir()} == {folder.name, archive.name}

    def test_an_incomplete_folder_is_never_used(self, dataset, folder, archive, monkeypatch):
        def fill_the_disk(self, path, **kwargs):
            (Path(path) / dataset.base_folder).mkdir()
            (Path(path) / dataset.base_folder / "half").touch()
            raise OSError("No space left on device")

        monkeypatch.setattr(images_module, "fetch", lambda *args, **kwargs: archive)
        monkeypatch.setattr(tarfile.TarFile, "extractall", fill_the_disk)
        with pytest.raises(MissingDataError, match=r"CIFAR-10+ could not be unpacked: No space left on device"):
            opened(dataset, folder)
        assert {path.name for path in folder.parent.iterdir()} == {archive.name}

    @pytest.mark.parametrize(("change", "state"), [(Path.unlink, "is missing"), (Path.touch, "is broken")])
    @pytest.mark.parametrize("which", ["train_list", "test_list", "meta"])
    def test_an_error_names_the_faulty_file(self, dataset, folder, which, change, state):
        entry = getattr(dataset, which)
        path = folder / (entry["filename"] if which == "meta" else entry[-1][0])
        path.write_bytes(path.read_bytes()[:-10])
        change(path)
        with pytest.raises(MissingDataError, match=rf"{path} {state}\. Delete the folder {folder} ") as caught:
            opened(dataset, folder)
        assert "\n" not in str(caught.value)


def fit_images(root, md5):
    with pytest.MonkeyPatch.context() as patches:
        expect(CIFAR10, md5, patches.setattr)
        images = ("--data.source=cifar10", f"--data.root={root}", "--data.device_augmentation=true")
        return fit_recipe(f"--config={CONFIGS[f'{RESNET}/dense']}", *SMALL[RESNET], *images)


def test_images_of_cifars_format_train(tmp_path):
    folder = write_images(CIFAR10, tmp_path, images_per_file=64)
    for fit in run_workers(fit_images, 2, str(tmp_path), checksums(folder), process_group=False):
        assert fit.steps == 2


NUM_UNEVEN = 37


def evaluate(num_workers):
    """Return the metrics of the same weights in fit, validate and test."""
    torch.manual_seed(0)
    # A step wraps the model in DDP; the tiny learning rate keeps the weights equal for all numbers of workers.
    model = ImageClassifier(width=2, learning_rate=1e-30, warmup_from=1e-30, weight_decay=0.0)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 0.0
    data = CIFARDataModule(source="builtin", batch_size=4, num_workers=0, num_val_images=NUM_UNEVEN)
    strategy = "ddp" if num_workers > 1 else "auto"
    options = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(strategy, num_workers=num_workers, **options)
    trainer.fit(model, data)
    found = {f"{name} in fit": value.item() for name, value in trainer.callback_metrics.items() if "val/" in name}
    return found | trainer.validate(model, data, verbose=False)[0] | trainer.test(model, data, verbose=False)[0]


def test_evaluation_counts_no_image_twice():
    (alone,) = run_workers(evaluate, 1, 1, process_group=False)
    assert alone["val/accuracy"] * NUM_UNEVEN == pytest.approx(round(alone["val/accuracy"] * NUM_UNEVEN), abs=1e-5)
    assert alone["val/accuracy"] == alone["test/accuracy"] == alone["val/accuracy in fit"]
    # With three workers, the last batch of two has only ignored images.
    for num_workers in (2, 3):
        for worker in run_workers(evaluate, num_workers, num_workers, process_group=False):
            assert worker.keys() == alone.keys()
            for name, value in alone.items():
                tolerance = 0 if "accuracy" in name else 1e-5  # losses are added in another order
                assert worker[name] == pytest.approx(value, rel=tolerance, abs=0), (num_workers, name)


class TestDemo:
    @pytest.fixture
    def runs(self):
        steps = list(range(30))
        every = {"val/accuracy": [0.5, 0.75], "step_time": [0.02] * 29 + [9.0], "gradient_bytes": [10_000.0]}
        sparse = {
            "sparse/payload_bytes": [1000.0] * 30,
            "sparse/density": [0.0, 0.02] * 15,
            "sparse/error_norm": [2.0] * 30,
            "sparse/threshold": [0.1] * 30,
        }
        return [
            demo.Run({name: steps[-len(series) :] for name, series in values.items()}, values)
            for values in (every | sparse, every)
        ]

    def test_table(self, runs):
        text = demo.format_table(*runs)
        assert "(2,500 parameters)" in text
        rows = {line[2:35].strip(): line[35:].split() for line in text.splitlines() if line.startswith("  ")}
        assert rows["validation accuracy, last epoch"] == ["75.0", "%", "75.0", "%"]
        assert rows["average density"] == ["1.00", "%", "100", "%"]
        assert rows["gradient bytes sent per worker"] == ["0.0", "MB", "0.3", "MB"]
        assert rows["times fewer than dense"] == ["10", "1"]
        assert rows["median step time"] == ["20", "ms", "20", "ms"]

    def test_picture(self, runs, tmp_path):
        figure = demo.draw(*runs)
        accuracy, density, error = figure.axes
        assert [len(line.get_xdata()) for line in accuracy.lines] == [2, 2]
        assert density.get_yscale() == "log"
        assert error.lines[1].get_ydata()[0] == pytest.approx(0.1 * 50)
        figure.savefig(tmp_path / "demo.png")
