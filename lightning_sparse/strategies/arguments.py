"""Checks of the arguments that a strategy passes on to Lightning's and to DDP."""

import difflib
import inspect
from collections.abc import Collection, Mapping
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


_DDP_STRATEGY = dict(inspect.signature(DDPStrategy).parameters)
_DDP = dict(inspect.signature(DistributedDataParallel).parameters)
_MODEL_PARALLEL = dict(inspect.signature(ModelParallelStrategy).parameters)


def check_ddp_arguments(arguments: Mapping[str, Any], strategy: type[Strategy]) -> None:
    """Reject arguments that DDP does not know, or that a sparse exchange cannot honour.

    Args:
        arguments: that were given beside the strategy's own.
        strategy: whose options may have been meant.

    Raises:
        ValueError: an argument that cannot be honoured; says what to use instead.
        TypeError: an unknown argument; names a similar one.
    """
    for name, advice in _REPLACED_ARGUMENTS.items():
        if arguments.get(name):
            raise ValueError(f"Got {name}={arguments[name]!r}. {advice}.")
    known = {*_DDP_STRATEGY, *_DDP} - {"module", "kwargs", "device_ids"}
    takers = f"Lightning's DDPStrategy nor DistributedDataParallel of torch {torch.__version__}"
    _require_known(arguments, known, strategy, takers)


def process_group_arguments(arguments: Mapping[str, Any], strategy: type[Strategy]) -> dict[str, Any]:
    """Return the DDP arguments that apply without a DDP module.

    A command line passes on all arguments that there are: those with their default value are left out.

    Args:
        arguments: that were given beside the strategy's own.
        strategy: whose options may have been meant.

    Raises:
        ValueError: an argument that concerns DDP's own exchange.
        TypeError: an unknown argument; names a similar one.
    """
    own = _DDP_STRATEGY.keys() - {"kwargs"} - _REPLACED_ARGUMENTS.keys()
    of_a_module = {**_DDP, **_DDP_STRATEGY}
    _require_known({name for name in arguments if name not in of_a_module}, own, strategy, "Lightning's DDPStrategy")
    for name, value in arguments.items():
        # Without a DDP module any parameter may stay unused.
        if name not in own and name != "find_unused_parameters" and value is not of_a_module[name].default:
            raise ValueError(
                f"Got {name}={value!r}, which concerns a DDP module's exchange of gradients. Local training has "
                "none: leave it out."
            )
    return {name: value for name, value in arguments.items() if name in own}


def model_parallel_arguments(arguments: Mapping[str, Any], strategy: type[Strategy]) -> dict[str, Any]:
    """Return the arguments of ``ModelParallelStrategy`` that apply to several replicas.

    Args:
        arguments: that were given beside the strategy's own.
        strategy: whose options may have been meant.

    Raises:
        ValueError: the size of a replica.
        TypeError: an unknown argument; names a similar one.
    """
    size = arguments.get("data_parallel_size", "auto")
    if size != "auto":
        raise ValueError(
            f"Got data_parallel_size={size!r}. A replica has as many ranks as remain: say how many replicas there are, "
            "replicas=…"
        )
    known = _MODEL_PARALLEL.keys() - {"tensor_parallel_size"}
    _require_known(arguments, known, strategy, "Lightning's ModelParallelStrategy")
    return {name: value for name, value in arguments.items() if name != "data_parallel_size"}


def _require_known(names: Collection[str], known: Collection[str], strategy: type[Strategy], takers: str) -> None:
    for name in names:
        if name not in known:
            own = set(inspect.signature(strategy).parameters) - {"kwargs"}
            close = difflib.get_close_matches(name, own.union(known), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Unknown argument {name!r}: neither this strategy nor {takers} takes it.{hint}")
