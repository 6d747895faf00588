"""Arguments that are handed on to Lightning's: a misspelt or an impossible one is told of at once."""

import difflib
import inspect
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

_REPLACED_ARGUMENTS = {
    "ddp_comm_hook": "The sparse exchange is the communication hook, and DDP has only one. Use value_dtype='bfloat16' "
    "to compress values further, or Lightning's DDPStrategy for another hook",
    "ddp_comm_state": "The sparse exchange keeps its own state. Read it from strategy.state",
    "ddp_comm_wrapper": "The sparse exchange is not wrapped. Use value_dtype='bfloat16' or 'float8' to send values in "
    "half precision",
    "model_averaging_period": "Gradients are exchanged in every step, so there are no models to average. Use "
    "Lightning's DDPStrategy for post-local SGD",
    "mixed_precision": "DDP's own mixed precision brings a communication hook of its own. Use "
    "Trainer(precision='bf16-mixed')",
    "sharding_strategy": "Every worker has the whole model here, and there are no shards. Use "
    "strategy='hsdp_hardthreshold', or Lightning's FSDPStrategy, with its own exchange",
    "skip_all_reduce_unused_params": "The hook must see every bucket. Leave it out: a hard threshold sends nothing for "
    "unused parameters",
}


def check_ddp_arguments(arguments: dict[str, Any], strategy: type[DDPStrategy]) -> None:
    """Raises for an argument that DDP does not know, or that a sparse exchange cannot honour.

    Args:
        arguments: that were given beside the strategy's own.
        strategy: whose options may have been meant.

    Raises:
        ValueError: it cannot be honoured; says what to use instead.
        TypeError: it is not known; says which is like it.
    """
    for name, advice in _REPLACED_ARGUMENTS.items():
        if arguments.get(name):
            raise ValueError(f"Got {name}={arguments[name]!r}. {advice}.")
    known = {
        *inspect.signature(DDPStrategy.__init__).parameters,
        *inspect.signature(DistributedDataParallel.__init__).parameters,
    } - {"self", "module", "kwargs", "device_ids"}
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"Unknown argument {name!r}: neither this strategy, nor Lightning's DDPStrategy, nor "
                f"DistributedDataParallel of torch {torch.__version__} takes it.{_hint(name, known, strategy)}"
            )


def _hint(name: str, known: set[str], strategy: type[Strategy]) -> str:
    own = set(inspect.signature(strategy).parameters) - {"kwargs"}
    close = difflib.get_close_matches(name, known | own, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def process_group_arguments(arguments: dict[str, Any], strategy: type[DDPStrategy]) -> dict[str, Any]:
    """Returns what of DDP's arguments means something without a DDP module.

    A command line hands on all arguments that there are: those with their default value are left out.

    Args:
        arguments: that were given beside the strategy's own.
        strategy: whose options may have been meant.

    Raises:
        ValueError: one that concerns DDP's own exchange.
        TypeError: it is not known; says which is like it.
    """
    of_strategy = inspect.signature(DDPStrategy.__init__).parameters
    of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    allowed = set(of_strategy) - {"self", "kwargs"} - _REPLACED_ARGUMENTS.keys()
    meant = {}
    for name, value in arguments.items():
        if name in allowed:
            meant[name] = value
        elif name == "find_unused_parameters":
            continue  # without a DDP module any parameter may stay unused
        elif name in of_strategy or name in of_ddp:
            if value is not (of_strategy[name] if name in of_strategy else of_ddp[name]).default:
                raise ValueError(
                    f"Got {name}={value!r}, which concerns a DDP module's exchange of gradients. Local training has "
                    "none: leave it out."
                )
        else:
            raise TypeError(
                f"Unknown argument {name!r}: neither this strategy nor Lightning's DDPStrategy takes it."
                f"{_hint(name, allowed, strategy)}"
            )
    return meant


def model_parallel_arguments(arguments: dict[str, Any], strategy: type[ModelParallelStrategy]) -> dict[str, Any]:
    """Returns what of ``ModelParallelStrategy``'s arguments means something where replicas are told apart.

    Args:
        arguments: that were given beside the strategy's own.
        strategy: whose options may have been meant.

    Raises:
        ValueError: the size of a replica.
        TypeError: it is not known; says which is like it.
    """
    known = set(inspect.signature(ModelParallelStrategy.__init__).parameters) - {"self", "tensor_parallel_size"}
    size = arguments.get("data_parallel_size", "auto")
    if size != "auto":
        raise ValueError(
            f"Got data_parallel_size={size!r}. A replica has as many ranks as remain: say how many replicas there are, "
            "replicas=…"
        )
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"Unknown argument {name!r}: neither this strategy nor Lightning's ModelParallelStrategy takes it."
                f"{_hint(name, known, strategy)}"
            )
    return {name: value for name, value in arguments.items() if name != "data_parallel_size"}
