"""Keeps what a process has imported in pages of 2 MB: its forks share them, and the tables of their pages as well.

A fork of a process with torch and Lightning copies a table of 130,000 pages of 4 KB, and clears it when it ends: that
takes longer than most of what tests have it do.
"""

import contextlib
import ctypes
import re
import sys
from pathlib import Path

_HUGE = 2**21
_MADV_COLLAPSE = 25  # of Linux 6.1 and later; others say no


def use_huge_pages() -> None:
    """Gathers the memory of this process; where the system does not do that, all stays as it is."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if own := re.match(r"(\w+)-(\w+) rw-p \w+ 00:00 0\s*(\[heap\])?$", line):
                start, end = (int(edge, 16) for edge in own.groups()[:2])
                start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
                if start < end:
                    madvise(start, end - start, _MADV_COLLAPSE)
