"""The models of the benchmark, and their losses on random batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

Loss = Callable[[nn.Module, torch.Generator], Tensor]


def build_model(model: str, device: torch.device) -> tuple[nn.Module, Loss]:
    """Return an untrained model and its loss on a batch drawn from a generator."""

    def draw(high: int, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    network: nn.Module
    if model == "resnet18":
        from torchvision.models import resnet18

        network = resnet18(num_classes=10)

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            images = torch.randn(8, 3, 32, 32, generator=generator, device=device)
            return cross_entropy(module(images), draw(10, 8, generator=generator))

    elif model == "lstm":
        from recipes.lstm_wikitext2.model import WIKITEXT2_VOCABULARY_SIZE, TiedLSTM

        network = TiedLSTM()

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            words = draw(WIKITEXT2_VOCABULARY_SIZE, 31, 2, generator=generator)
            return cross_entropy(module(words[:-1])[0].flatten(0, 1), words[1:].flatten())

    elif model == "gpt":
        from recipes.gpt_wikitext.model import GPT

        network = GPT()

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            text = draw(256, 16, 65, generator=generator)
            return cross_entropy(module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    else:
        from recipes.ncf_movielens.model import ML_20M_ITEMS, ML_20M_USERS, NeuMF

        is_small = model == "neumf_small"
        num_users, num_items, pairs = (610, 9724, 4096) if is_small else (ML_20M_USERS, ML_20M_ITEMS, 16384)
        sizes: tuple[Any, ...] = (16, (32, 32, 16, 8), 0.0) if is_small else ()
        network = NeuMF(num_users, num_items, *sizes)

        def loss(module: nn.Module, generator: torch.Generator) -> Tensor:
            users, items = (draw(number, pairs, generator=generator) for number in (num_users, num_items))
            return binary_cross_entropy_with_logits(module(users, items), draw(2, pairs, generator=generator).float())

    return network.to(device), loss
