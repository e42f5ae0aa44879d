"""A plain FastAPI application under uvicorn that holds bytes in memory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from l3client.bench.contender import Handle, NotFoundError
from l3client.bench.least_http import HttpHandle
from l3client.bench.served import Served
from l3client.bench.workload import Item


class Plain(Served):
    name = "fastapi"
    about = "plain FastAPI route under uvicorn, bytes from memory"

    def command(self) -> list[str]:
        if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("fastapi") is None:
            raise NotFoundError("no fastapi and uvicorn in this Python")
        command = [sys.executable, "-m", "uvicorn", "l3client.bench.plain_app:app", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--no-access-log", "--log-level", "warning"]
        return [*command, "--timeout-keep-alive", "3600"]

    def connect(self) -> Handle:
        return HttpHandle(self.port)

    def remove(self, items: Sequence[Item]) -> None:
        handle = self.handles[0]
        assert isinstance(handle, HttpHandle)
        for item in items:
            handle.skip(handle.request("DELETE", f"/{item.key}"))
