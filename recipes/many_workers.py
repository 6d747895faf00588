"""Compares exchanges between many workers: a small convolutional network on CIFAR-10, in one process.

    OMP_NUM_THREADS=1 python -m recipes.many_workers --root data --output many_workers.csv

Each step, the workers share 256 of 12,800 images. Writes a row per training: accuracy and loss on 4,000 test images,
the mean densities of workers and of averages, and the bytes that a worker receives per parameter and step. A sparse
coordinate takes 6 bytes before the sum and 6 bytes after it. A dense sum takes 4 bytes; a dense exchange takes 8.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparse import Dense, HardThreshold
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.strategies.simulated.workers import SimulatedWorkers
from recipes import MissingDataError
from recipes.resnet18_cifar10.data import DEVIATIONS, MEANS, CIFARDataModule, flip_randomly, normalise

BATCH, LEARNING_RATE = 256, 0.2


def main() -> None:
    """Run all trainings and write a row after each."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.many_workers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.05, 0.015])
    parser.add_argument("--exchanges", nargs="+", default=["dense", "reduce_scatter", "sparse_sums"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if given.workers < 1 or BATCH % given.workers:
        parser.error(f"Invalid --workers {given.workers}. Must divide {BATCH}, the images per step.")
    data = CIFARDataModule(str(given.root), num_train_images=12_800, num_val_images=4_000)
    try:
        data.prepare_data()
        data.setup("fit")
    except MissingDataError as error:
        sys.exit(str(error))
    with given.output.open("a", newline="") as file:
        for seed in given.seeds:
            for exchange in given.exchanges:
                for density in [1.0] if exchange == "dense" else given.densities:
                    row = train(data, given.workers, given.steps, exchange, density, seed)
                    rows = csv.DictWriter(file, row)
                    if not file.tell():
                        rows.writeheader()
                    rows.writerow(row)
                    file.flush()
                    print(row, flush=True)


def train(
    data: CIFARDataModule, num_workers: int, steps: int, exchange: str, density: float, seed: int
) -> dict[str, Any]:
    """Train once and return a row."""
    torch.manual_seed(seed)
    assert data.train_images is not None
    assert data.val_images is not None
    (pixels, labels), (test_pixels, test_labels) = data.train_images.tensors, data.val_images.tensors
    scale = MEANS["cifar10"], DEVIATIONS["cifar10"]
    model = build_network()
    weights = dict(model.named_parameters())
    sparsifier = Dense() if exchange == "dense" else HardThreshold(density=density)
    options = GradientOptions(exchange=exchange)
    workers = SimulatedWorkers(num_workers, sparsifier, weights, options, per_layer_stats=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / 2, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.2)
    sent, averaged = [], []
    for _ in range(steps):
        places = torch.randint(len(pixels), (num_workers, BATCH // num_workers))
        gradients: list[dict[str, Tensor]] = []
        for own in places:
            loss = cross_entropy(model(flip_randomly(normalise(pixels[own], *scale))), labels[own])
            gradients.append(dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
        averages = workers.average(gradients)
        for name, weight in weights.items():
            weight.grad = averages[name].view_as(weight)
        optimizer.step()
        schedule.step()
        workers.commit()
        statistics = workers.each[0].last_step
        assert statistics is not None
        sent.append(statistics.density)
        averaged.append(sum(int(average.count_nonzero()) for average in averages.values()) / statistics.num_elements)
    with torch.no_grad():
        parts = zip(test_pixels.split(500), test_labels.split(500), strict=True)
        outputs = torch.cat([model(normalise(part, *scale)) for part, _ in parts])
    received = [6 * up + min(6 * down, 4) if up < 1 else 8 for up, down in zip(sent, averaged, strict=True)]
    return {
        "exchange": exchange,
        "workers": num_workers,
        "target_density": density,
        "seed": seed,
        "accuracy": round(float((outputs.argmax(1) == test_labels).double().mean()), 4),
        "loss": round(float(cross_entropy(outputs, test_labels)), 4),
        "density": round(sum(sent) / steps, 5),
        "density_of_averages": round(sum(averaged) / steps, 5),
        "received_bytes_per_parameter": round(sum(received) / steps, 4),
    }


def build_network() -> nn.Module:
    """Return a network of 131,754 parameters with group normalisation, which suits batches of 4 images."""
    layers: list[nn.Module] = []
    for channels, out_channels, stride in ((3, 32, 2), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        convolution = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(8, out_channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


if __name__ == "__main__":
    main()
