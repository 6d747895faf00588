"""What the strategies refuse at construction, with the value and what is allowed; and the names they have."""

import logging
import re
import subprocess
import sys
import warnings
from math import inf, nan
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse import (
    Accordion,
    DDPHardThresholdStrategy,
    Dense,
    GaussianK,
    HardThreshold,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
    RandomK,
    SparseDDPStrategy,
    TopK,
)
from lightning_sparse.engine.averager import warn_of_patterns
from lightning_sparse.engine.engine import say_other_sparsifier
from lightning_sparse.strategies import register_strategies


def test_threshold_and_density_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both threshold=0\.1 and density=0\.01\. Give one"):
        DDPHardThresholdStrategy(threshold=0.1, density=0.01)


@pytest.mark.parametrize("threshold", [-0.5, nan, inf, -inf])
def test_a_threshold_outside_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=rf"Invalid threshold={threshold}\. Must be a finite number of at least 0"):
        DDPHardThresholdStrategy(threshold=threshold)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, nan, inf])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=rf"Invalid density={density}\. Must be within \(0, 1\]"):
        DDPHardThresholdStrategy(density=density)
    with pytest.raises(ValueError, match=rf"Invalid density={density}\. Must be within \(0, 1\]"):
        TopK(density)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_a_number_of_calibration_steps_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match=rf"Invalid calibration_steps={steps}\. Must be a whole number of at least 1"):
        DDPHardThresholdStrategy(density=0.01, calibration_steps=steps)


@pytest.mark.parametrize("threshold", [-1.0, nan])
def test_a_layer_threshold_outside_its_range_is_refused_with_its_pattern(threshold: float) -> None:
    with pytest.raises(ValueError, match=rf"Invalid layer_thresholds\['\*\.bias'\]={threshold}\. Must be a finite"):
        DDPHardThresholdStrategy(threshold=0.1, layer_thresholds={"*.weight": 0.0, "*.bias": threshold})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("error_feedback", "'gradient', 'learning_rate', 'none'"),
        ("value_dtype", "'float32', 'bfloat16', 'float16', 'float8', 'int8'"),
        ("exchange", "'auto', 'gather', 'reduce_scatter', 'dense', 'hierarchical'"),
    ],
)
@pytest.mark.parametrize("word", ["sideways", "", None])
def test_an_unknown_word_is_refused_with_those_that_are_known(name: str, allowed: str, word: Any) -> None:
    message = re.escape(f"Invalid {name}={word!r}. Must be one of {allowed}.")
    with pytest.raises(ValueError, match=message):
        DDPHardThresholdStrategy(threshold=0.1, **{name: word})
    with pytest.raises(ValueError, match=message):
        SparseDDPStrategy(TopK(0.1), **{name: word})


@pytest.mark.parametrize("link", [0, -1.0, float("nan"), float("inf"), "10", True, [10], 1e-320])
@pytest.mark.parametrize("strategy", [DDPHardThresholdStrategy, LocalHardThresholdStrategy])
def test_a_link_that_is_no_rate_is_refused(strategy: Any, link: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid link_gbit_s=.*Must be a worker's link in Gbit/s"):
        strategy(threshold=0.1, link_gbit_s=link)


@pytest.mark.parametrize("norm", [0.0, -1.0, nan, inf])
def test_a_local_clip_norm_outside_its_range_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match=rf"Invalid local_clip_norm={norm}\. Must be a finite number above 0, or None"):
        DDPHardThresholdStrategy(threshold=0.1, local_clip_norm=norm)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("ddp_comm_hook", print, "value_dtype='bfloat16'"),
        ("ddp_comm_state", {"step": 0}, "strategy.state"),
        ("ddp_comm_wrapper", print, "value_dtype='bfloat16' or 'float8'"),
        ("model_averaging_period", 4, "Lightning's DDPStrategy for post-local SGD"),
        ("sharding_strategy", "FULL_SHARD", "Use strategy='hsdp_hardthreshold', or Lightning's FSDPStrategy"),
        ("mixed_precision", "any", "Trainer(precision='bf16-mixed')"),
        ("skip_all_reduce_unused_params", True, "The hook must see every bucket"),
    ],
)
def test_what_a_sparse_exchange_cannot_honour_is_refused_with_what_to_use(name: str, value: Any, instead: str) -> None:
    for make in (lambda **kwargs: SparseDDPStrategy(TopK(), **kwargs), DDPHardThresholdStrategy):
        with pytest.raises(ValueError, match=f"Got {name}=.*{re.escape(instead)}"):
            make(**{name: value})


def test_a_refused_argument_may_be_given_as_none_as_a_saved_config_does() -> None:
    strategy = DDPHardThresholdStrategy(ddp_comm_hook=None, ddp_comm_state=None, model_averaging_period=None)
    assert strategy.sparsifier.density == 0.001


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("find_unused_parameter", "find_unused_parameters"),
        ("bucket_cap", "bucket_cap_mb"),
        ("static", "static_graph"),
        ("treshold", "threshold"),
        ("densty", "density"),
        ("value_dtyp", "value_dtype"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant(misspelt: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"Unknown argument '{misspelt}': .* Did you mean '{meant}'"):
        DDPHardThresholdStrategy(**{misspelt: True})
    with pytest.raises(TypeError, match=r"Unknown argument 'every_n_step': .* Did you mean 'every_n_steps'"):
        LocalHardThresholdStrategy(every_n_step=8)


@pytest.mark.parametrize("make", [HSDPHardThresholdStrategy, LocalHSDPHardThresholdStrategy])
def test_an_argument_of_replicas_that_cannot_be_is_refused_with_what_was_meant(make: Any) -> None:
    for misspelt, meant in (("treshold", "threshold"), ("replica", "replicas"), ("time_out", "timeout")):
        with pytest.raises(TypeError, match=f"Unknown argument '{misspelt}': .* Did you mean '{meant}'"):
            make(**{misspelt: 2})
    with pytest.raises(ValueError, match=r"Got data_parallel_size=4\. .* replicas=…"):
        make(data_parallel_size=4)
    make(data_parallel_size="auto", save_distributed_checkpoint=False)  # as a saved configuration has it


@pytest.mark.parametrize(
    ("sparsifier", "control", "holds"),
    [
        (HardThreshold(density=0.1), None, True),
        (HardThreshold(density=0.1), "hold", True),
        (HardThreshold(density=0.1), "calibrate", False),
        (HardThreshold(density=1), "hold", True),
        (HardThreshold(threshold=0.1), "calibrate", False),  # as configurations that were saved have it
        (TopK(0.1), "calibrate", False),
    ],
)
def test_a_density_is_held_unless_it_is_to_be_calibrated_once(sparsifier: Any, control: Any, holds: bool) -> None:
    assert SparseDDPStrategy(sparsifier, density_control=control)._options.holds_density == holds


def test_a_pattern_that_matches_no_layer_is_told_of_with_names_like_it() -> None:
    names = ["conv.weight", "conv.bias", "fc.weight"]
    with pytest.warns(UserWarning, match=r"layer_thresholds\['cnv.bias'\] matches no parameter .* 'conv.bias'"):
        warn_of_patterns({"cnv.bias": 0.1, "*.weight": 0.0}, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_patterns({"conv.*": 0.1, "fc.weight": 0.0}, names)


def test_of_other_settings_at_a_resume_only_what_differs_is_told(caplog: Any, monkeypatch: Any) -> None:
    # Lightning keeps its words to itself where nobody listened when it was imported.
    for name in ("lightning.fabric", "lightning.pytorch"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    settings = [
        {name: repr(value) for name, value in one.settings().items()}
        for one in (
            HardThreshold(density=0.1),
            HardThreshold(threshold=0.5),
            TopK(0.1),
            HardThreshold(density=0.1, granularity="layer"),
        )
    ]
    told = []
    for now, before in ((0, 1), (2, 0), (0, 3)):
        with caplog.at_level("INFO"):
            say_other_sparsifier(settings[now], settings[before])
        told.append(caplog.messages[-1].partition("checkpoint: ")[2])
    assert told[0].startswith(
        "density=0.1, threshold=None instead of density=None, threshold=0.5. That of now is used;"
    )
    assert told[1].startswith("sparsifier='TopK', ")
    assert told[2].startswith("granularity=(default) instead of granularity='layer'. ")


def test_an_argument_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(TypeError, match=r"Unknown argument 'xyzzy': .* takes it\.$"):
        SparseDDPStrategy(TopK(), xyzzy=1)


def test_arguments_of_ddp_are_passed_on() -> None:
    strategy = DDPHardThresholdStrategy(
        threshold=0.1, find_unused_parameters=True, bucket_cap_mb=3, process_group_backend="gloo", start_method="spawn"
    )
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 3}
    assert (strategy.process_group_backend, strategy._start_method) == ("gloo", "spawn")


@pytest.mark.parametrize("strategy", [DDPHardThresholdStrategy, HSDPHardThresholdStrategy])
def test_layers_cannot_be_held_to_a_density_by_one_constant_threshold(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"'calibrate' with granularity='layer'\. .* leave density_control out"):
        strategy(density=0.01, granularity="layer", density_control="calibrate")


@pytest.mark.parametrize(
    ("sparsifier", "what"),
    [(TopK(), "TopK"), (RandomK(), "RandomK"), (HardThreshold(threshold=0.1), "a constant threshold")],
)
def test_a_density_that_cannot_be_held_is_refused(sparsifier: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"density_control='hold' with {what}. .* give density=…"):
        SparseDDPStrategy(sparsifier, density_control="hold")


@pytest.mark.parametrize("sparsifier", [0.01, "top_k", None, TopK, HardThreshold])
def test_what_is_no_sparsifier_is_refused(sparsifier: Any) -> None:
    with pytest.raises(TypeError, match=f"Expected a sparsifier such as .*, got {re.escape(repr(sparsifier))}"):
        SparseDDPStrategy(sparsifier)


FAMILIES = (
    "ddp_accordion",
    "ddp_dense",
    "ddp_gaussiank",
    "ddp_hardthreshold",
    "ddp_modeltopk",
    "ddp_randomk",
    "ddp_topk",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("suffix", "start_method"), [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
)
@pytest.mark.parametrize(
    ("ending", "find_unused"),
    [("", None), ("_find_unused_parameters_true", True), ("_find_unused_parameters_false", False)],
)
def test_every_name_that_lightning_has_for_ddp_exists(
    family: str, suffix: str, start_method: str, ending: str, find_unused: bool | None
) -> None:
    assert f"ddp{suffix}{ending}" in StrategyRegistry
    strategy = StrategyRegistry.get(f"{family}{suffix}{ending}")
    expected_class, expected_sparsifier = {
        "ddp_accordion": (SparseDDPStrategy, Accordion),
        "ddp_dense": (SparseDDPStrategy, Dense),
        "ddp_gaussiank": (SparseDDPStrategy, GaussianK),
        "ddp_hardthreshold": (DDPHardThresholdStrategy, HardThreshold),
        "ddp_modeltopk": (SparseDDPStrategy, TopK),
        "ddp_randomk": (SparseDDPStrategy, RandomK),
        "ddp_topk": (SparseDDPStrategy, TopK),
    }[family]
    assert type(strategy) is expected_class
    assert type(strategy.sparsifier) is expected_sparsifier
    if isinstance(strategy.sparsifier, TopK):
        assert strategy.sparsifier.granularity == ("model" if family == "ddp_modeltopk" else "layer")
    assert strategy._start_method == start_method
    assert strategy._ddp_kwargs.get("find_unused_parameters") is find_unused


def test_no_other_form_is_registered() -> None:
    for family in FAMILIES:
        forms = {name.removeprefix(family) for name in StrategyRegistry if name.startswith(family)}
        stock = {
            name.removeprefix("ddp") for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy
        }
        assert len(forms) == 12
        assert forms == stock


def test_registering_again_changes_nothing() -> None:
    before = {name: dict(StrategyRegistry[name]) for name in StrategyRegistry}
    register_strategies()
    DDPHardThresholdStrategy.register_strategies(StrategyRegistry)
    assert {name: dict(StrategyRegistry[name]) for name in StrategyRegistry} == before


@pytest.mark.parametrize(
    "name", ["ddp_hardthreshold", "DDP_HardThreshold", "DDP_HARDTHRESHOLD_FIND_UNUSED_PARAMETERS_TRUE"]
)
def test_the_trainer_takes_the_name_in_any_case(name: str) -> None:
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is DDPHardThresholdStrategy
    assert trainer.strategy._ddp_kwargs.get("find_unused_parameters", False) == name.endswith("TRUE")


def test_the_name_is_unknown_until_the_package_is_imported() -> None:
    script = (
        "from lightning.pytorch.strategies import StrategyRegistry as registry\n"
        "assert 'ddp_hardthreshold' not in registry\n"
        "import lightning_sparse\n"
        "assert 'ddp_hardthreshold' in registry\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("family", ["ddp_hardthreshold", "ddp_topk"])
@pytest.mark.parametrize("form", ["", "_spawn", "_fork", "_notebook"])
@pytest.mark.parametrize("ending", ["", "_find_unused_parameters_true", "_find_unused_parameters_false"])
def test_a_name_hands_ddp_the_arguments_that_lightnings_own_does(family: str, form: str, ending: str) -> None:
    """What Lightning's own ``test_ddp_kwargs_from_registry`` asks of its names."""
    own, lightnings = (
        Trainer(strategy=name + form + ending, accelerator="cpu", logger=False).strategy for name in (family, "ddp")
    )
    assert own._ddp_kwargs == lightnings._ddp_kwargs
    assert own._start_method == lightnings._start_method
