"""What is done to memory between measurements: comparing, clearing, and having free pages in place."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

_BLOCK = 2 << 20
_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LIBC.memcmp.restype = ctypes.c_int


def address(view: memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def equal(a: memoryview, b: memoryview) -> bool:
    """Whether every byte of two writable views is equal. A memoryview's own comparison goes byte by byte."""
    return len(a) == len(b) and (not len(a) or _LIBC.memcmp(address(a), address(b), len(a)) == 0)


def clear(view: memoryview) -> None:
    """Zero it, so that what a run leaves out is not there from the run before."""
    if len(view):
        ctypes.memset(address(view), 0, len(view))


def warm_free_pages(folder: Path, length: int) -> None:
    """Have free pages in place, large and small: write a file without a name, and drop it.

    A virtual machine may hand its free pages back to the host within seconds; the next that needs them, a file's pages
    say, then waits for the host: a fifth of the speed was seen. It would hit contenders at random. On a machine that
    keeps its pages this changes nothing. Touching anonymous memory did less for the large pages of files.
    """
    block = bytes(_BLOCK)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(length // _BLOCK):
            file.write(block)
