"""A plain FastAPI application under uvicorn that holds bytes in memory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from l3client.bench.contender import Handle, NotFoundError, Threaded
from l3client.bench.least_http import HttpHandle
from l3client.bench.process import Server, free_port
from l3client.bench.workload import Item, Workload


class Plain(Threaded):
    name = "fastapi"
    about = "plain FastAPI route under uvicorn, bytes from memory"

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        self._server: Server | None = None
        self._port = 0

    @property
    def server_pids(self) -> list[int]:
        return self._server.pids if self._server else []

    def launch(self) -> None:
        if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("fastapi") is None:
            raise NotFoundError("no fastapi and uvicorn in this Python")
        self._port = free_port()
        command = [sys.executable, "-m", "uvicorn", "l3client.bench.plain_app:app", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--no-access-log", "--log-level", "warning"]
        command += ["--timeout-keep-alive", "3600"]
        self._server = Server(command, self.folder / "log")
        self._server.wait_for_port(self._port)

    def connect(self) -> Handle:
        return HttpHandle(self._port)

    def remove(self, items: Sequence[Item]) -> None:
        handle = self.handles[0]
        assert isinstance(handle, HttpHandle)
        for item in items:
            handle.skip(handle.request("DELETE", f"/{item.key}"))

    def halt(self) -> None:
        if self._server:
            self._server.stop()
