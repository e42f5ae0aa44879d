"""Exact and fast comparison and clearing of memory: both run between measurements, over all that was moved."""

from __future__ import annotations

import ctypes

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
