"""Redis, through redis-py: the client that a Python engine would use."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from l3client.bench.contender import Handle, NotFoundError
from l3client.bench.served import Served
from l3client.bench.workload import Batch, Item, Kind, Workload


class RedisHandle(Handle):
    """redis-py answers with bytes of its own; to be in the caller's memory they are copied there."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def get(self, item: Item, into: memoryview) -> None:
        into[:] = self.client.get(str(item.key))

    def put(self, item: Item) -> None:
        self.client.set(str(item.key), item.data)

    def close(self) -> None:
        self.client.close()


class Redis(Served):
    name = "redis"
    kinds = Served.kinds | {Kind.MATCH}

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        parser = "with" if importlib.util.find_spec("hiredis") else "without"
        self.about = f"redis-server without persistence, through redis-py {parser} hiredis; batches by MGET and MSET"

    def command(self) -> list[str]:
        binary = shutil.which("redis-server")
        if binary is None:
            raise NotFoundError("no redis-server in PATH")
        if importlib.util.find_spec("redis") is None:
            raise NotFoundError("no redis (redis-py) in this Python")
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [*command, "--dir", str(self.folder)]

    def connect(self) -> Handle:
        return RedisHandle(importlib.import_module("redis").Redis(host="127.0.0.1", port=self.port))

    def read_batch(self, batch: Batch) -> None:
        into = self.work.into
        for item, value in zip(batch.items, self._client.mget([str(i.key) for i in batch.items]), strict=True):
            into[item.at : item.end] = value

    def write_batch(self, batch: Batch) -> None:
        self._client.mset({str(item.key): item.data for item in batch.items})

    def find(self, batch: Batch) -> int:
        found: int = self._client.exists(*[str(item.key) for item in batch.items])
        return found

    def remove(self, items: Sequence[Item]) -> None:
        self._client.delete(*[str(item.key) for item in items])

    @property
    def _client(self) -> Any:
        handle = self.handles[0]
        assert isinstance(handle, RedisHandle)
        return handle.client
