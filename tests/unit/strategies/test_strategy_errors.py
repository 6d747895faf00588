"""Strategies reject invalid options at construction, and register their names."""

import warnings
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    Dense,
    DensityMonitor,
    GaussianK,
    HardThreshold,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
    RandomK,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    SparseLocalStrategy,
    TopK,
    paper_threshold,
)
from lightning_sparse.engine.averager import warn_of_patterns
from lightning_sparse.engine.engine import log_other_settings
from lightning_sparse.strategies import register_strategies
from tests.integration.models import messages_of

DDP, LOCAL = DDPHardThresholdStrategy, LocalHardThresholdStrategy
HSDP, LOCAL_HSDP = HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy
of_top_k = partial(SparseDDPStrategy, TopK())
simulated = partial(SimulatedWorkersStrategy, HardThreshold(threshold=0.1), 2)

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (of_top_k, {name: word}, f"Invalid {name}={word!r}. Must be one of {allowed}.")
        for name, word, allowed in (
            ("value_dtype", "", "'float32', 'bfloat16', 'float8', 'int8'"),
            ("exchange", None, "'auto', 'gather', 'reduce_scatter', 'sparse_sums', 'dense'"),
        )
    ),
    *(
        (make, {"link_gbit_s": link}, "Must be a worker's link in Gbit/s")
        for make, link in ((LOCAL, 0), *((DDP, link) for link in (0, -1.0, nan, inf, "10", True, [10], 1e-320)))
    ),
    *(
        (DDP, {"local_clip_norm": norm}, f"Invalid local_clip_norm={norm!r}. Must be a finite number above 0, or None")
        for norm in (0.0, -1.0, nan, inf, "a", True)
    ),
    *(
        (DDP, {name: value}, instead)
        for name, value, instead in (
            ("ddp_comm_hook", print, "value_dtype='bfloat16'"),
            ("ddp_comm_state", {"step": 0}, "strategy.state"),
            ("ddp_comm_wrapper", print, "value_dtype='bfloat16' or 'float8'"),
            ("model_averaging_period", 4, "Lightning's DDPStrategy for post-local SGD"),
            ("sharding_strategy", "FULL_SHARD", "Use strategy='hsdp_hardthreshold', or Lightning's FSDPStrategy"),
            ("mixed_precision", "any", "Trainer(precision='bf16-mixed')"),
            ("skip_all_reduce_unused_params", True, "The hook must receive every bucket"),
        )
    ),
    *(
        (make, {"data_parallel_size": 4}, "Got data_parallel_size=4, which follows from replicas")
        for make in (HSDP, LOCAL_HSDP)
    ),
    *(
        (make, {"worker_state": "all"}, "Invalid worker_state='all'. Must be one of 'full', 'small'")
        for make in (DDP, of_top_k, LOCAL, HSDP, LOCAL_HSDP, simulated)
    ),
    *(
        (LOCAL, {name: value}, "leave it out")
        for name, value in (
            ("static_graph", True),
            ("bucket_cap_mb", 5),
            ("ddp_comm_hook", print),
            ("model_averaging_period", 3),
        )
    ),
    (LOCAL, {"overshoot": 0.5}, "Got overshoot=0.5 for drifts, which gained nothing from it in tests. Use overshoot=0"),
    (LOCAL, {"every_n_steps": 2.5}, "whole number"),
    *((make, {"timeout": 300}, "Invalid timeout=300. Must be a duration") for make in (DDP, LOCAL, HSDP, LOCAL_HSDP)),
    *((make, {"replicas": 0}, "Invalid replicas=0") for make in (HSDP, LOCAL_HSDP)),
    (HSDP, {"replicas": "all"}, 'whole number of at least 1 or "auto"'),
    (HSDP, {"tensor_parallel_size": "auto"}, "Invalid tensor_parallel_size='auto'"),
    *((make, {"value_dtype": "float8", "threshold": 0.0}, "float8") for make in (HSDP, LOCAL_HSDP)),
    (HSDP, {"exchange": "ring"}, "Invalid exchange='ring'"),
    (LOCAL_HSDP, {"every_n_steps": 0}, "Invalid every_n_steps=0"),
    (LOCAL_HSDP, {"drift_decay": 0.5}, "keep_drift=False"),
    (LOCAL, {"average_over": "all"}, "Invalid average_over='all'. Must be one of 'senders', 'workers'"),
    *(
        (SimulatedWorkersStrategy, {"sparsifier": HardThreshold(threshold=0.1), "num_workers": number}, message)
        for number, message in (
            (0, "Invalid num_workers=0. Must be a whole number of at least 1"),
            (2.0, "Invalid num_workers=2.0"),
        )
    ),
    (simulated, {"exchange": "ring"}, "Invalid exchange='ring'"),
    (simulated, {"local_clip_norm": -1.0}, "local_clip_norm"),
    *((simulated, {"own_attributes": names}, f"Invalid own_attributes={names!r}. Must") for names in ("hidden", [1])),
    (lambda value: LOCAL(value), {"value": 0.01}, "Got 0.01 without a name. Write threshold=0.01 or density=0.01."),
    *(
        (DensityMonitor, {"image_columns": size}, f"Invalid image_columns={size!r}. Must be a whole number of at least")
        for size in (0, 1, -3, "x")
    ),
    (DensityMonitor, {"per_layer": "x"}, "Invalid per_layer='x'. Must be True or False."),
    *(
        (paper_threshold, {"density": rho, "num_elements": 10}, f"Invalid density={rho!r}. Must be within (0, 1]")
        for rho in (0.0, -1.0, 1.1, nan, "a")
    ),
    (paper_threshold, {"density": 0.1, "num_elements": 2.5}, "Invalid num_elements=2.5. Must be a whole number"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_an_invalid_option_raises(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:  # compared below, as plain text
        make(**options)
    assert message in str(raised.value)


MISSPELT = [
    *(
        (DDP, misspelt, meant)
        for misspelt, meant in (
            ("find_unused_parameter", "find_unused_parameters"),
            ("treshold", "threshold"),
            ("value_dtyp", "value_dtype"),
        )
    ),
    (LOCAL, "every_n_step", "every_n_steps"),
    (LOCAL, "timeot", "timeout"),
    (simulated, "num_worker", "num_workers"),
    (simulated, "checkpointio", "checkpoint_io"),
    *(
        (make, misspelt, meant)
        for make in (HSDP, LOCAL_HSDP)
        for misspelt, meant in (("treshold", "threshold"), ("replica", "replicas"), ("time_out", "timeout"))
    ),
]


@pytest.mark.parametrize(("make", "misspelt", "meant"), MISSPELT)
def test_a_misspelt_argument_raises_with_a_suggestion(make: Any, misspelt: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"Unknown argument '{misspelt}': .* Did you mean '{meant}'"):
        make(**{misspelt: 2})


def test_an_unknown_argument_raises_without_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"Unknown argument 'xyzzy': .* takes it\.$"):
        of_top_k(xyzzy=1)


@pytest.mark.parametrize("sparsifier", [0.01, "top_k", None, TopK, HardThreshold])
@pytest.mark.parametrize("make", [SparseDDPStrategy, SparseLocalStrategy, SimulatedWorkersStrategy])
def test_other_types_than_sparsifiers_raise(make: Any, sparsifier: Any) -> None:
    with pytest.raises(TypeError, match="Expected a sparsifier such as") as raised:
        make(sparsifier)
    assert f"got {sparsifier!r}" in str(raised.value)


def test_arguments_of_a_saved_configuration_are_accepted() -> None:
    strategy = DDP(ddp_comm_hook=None, ddp_comm_state=None, model_averaging_period=None)
    assert strategy.sparsifier.density == 0.001
    for make in (HSDP, LOCAL_HSDP):
        make(data_parallel_size="auto", save_distributed_checkpoint=False)
    SparseLocalStrategy(TopK(0.1), find_unused_parameters=True)


def test_arguments_of_ddp_and_of_the_sparsifier_are_passed_on() -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 3}
    strategy = DDP(density=0.1, overshoot=0.5, process_group_backend="gloo", start_method="spawn", **options)
    assert strategy._ddp_kwargs == options
    assert strategy.sparsifier.overshoot == 0.5
    assert (strategy.process_group_backend, strategy._start_method) == ("gloo", "spawn")


def test_a_pattern_without_a_match_warns_with_similar_names() -> None:
    names = ["conv.weight", "conv.bias", "fc.weight"]
    with pytest.warns(UserWarning, match=r"layer_thresholds\['cnv.bias'\] matches no parameter .* 'conv.bias'"):
        warn_of_patterns({"cnv.bias": 0.1, "*.weight": 0.0}, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_patterns({"conv.*": 0.1, "fc.weight": 0.0}, names)


def test_a_resume_reports_only_changed_settings() -> None:
    by_layer = HardThreshold(density=0.1, granularity="layer")
    sparsifiers = (HardThreshold(density=0.1), HardThreshold(threshold=0.5), TopK(0.1), by_layer)
    settings = [{name: repr(value) for name, value in sparsifier.settings().items()} for sparsifier in sparsifiers]
    messages: list[str] = []
    with messages_of(messages):
        for current, before in ((0, 1), (2, 0), (0, 3)):
            log_other_settings(settings[current], settings[before])
    differences = [message.partition("checkpoint's: ")[2] for message in messages]
    assert differences[0].startswith("density=0.1, threshold=None instead of density=None, threshold=0.5. The new")
    assert differences[1].startswith("sparsifier='TopK', ")
    assert differences[2].startswith("granularity='model' instead of granularity='layer'. ")


FAMILIES: dict[str, tuple[type, type]] = {
    "hardthreshold": (DDP, HardThreshold),
    "accordion": (SparseDDPStrategy, Accordion),
    "dense": (SparseDDPStrategy, Dense),
    "gaussiank": (SparseDDPStrategy, GaussianK),
    "modeltopk": (SparseDDPStrategy, TopK),
    "randomk": (SparseDDPStrategy, RandomK),
    "topk": (SparseDDPStrategy, TopK),
}
OF_LIGHTNING = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy]


@pytest.mark.parametrize("name", OF_LIGHTNING)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_registers_every_ddp_name_of_lightning(family: str, name: str) -> None:
    """Check the same properties as Lightning's own ``test_ddp_kwargs_from_registry``."""
    form = name.removeprefix("ddp")
    names = f"ddp_{family}{form}", name, f"local_{family}{form}"
    own, lightnings, local = map(StrategyRegistry.get, names)
    strategy, sparsifier = FAMILIES[family]
    assert (type(own), type(own.sparsifier)) == (strategy, sparsifier)
    if sparsifier is TopK:
        assert own.sparsifier.granularity == ("model" if family == "modeltopk" else "layer")
    assert own._ddp_kwargs == lightnings._ddp_kwargs
    assert own._start_method == lightnings._start_method
    assert type(local) is (LOCAL if strategy is DDP else SparseLocalStrategy)


def test_no_other_form_is_registered() -> None:
    assert len(OF_LIGHTNING) == 12
    forms = {name.removeprefix("ddp") for name in OF_LIGHTNING}
    for start in [f"{kind}_{family}" for kind in ("ddp", "local") for family in FAMILIES]:
        assert {name.removeprefix(start) for name in StrategyRegistry if name.startswith(start)} == forms


def test_registering_again_changes_nothing() -> None:
    before = {name: dict(StrategyRegistry[name]) for name in StrategyRegistry}
    register_strategies()
    assert {name: dict(StrategyRegistry[name]) for name in StrategyRegistry} == before
