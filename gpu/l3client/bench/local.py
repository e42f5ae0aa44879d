"""Files of the kind that engines ship as a storage backend: one for each object, in this process, no server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from l3client.bench.contender import Handle, Threaded
from l3client.bench.workload import Batch, Item, Kind


class FileHandle(Handle):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, item: Item, into: memoryview) -> None:
        with open(f"{self._folder}/{item.key}", "rb", buffering=0) as file:
            if file.readinto(into) != len(into):
                raise OSError(f"{item.key} is short")

    def put(self, item: Item) -> None:
        path = f"{self._folder}/{item.key}"
        with open(f"{path}.tmp", "wb", buffering=0) as file:
            file.write(item.data)
        os.rename(f"{path}.tmp", path)


class LocalFiles(Threaded):
    name = "local files"
    about = "one file for each object, in process: open, readinto, write, rename"
    kinds = Threaded.kinds | {Kind.MATCH}

    def connect(self) -> Handle:
        return FileHandle(self.folder)

    def find(self, batch: Batch) -> int:
        return sum(os.path.exists(f"{self.folder}/{item.key}") for item in batch.items)

    def remove(self, items: Sequence[Item]) -> None:
        for item in items:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / str(item.key))
