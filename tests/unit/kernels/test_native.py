"""The compiled functions for CPUs against the tensor operations that replace them without a compiler."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse import HardThreshold
from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.exchange.routes import adding
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.kernels import building, native
from lightning_sparse.selection import extraction
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.selection.statistics import SLOTS
from lightning_sparse.sparsifiers.protocol import LayerLayout
from tests.integration.models import assert_equal
from tests.unit.buckets import EDGE_THRESHOLDS, Transfer, edge_values, payloads_of, selections

NAN, INF = float("nan"), float("inf")
WIRES = (*map(Wire, (torch.float32, torch.bfloat16)), Wire(torch.float8_e4m3fn, 2.0**-6))
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler here; other tests cover the tensor operations"
)


def outcome(has_native, monkeypatch, layout, residual, gradient, options):
    """Return the sent values, the residual, the header and the gradient's memory of a bucket."""
    monkeypatch.setattr(extraction, "is_native", native.is_native if has_native else lambda *_, **__: False)
    wire, capacity, scale, unused, thresholds, in_place, per_layer, overshoot = options
    sparsifier = HardThreshold(threshold=0.5, layer_thresholds=thresholds, overshoot=overshoot)
    gradient, before = gradient.clone(), residual.clone()
    after = before if in_place else torch.full_like(before, NAN)
    out = None if in_place else torch.full_like(residual, NAN)
    transfer = Transfer(wire, capacity, gradient if out is None else out)
    loss_scale = None if scale is None else torch.tensor([scale])
    memory = Residual(before, after)
    bucket = FlatBucket(0, layout, gradient, memory, is_last=True, left_out=unused, loss_scale=loss_scale)
    filling = extraction.Extraction(sparsifier, num_slices=3, per_layer=per_layer)
    header = filling.fill(bucket, transfer, measures_gradient=True)
    return (
        transfer.sent(int(header[0])),
        after,
        header,
        transfer.out if transfer.is_cleared else torch.zeros_like(residual),
    )


VALUES = st.sampled_from(
    [NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 1e5, 65_519.0, -65_521.0, 3.39e38, 3.4e38, -1e-40, 0.50390625, 0.70024414]
)


@settings(max_examples=150)
@given(data=st.data())
def test_native_functions_equal_tensor_operations(data):
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 7, 63, 64, 65, 300, 4096, 70_000]), min_size=1, max_size=4))
    layout = LayerLayout(tuple(f"l{place}" for place in range(len(sizes))), tuple(sizes))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scale = data.draw(st.sampled_from([0.2, 0.2, 1e-18, 1e-24, 1e25]))
    residual, gradient = (torch.randn(layout.num_elements, generator=generator) * scale for _ in range(2))
    for place in range(min(layout.num_elements, data.draw(st.integers(0, 12)))):
        residual[place * 97 % layout.num_elements] = data.draw(VALUES)
    unused = [(start, end) for _, start, end in layout.spans() if start < end and data.draw(st.booleans())]
    for start, end in unused:
        residual[start:end] = residual[start:end].nan_to_num(0.0, 0.0, 0.0)
        gradient[start:end] = 0.0
    gradient = gradient.to(data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])))
    options = (
        data.draw(st.sampled_from(WIRES)),
        data.draw(st.sampled_from([None, 0, 4, 400, 80_000])),
        data.draw(st.sampled_from([None, 3.0, 1024.0])),
        unused,
        data.draw(st.sampled_from([None, {"l1": 0.1}, {"l0": 0.25, "l2": 1e30}, {"l1": 0.0}])),
        gradient.dtype == torch.float32 and data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([0.0, 0.0, 0.3, 0.75])),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent, after, header, left = outcome(True, monkeypatch, layout, residual, gradient, options)
        expected = outcome(False, monkeypatch, layout, residual, gradient, options)
    assert_equal((sent, left), (expected[0], expected[3]))
    overflown = options[1] is not None and header[0] > options[1]
    assert_equal((after,), (expected[1],))
    exact = [0, 2] if overflown else [0, 1, 2]  # an exchange that starts anew does not read slices
    assert_equal((header[exact],), (expected[2][exact],))
    torch.testing.assert_close(header[3:], expected[2][3:], rtol=1e-4, atol=1e-70, equal_nan=True)


@pytest.mark.parametrize("overshoot", [0.0, 0.6])
@pytest.mark.parametrize("threshold", EDGE_THRESHOLDS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("capacity", [None, 400])
def test_native_functions_keep_the_bits_of_edge_values(capacity, wire, threshold, overshoot, monkeypatch):
    p = edge_values()
    assert native.is_native(p, wire_dtype=wire.dtype)
    monkeypatch.setattr(Transfer, "divisor", 1)
    nothing = torch.full_like(p, -0.0)  # p + -0.0 is p even if p is -0.0
    options = wire, capacity, None, [], {"p": threshold}, False, False, overshoot
    arguments = monkeypatch, LayerLayout(("p",), (p.numel(),)), p, nothing, options
    (sent, kept, header, _), expected = (outcome(has_native, *arguments) for has_native in (True, False))
    assert_equal((sent, kept, header[:3]), (*expected[:2], expected[2][:3]))
    for found, wanted in zip((sent, kept), expected, strict=False):
        assert torch.equal(found.nan_to_num().signbit(), wanted.nan_to_num().signbit())  # distinguishes -0.0 from 0.0
    numbers = [int((p.abs() < threshold).logical_not().sum()), int(p.isfinite().logical_not().sum())]
    assert [int(header[SLOTS[name]]) for name in ("selected", "non_finite")] == numbers


@pytest.mark.parametrize(
    ("wire", "thresholds", "capacity", "unused", "stays"),
    [
        (WIRES[0], {}, None, [], True),
        (WIRES[0], {"a": 0.5}, None, [], False),
        (WIRES[0], {}, 400, [], False),
        (WIRES[0], {}, None, [(0, 70)], False),
        (WIRES[1], {}, None, [], False),
    ],
)
def test_a_residual_of_zeros_is_not_touched_if_everything_is_sent(wire, thresholds, capacity, unused, stays):
    layout = LayerLayout(("a", "b"), (70, edge_values().numel()))
    gradient = torch.cat([torch.linspace(-1, 1, 70), edge_values()])
    found = []
    for is_zero in (True, False):
        residual = Residual(*torch.zeros(2, layout.num_elements).unbind(), is_zero)
        transfer = Transfer(wire, capacity, torch.empty_like(gradient))
        bucket = FlatBucket(0, layout, gradient.clone(), residual, is_last=True, left_out=unused)
        sparsifier = HardThreshold(threshold=0.0, layer_thresholds=thresholds, overshoot=0.5)
        header = extraction.Extraction(sparsifier, num_slices=0, per_layer=True).fill(bucket, transfer)
        found.append((transfer.sent(int(header[0])), residual.before, residual.after, header))
        assert (residual.after._version == 0) == (stays and is_zero)
    assert_equal(*found)


@pytest.mark.parametrize("wire", [*WIRES, Wire(torch.int8, 2.0**-4)])
@pytest.mark.parametrize(("capacity", "by_senders"), [(8, False), (2000, False), (2000, True)])
def test_native_functions_add_payloads_to_the_same_bits(wire, capacity, by_senders, monkeypatch):
    size = 140_000
    payload_format = PayloadFormat(size, wire, header_fields=3)
    rows = payloads_of(payload_format, selections(size, [1000, 1000, 1000, 0, 1000], wire=wire), capacity)
    by_function, by_operations = torch.zeros(2, size)
    assert native.is_native(by_function, wire_dtype=wire.dtype)
    adding.average(payload_format, rows, by_function, Buffers(), by_senders=by_senders)
    monkeypatch.setattr(adding, "is_native", lambda *_, **__: False)
    adding.average(payload_format, rows, by_operations, Buffers(), by_senders=by_senders)
    assert_equal((by_function,), (by_operations,))
    assert by_function.count_nonzero()


PARTS = st.lists(st.sampled_from([1, 3, 64, 65, 4096, 65_600]), min_size=1, max_size=5)


@settings(max_examples=100)
@given(sizes=PARTS, data=st.data())
def test_native_functions_take_values_out_of_weights(sizes, data):
    """Compare with tensor operations on the drift. Weights change only where they are sent."""
    layout = LayerLayout(tuple(f"l{place}" for place in range(len(sizes))), tuple(sizes))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    anchor, weights = (torch.randn(layout.num_elements, generator=generator) * 0.2 for _ in range(2))
    for place in range(data.draw(st.integers(0, 12))):
        weights[place * 97 % layout.num_elements] = data.draw(VALUES)
    wire, capacity = data.draw(st.sampled_from(WIRES)), data.draw(st.sampled_from([None, 0, 4, 400, 80_000]))
    thresholds, per_layer = data.draw(st.sampled_from([None, {"l1": 0.1}, {"l0": 0.0}])), data.draw(st.booleans())
    sparsifier = HardThreshold(threshold=0.5, layer_thresholds=thresholds)
    filling = extraction.Extraction(sparsifier, num_slices=3, per_layer=per_layer)

    def filled(bucket):
        transfer = Transfer(wire, capacity, torch.full_like(anchor, NAN))
        header = filling.fill(bucket, transfer, measures_gradient=True)
        return transfer.sent(int(header[0])), header

    drift, kept = anchor - weights, torch.empty_like(anchor)
    plain = FlatBucket(0, layout, drift.clone(), Residual(torch.zeros_like(drift), kept), is_last=True)
    expected, header_of_plain = filled(plain)
    parts = [part.clone() for part in weights.split(sizes)]
    moved = FlatBucket(0, layout, torch.empty_like(anchor), Residual(anchor.clone(), anchor), is_last=True)
    moved.weights, moved.notes, moved.compensated = native.Parts(parts), torch.zeros(1), drift.clone
    sent, header = filled(moved)
    weights = torch.where(sparsifier.mark(drift, layout), anchor - kept, weights)
    assert_equal((sent, torch.cat(parts)), (expected, weights))
    exact = [0, 2] if capacity is not None and header[0] > capacity else [0, 1, 2]
    assert_equal((header[exact],), (header_of_plain[exact],))
    torch.testing.assert_close(header[3:], header_of_plain[3:], rtol=1e-4, atol=1e-70, equal_nan=True)
    torch.testing.assert_close(moved.notes[0], drift.abs().max(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by_senders", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_native_functions_move_weights_by_an_average(wire, by_senders):
    sizes, generator = (70_000, 1, 65, 100_000), torch.Generator().manual_seed(0)
    payload_format, weights = PayloadFormat(sum(sizes), wire), torch.randn(sum(sizes), generator=generator)
    rows = payloads_of(payload_format, selections(sum(sizes), [2900, 2000, 0], wire=wire), 3000)
    average, anchor, parts = torch.zeros(sum(sizes)), weights + 1, [part.clone() for part in weights.split(sizes)]
    adding.average(payload_format, rows, average, Buffers(), by_senders=by_senders)
    short = [payload_format.shortened(row) for row in rows.clone()]
    assert len({row.numel() for row in short}) > 1
    of_short = torch.zeros_like(average)
    adding.average(payload_format, short, of_short, Buffers(), by_senders=by_senders)
    assert_equal((of_short,), (average,))
    versions = [part._version for part in parts]
    payloads = adding.native_payloads(payload_format, short, by_senders)
    native.subtract(payloads, anchor, native.Parts(parts), torch.zeros(BLOCK_ELEMENTS))
    assert_equal((anchor, torch.cat(parts)), (weights + 1 - average, weights - average))
    assert all(part._version > version for part, version in zip(parts, versions, strict=True))
    assert average.count_nonzero() > 3000


def test_other_dtypes_use_tensor_operations():
    some = torch.zeros(4)
    assert native.is_native(some, wire_dtype=torch.float32)
    assert not native.is_native(some, wire_dtype=torch.float64)
    assert not native.is_native(some.double(), wire_dtype=torch.float32)


def compile_once(command, *, run=subprocess.run, made={}, **options):  # noqa: B006  (a memory)
    """Run a compiler, or reuse the output of an equal command in this process."""
    if "-o" not in command:
        return run(command, **options)
    place = command.index("-o") + 1
    output, key = Path(command[place]), (*command[:place], *command[place + 1 :])
    if key in made:
        output.write_bytes(made[key])
        output.chmod(0o755)
        return None
    done = run(command, **options)
    made[key] = output.read_bytes()
    return done


@pytest.fixture
def again(monkeypatch, tmp_path):
    """Load the functions anew with these environment variables and an empty cache."""
    monkeypatch.setattr(subprocess, "run", compile_once)

    def ask(**environment):
        for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
            monkeypatch.setenv(name, value)
        native._library.cache_clear()
        native._passes_self_test.cache_clear()
        return native.is_native(torch.zeros(4), wire_dtype=torch.float32)

    yield ask
    native._library.cache_clear()
    native._passes_self_test.cache_clear()


def compiler(folder, script):
    """Return a compiler that runs a shell script; ``$made`` is its output path."""
    path = folder / "compiler with spaces"
    path.write_text(f'#!/bin/sh\nfor argument; do [ "$last" = -o ] && made=$argument; last=$argument; done\n{script}\n')
    path.chmod(0o755)
    return f"'{path}'"


@pytest.mark.parametrize(
    ("environment", "is_there", "warning"),
    [
        ({}, True, None),
        ({"CC": "cc -Ofast -ffast-math"}, True, None),
        ({"LIGHTNING_SPARSE_NATIVE": "0"}, False, None),
        ({"CC": "no-such-compiler"}, False, None),
        ({"CC": ""}, False, None),
        ({"CC": "false"}, False, "the C compiler 'false' fails.* exit status 1"),
        ({"CC": "gcc -DX='a"}, False, "No closing quotation"),
    ],
)
def test_tensor_operations_replace_a_missing_compiler(environment, is_there, warning, again, tmp_path):
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        assert again(**environment) == is_there
    assert len(list(tmp_path.rglob("*.so"))) == is_there
    assert not list(tmp_path.rglob("building-*"))


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        ("echo nothing > $made", "file too short|invalid ELF"),
        ("echo no room >&2; exit 3", "Its output: no room"),
        ("sleep 30", "timed out"),
        ('cc "$@" -ffast-math', "IEEE"),
    ],
)
def test_a_broken_library_is_neither_used_nor_kept(script, warning, again, tmp_path, monkeypatch):
    if script == "sleep 30":
        monkeypatch.setattr(building, "TIMEOUT", 0.3)
    with pytest.warns(UserWarning, match=warning):
        assert not again(CC=compiler(tmp_path, script))
    if "IEEE" not in warning:
        assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("size", "of_file", "of_folder"),
    [(0, 0o700, 0o700), (3000, 0o700, 0o700), (-1, 0o700, 0o700), (None, 0o700, 0o777), (None, 0o722, 0o700)],
)
def test_a_truncated_or_writable_library_is_rebuilt(size, of_file, of_folder, again, tmp_path):
    assert again()
    folder = tmp_path / "lightning_sparse"
    (kept,) = folder.glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # this process has loaded it
    kept.write_bytes(whole[:size] if size is not None or of_file & 0o022 else b"of somebody else")
    kept.chmod(of_file)
    folder.chmod(of_folder)
    assert again()
    assert kept.stat().st_size == len(whole)
    assert [path.stat().st_mode & 0o777 for path in (folder, kept)] == [0o700, 0o700]


@pytest.mark.parametrize("obstacle", ["no folder", "no file", "no room"])
def test_every_process_builds_its_own_library_without_a_cache(obstacle, again, tmp_path, monkeypatch):
    run = subprocess.run

    def full(command, **options):
        if str(tmp_path) in str(command):
            raise subprocess.CalledProcessError(1, command, stderr="No space left on device")
        return run(command, **options)

    if obstacle == "no folder":
        (tmp_path / "lightning_sparse").write_text("a file where the folder should be")
    elif obstacle == "no room":
        monkeypatch.setattr(building.subprocess, "run", full)
    else:
        assert again()
        (kept,) = tmp_path.rglob("*.so")
        kept.unlink()
        kept.mkdir()
    assert again()
    assert not any(path.is_file() for path in tmp_path.rglob("*.so"))


def test_a_big_endian_processor_uses_tensor_operations(monkeypatch, again):
    """The functions locate half of a word by its place in memory."""
    monkeypatch.setattr(sys, "byteorder", "big")
    assert not again()


def test_autograd_sees_native_writes():
    after, gradient, other = torch.zeros(64), torch.ones(64), torch.zeros(64)
    memory = Residual(torch.zeros(64), after)
    filling = extraction.Extraction(HardThreshold(threshold=0.5), num_slices=0, per_layer=False)
    bucket = FlatBucket(0, LayerLayout(("l0",), (64,)), gradient, memory, is_last=True)
    for capacity, out in [(64, other), (64, gradient), (None, other)]:
        versions = after._version, gradient._version, out._version
        transfer = Transfer(WIRES[0], capacity, out)
        assert filling.fill(bucket, transfer)[0] == 64
        assert after._version > versions[0]
        assert (gradient._version > versions[1]) == transfer.is_cleared
        assert capacity is not None or out._version > versions[2]
        gradient.fill_(1.0)


def test_the_source_compiles_without_a_warning(tmp_path):
    strict = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-std=gnu11", "-shared", "-fPIC"]
    subprocess.run([*strict, "-o", tmp_path / "native.so", native.SOURCE], check=True, stderr=sys.stderr)
