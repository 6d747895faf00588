"""Signature, docstring and command line list every option of a strategy with default and description."""

import inspect
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

import lightning_sparse
from lightning_sparse.strategies.arguments import _entries

THRESHOLD: dict[str, Any] = {
    "threshold": None,
    "density": None,
    "layer_thresholds": None,
    "granularity": "model",
    "overshoot": 0.0,
}
EXCHANGE: dict[str, Any] = {"value_dtype": "float32", "exchange": "auto", "link_gbit_s": None, "worker_state": "full"}
OF_DDP: dict[str, Any] = {"local_clip_norm": None, "gradient_as_bucket_view": None}
DRIFTS: dict[str, Any] = {
    "every_n_steps": 1,
    "keep_drift": True,
    "drift_decay": 1.0,
    "average_over": "senders",
    "outer_optimizer": None,
} | EXCHANGE
REPLICAS: dict[str, Any] = {"replicas": "auto", "tensor_parallel_size": 1}
SPARSIFIER: dict[str, Any] = {"sparsifier": inspect.Parameter.empty}
OPTIONS: dict[str, dict[str, Any]] = {
    "DDPHardThresholdStrategy": THRESHOLD | OF_DDP | EXCHANGE,
    "SparseDDPStrategy": SPARSIFIER | OF_DDP | EXCHANGE,
    "LocalHardThresholdStrategy": THRESHOLD | DRIFTS,
    "SparseLocalStrategy": SPARSIFIER | DRIFTS,
    "HSDPHardThresholdStrategy": THRESHOLD | REPLICAS | EXCHANGE,
    "SparseHSDPStrategy": SPARSIFIER | REPLICAS | EXCHANGE,
    "LocalHSDPHardThresholdStrategy": THRESHOLD | REPLICAS | DRIFTS,
    "SparseLocalHSDPStrategy": SPARSIFIER | REPLICAS | DRIFTS,
}
OF_LIGHTNING = {"DDP": "bucket_cap_mb", "LocalHard": "process_group_backend", "HSDP": "save_distributed_checkpoint"}


@pytest.mark.parametrize("name", OPTIONS)
def test_signature_and_docstring_have_every_option(name: str) -> None:
    strategy = getattr(lightning_sparse, name)
    parameters = inspect.signature(strategy).parameters
    assert {option: parameter.default for option, parameter in parameters.items()} == OPTIONS[name] | {
        "kwargs": inspect.Parameter.empty
    }
    entries = _entries(strategy.__doc__)
    assert list(entries) == [*list(parameters)[:-1], "**kwargs"]
    assert all(len(text) > 40 for text in entries.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_line_has_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    with pytest.raises(SystemExit):
        parser.parse_args(["--strategy.help", f"lightning_sparse.{name}"])
    help_text = " ".join(capsys.readouterr().out.partition("Help for")[2].split())
    for option, default in OPTIONS[name].items():
        _, found, text = help_text.partition(f"--strategy.{option} ")
        assert found, option
        shown = text.partition(" --strategy.")[0]
        if option not in ("sparsifier", "outer_optimizer"):
            assert f"default: {'null' if default is None else default})" in shown, (option, shown)
        assert len(shown) > 60, (option, shown)
    for prefix, argument in OF_LIGHTNING.items():
        assert f"--strategy.{argument} " in help_text or not name.startswith(prefix)
