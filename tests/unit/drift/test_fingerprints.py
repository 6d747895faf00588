"""Fingerprints detect tensors that differ between workers."""

import pytest
import torch

from lightning_sparse.drift import fingerprints as module
from lightning_sparse.drift.fingerprints import fingerprints

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool)


def values(dtype, size):
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 50
    return numbers > 0 if dtype == torch.bool else numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000])
@pytest.mark.parametrize("is_small", [True, False])
def test_a_fingerprint_changes_with_any_element(dtype, size, is_small, monkeypatch):
    original = values(dtype, size)
    together = fingerprints([original]).tolist()
    if not is_small:
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    [expected, number] = fingerprints([original]).tolist()
    assert [expected, number] == together
    assert number == size
    assert fingerprints([original.clone()]).tolist() == [expected, number]
    seen = {expected}
    for place in range(size):
        other = original.clone()
        other[place] = ~other[place] if dtype == torch.bool else other[place] * -1 + 1
        seen.add(fingerprints([other])[0].item())
    assert len(seen) == size + 1


def test_fingerprints_ignore_blocks_offsets_and_strides(monkeypatch):
    whole = values(torch.float32, 1001)
    expected = fingerprints([whole[1:].clone()])
    assert torch.equal(fingerprints([whole[1:]]), expected)
    assert torch.equal(fingerprints([torch.stack([whole[1:]] * 2, 1)[:, 0]]), expected)
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    assert torch.equal(fingerprints([whole[1:]]), expected)
    monkeypatch.setattr(module, "WORDS_PER_PASS", 17)
    assert torch.equal(fingerprints([whole[1:]]), expected)


def test_many_tensors_together_have_the_fingerprint_of_each():
    tensors = [values(torch.float32, 64 + place % 3) for place in range(100)] + [values(torch.bfloat16, 100_000)]
    assert fingerprints(tensors)[::2].tolist() == [float(fingerprints([tensor])[0]) for tensor in tensors]
