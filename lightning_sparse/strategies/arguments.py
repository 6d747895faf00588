"""Signatures and docstrings with all options, and checks of Lightning's arguments."""

import difflib
import inspect
import re
from collections.abc import Collection, Iterable
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

Options = TypeVar("Options")
SECTION = re.compile(r"^([A-Z]\w+:)\n", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\S+):.*(?:\n {5}.*)*", re.MULTILINE)
"""A parameter's name and description in a docstring."""
_HOOK = (
    "The sparse exchange is the communication hook, DDP has only one, and strategy.state is its state. Use "
    "value_dtype='bfloat16' or 'float8' to compress values further, or Lightning's DDPStrategy for another hook"
)
_REPLACED_ARGUMENTS = {
    **dict.fromkeys(("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"), _HOOK),
    "model_averaging_period": "Gradients are exchanged in every step, so there are no models to average. Use "
    "Lightning's DDPStrategy for post-local SGD",
    "mixed_precision": "DDP's mixed precision has its own communication hook. Use Trainer(precision='bf16-mixed')",
    "sharding_strategy": "Every worker has the whole model, without shards. Use strategy='hsdp_hardthreshold', or "
    "Lightning's FSDPStrategy, which has its own exchange",
    "skip_all_reduce_unused_params": "The hook must receive every bucket. Leave this argument out: a hard threshold "
    "sends nothing for unused parameters",
}

_DDP_STRATEGY = dict(inspect.signature(DDPStrategy).parameters)
_DDP = dict(inspect.signature(DistributedDataParallel).parameters)


class TakesOptions(Strategy):
    """Adds options from ``**kwargs`` to a subclass's signature and docstring."""

    _options_class: ClassVar[type]
    """The class of the options that this class's own ``__init__`` takes as ``**kwargs``."""
    _excluded_options: ClassVar[frozenset[str]] = frozenset()
    """Parameters of ``_options_class`` that the strategy does not have."""
    _own_doc: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_doc = vars(cls).get("__doc__") or ""
        if "_options_class" in vars(cls):
            init: Any = vars(cls)["__init__"]
            shown = dict(inspect.signature(init).parameters)
            for name, parameter in inspect.signature(cls._options_class).parameters.items():
                if name not in cls._excluded_options:
                    shown.setdefault(name, parameter.replace(kind=Parameter.KEYWORD_ONLY))
            init.__signature__ = _signature(shown.values())  # jsonargparse looks at the function
        signature = _signature(_parameters(cls))
        cls.__signature__ = signature  # type: ignore[attr-defined]
        cls.__doc__ = _documentation(cls, signature.parameters.values())

    def _make_options(self, options: type[Options], arguments: dict[str, Any], **others: Any) -> Options:
        """Return options made of their arguments, which are removed from ``arguments``."""
        names = inspect.signature(options).parameters.keys() - self._excluded_options
        return options(**others, **{name: arguments.pop(name) for name in names & arguments.keys()})


def _signature(parameters: Iterable[Parameter]) -> Signature:
    named = [parameter for parameter in parameters if parameter.kind is not Parameter.VAR_POSITIONAL]
    return Signature(sorted(named, key=lambda parameter: parameter.kind))


def _classes(cls: type) -> list[type[TakesOptions]]:
    return [base for base in cls.__mro__ if issubclass(base, TakesOptions)]


def _parameters(cls: type) -> list[Parameter]:
    """Return parameters of a class and of the bases that receive its ``**kwargs``."""
    found: dict[str, Parameter] = {}
    for init in (vars(base)["__init__"] for base in _classes(cls) if "__init__" in vars(base)):
        _, *parameters = inspect.signature(init).parameters.values()
        if found:  # a class that takes no sparsifier makes it itself
            parameters = [parameter for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
        found |= {parameter.name: parameter for parameter in parameters if parameter.name not in found}
    return list(found.values())


def _documentation(cls: type, parameters: Iterable[Parameter]) -> str:
    """Return a class's docstring with all its parameters and, if missing, a base's errors."""
    sections = _sections(vars(cls)["_own_doc"])
    entries: dict[str, str] = {}
    for base in _classes(cls):
        options_class, own_doc = vars(base).get("_options_class", object), vars(base).get("_own_doc", "")
        for doc in (own_doc, *(source.__doc__ for source in reversed(options_class.__mro__))):
            entries = _entries(doc or "") | entries
        if "Raises:" in (inherited := _sections(own_doc)):
            sections.setdefault("Raises:", inherited["Raises:"])
    names = [f"**{option.name}" if option.kind is Parameter.VAR_KEYWORD else option.name for option in parameters]
    arguments = "\n".join(entries[name] for name in names if name in entries)
    parts = {"": sections.pop(""), "Args:": ""} | sections | {"Args:": arguments}
    return "\n\n".join(f"{title}\n{text}".strip() for title, text in parts.items())


def _sections(docstring: str) -> dict[str, str]:
    """Return the text of each section by title; the title of the first lines is empty."""
    first, *others = SECTION.split(inspect.cleandoc(docstring))
    return {"": first, **dict(zip(others[::2], others[1::2], strict=True))}


def _entries(docstring: str) -> dict[str, str]:
    """Return the lines in a docstring's ``Args`` section by parameter name."""
    return {entry[1]: entry[0] for entry in ENTRY.finditer(_sections(docstring).get("Args:", ""))}


def ddp_arguments(strategy: Strategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``DDPStrategy``.

    Raises:
        ValueError: a sparse exchange does not support an argument; the message names an alternative.
        TypeError: an argument is unknown; the message names a similar argument.
    """
    for name, advice in _REPLACED_ARGUMENTS.items():
        if arguments.get(name):
            raise ValueError(f"Got {name}={arguments[name]!r}. {advice}.")
    known = {*_DDP_STRATEGY, *_DDP} - {"module", "kwargs", "device_ids"}
    takers = f"Lightning's DDPStrategy nor DistributedDataParallel of torch {torch.__version__}"
    require_arguments(strategy, arguments, known, takers)
    return arguments


def process_group_arguments(strategy: Strategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``DDPStrategy`` that apply without a DDP module.

    Removes arguments of a DDP module with default values, which a command line passes.

    Raises:
        ValueError: an argument configures DDP's own exchange.
        TypeError: an argument is unknown; the message names a similar argument.
    """
    allowed = _DDP_STRATEGY.keys() - {"kwargs"} - _REPLACED_ARGUMENTS.keys()
    module_arguments = {**_DDP, **_DDP_STRATEGY}
    require_arguments(strategy, arguments.keys() - module_arguments.keys(), allowed, "Lightning's DDPStrategy")
    for name, value in arguments.items():
        # Without a DDP module, any parameter may stay unused.
        if name not in allowed and name != "find_unused_parameters" and value is not module_arguments[name].default:
            raise ValueError(
                f"Got {name}={value!r}, which configures a DDP module's exchange of gradients. Local training does not "
                "exchange gradients: leave it out."
            )
    return {name: value for name, value in arguments.items() if name in allowed}


def model_parallel_arguments(strategy: Strategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``ModelParallelStrategy`` that apply to several replicas.

    Raises:
        ValueError: the size of a replica is given.
        TypeError: an argument is unknown; the message names a similar argument.
    """
    size = arguments.get("data_parallel_size", "auto")
    if size != "auto":
        raise ValueError(
            f"Got data_parallel_size={size!r}, which follows from replicas and tensor_parallel_size. Set these instead."
        )
    known = inspect.signature(ModelParallelStrategy).parameters
    require_arguments(strategy, arguments, known, "Lightning's ModelParallelStrategy")
    return arguments


def require_arguments(strategy: Strategy, names: Collection[str], known: Collection[str], takers: str) -> None:
    """Raise TypeError for unknown names; the message suggests a similar name."""
    for name in names:
        if name not in known:
            options = set(inspect.signature(type(strategy)).parameters) - {"kwargs"}
            close = difflib.get_close_matches(name, options.union(known), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Unknown argument {name!r}: neither this strategy nor {takers} takes it.{hint}")
