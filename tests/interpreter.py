"""Triton's interpreter runs kernels on a CPU; ``tests/unit/kernels/test_interpreter.py`` starts it."""

import dataclasses
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    def _convert_exactly(data, source, target, rounding_mode):
        """Round to nearest as devices do; the interpreter itself truncates bfloat16 and drops subnormal numbers."""
        assert {source, target} == {tl.float32, tl.bfloat16}
        if target == tl.bfloat16:
            return torch.tensor(data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        return torch.tensor(data.view("int16")).view(torch.bfloat16).float().numpy().view("uint32")

    def _patch_scalars(tensor, *scope, patch=interpreter._patch_lang_tensor):
        """Let a kernel's number end a ``range``: in Triton 3.4 it is an array of size 1, which NumPy 2.4 rejects."""
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    def _patch_once(function, patch=interpreter._patch_lang, languages={}):  # noqa: B006  (a cache)
        """Patch each function only once, which is five times as fast."""
        if function not in languages:
            names = list(function.__globals__.values())
            languages[function] = [language for language in (tl, tl.core) if any(name is language for name in names)]
        unpatched = any(tl.core.is_builtin(language.load) for language in languages[function])
        return patch(function) if unpatched else None

    # Checks for integer overflow take most of the time, and report nothing without ``debug``.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._convert_float = _convert_exactly
    interpreter._patch_lang_tensor = _patch_scalars
    interpreter._patch_lang = _patch_once
