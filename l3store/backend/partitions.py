"""The folders of objects: `objects/{hh}/{key}`, one for each first byte of a page hash.

Their number is fixed: processes can own some of them each, and how many do can change without a file moved. Before,
there were two levels, `objects/{hh}/{hh}/{key}`; what is found there moves up.
"""

from __future__ import annotations

import contextlib
import os
import re

from l3store.backend.naming import name_file
from l3store.layout import InvalidKeyError, parse_key

PARTIAL = ".partial"
"""How the names of files end that are being written."""

PARTITIONS = tuple(f"{byte:02x}" for byte in range(256))

_HASH_DIGITS = 64
_OLD_FOLDER = re.compile(r"[0-9a-f]{2}")


def make_partitions(objects: str) -> None:
    """Make the folders that are not there. Raises OSError."""
    for name in PARTITIONS:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{objects}/{name}")


def object_names(objects: str, partition: str) -> list[str]:
    """The names in one partition, sorted; strangers' files may be among them. Sweeps leftovers. Raises OSError."""
    folder = f"{objects}/{partition}"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # No object has so short a name, and a glance at the lengths is cheap. The rest is looked at by who takes it in.
    if min(map(len, names), default=_HASH_DIGITS) < _HASH_DIGITS:
        others = [name for name in names if len(name) < _HASH_DIGITS]
        names = [name for name in names if len(name) >= _HASH_DIGITS]
        for name in others:
            if name.endswith(PARTIAL):
                os.unlink(f"{folder}/{name}")
            elif _OLD_FOLDER.fullmatch(name):
                names += _moved_up(folder, name)
    names.sort()
    if names and not (names[0].startswith(partition) and names[-1].startswith(partition)):
        # Not where a reader would look for it.
        names = [name for name in names if name.startswith(partition)]
    return names


def sweep(folder: str, *, suffix: str = "") -> None:
    """Delete the files in a folder whose name ends so. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix):
                os.unlink(entry.path)


def _moved_up(folder: str, name: str) -> list[str]:
    """Bring the objects of an old folder to where they are now; those that were not there already."""
    old = f"{folder}/{name}"
    moved = []
    try:
        names = os.listdir(old)
    except NotADirectoryError:
        return []
    for found in names:
        if found.endswith(PARTIAL):
            os.unlink(f"{old}/{found}")
        elif _is_key(found) and name_file(f"{old}/{found}", f"{folder}/{found}"):
            moved.append(found)
    # A stranger's file keeps it.
    with contextlib.suppress(OSError):
        os.rmdir(old)
    return moved


def _is_key(name: str) -> bool:
    try:
        parse_key(name)
    except InvalidKeyError:
        return False
    return True
