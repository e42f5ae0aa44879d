"""A finished file gets its name: whole, and only where nobody has it yet."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
# EINVAL: the file system has no such rename. ENOSYS: the kernel has not.
_UNKNOWN = {errno.EINVAL, errno.ENOSYS}

# One call where link and unlink are two: each of them makes a thread wait for the interpreter. Missing in other libcs.
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
if _renameat2 is not None:
    _renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    _renameat2.restype = ctypes.c_int


def name_file(partial: str, path: str) -> bool:
    """Move the file ``partial`` to ``path``; False, and the file is deleted, where ``path`` is taken. Raises OSError.

    Both are in one file system. Nothing is ever overwritten, and nobody sees ``path`` before it is whole.
    """
    number = _rename(partial, path)
    if number in _UNKNOWN:
        number = _link(partial, path)
    if number == errno.EEXIST:
        _delete(partial)
        return False
    if number:
        raise OSError(number, os.strerror(number), partial, None, path)
    return True


def _rename(partial: str, path: str) -> int:
    """0, or the error's number."""
    if _renameat2 is None:
        return errno.ENOSYS
    if _renameat2(_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
        return 0
    return ctypes.get_errno()


def _link(partial: str, path: str) -> int:
    try:
        os.link(partial, path)
    except OSError as error:
        return error.errno or errno.EIO
    _delete(partial)
    return 0


def _delete(partial: str) -> None:
    # Whether it could be deleted is no matter of the object: what is left behind is swept at the next start.
    with contextlib.suppress(OSError):
        os.unlink(partial)
