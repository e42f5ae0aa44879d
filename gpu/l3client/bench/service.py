"""`l3store serve` as the bench runs it: started until ready, stopped or killed, and started again on its folder."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from l3client.bench.least_http import HttpHandle
from l3client.bench.process import Server, StartError, free_port
from l3client.bench.workload import Item
from l3client.transport import Body, L3Client, Part, Timeouts
from l3store.layout import Namespace, Range

WRITE_OBJECTS = 4096
"""Objects in one call of pages/write."""
_PATIENT = Timeouts(connect=10, read=60, write=60, pool=60, call=60)
_READY_STEP = 0.02  # each look takes time from what it looks at


class Service:
    """One `l3store serve` with a data folder of its own. ``ready_seconds``: how long a start may take."""

    def __init__(self, folder: Path, *, ack: str = "file", ram: str, ready_seconds: float = 30.0) -> None:
        self.folder = folder
        self.loop: str | None = None
        self.port = 0
        self._ack = ack
        self._ram = ram
        self._ready_seconds = ready_seconds
        self._server: Server | None = None

    @property
    def data(self) -> Path:
        """Its data folder."""
        return self.folder / "data"

    @property
    def running(self) -> bool:
        return self._server is not None

    @property
    def pids(self) -> list[int]:
        return self._server.pids if self._server else []

    @property
    def ended(self) -> str | None:
        """Why it runs no more although nobody here ended it: its exit status and what it said. None where it runs."""
        if self._server is None or self._server.process.poll() is None:
            return None
        return f"it ended (exit status {self._server.process.returncode}): {self._server.said()}"

    def client(self, connections: int, *, verify: bool = True) -> L3Client:
        """A patient client of it. ``verify``: whether it checks the sums of what it reads."""
        return L3Client(f"http://127.0.0.1:{self.port}", connections=connections, timeouts=_PATIENT, verify=verify)

    def start(self) -> float:
        """Seconds from its spawning to the first 200 of /readyz: its index is complete. Raises `StartError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        command = [sys.executable, "-m", "l3store", "serve", "--port", str(self.port), "--data-dir", str(self.data)]
        command += ["--ack", self._ack, "--ram", self._ram]
        began = time.perf_counter()
        self._server = Server(command, self.folder / "log")
        self._wait_until_ready(self._server)
        seconds = time.perf_counter() - began
        self.loop = event_loop(self._server.process.pid)
        return seconds

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._server is not None:
            # The number of one that ended may be another's by now.
            for pid in self._server.pids if self.ended is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.stop()

    def stop(self) -> None:
        """End it as it wants to be ended."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _wait_until_ready(self, server: Server) -> None:
        deadline = time.monotonic() + self._ready_seconds
        why: object = "it does not listen"
        while time.monotonic() < deadline and server.process.poll() is None:
            try:
                handle = HttpHandle(self.port)
            except ConnectionError:
                time.sleep(_READY_STEP)
                continue
            try:
                handle.skip(handle.request("GET", "/readyz"))
            except ConnectionError as error:
                why = error
                time.sleep(_READY_STEP)
            else:
                return
            finally:
                handle.close()
        raise StartError(f"the service is not ready (exit status {server.process.poll()}): {why}; {server.said()}")


def event_loop(pid: int) -> str | None:
    """Which event loop a service runs: uvicorn takes uvloop wherever it can load it. None where it cannot be seen."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
    return "uvloop" if "/uvloop/" in maps else "asyncio"


def write_all(client: L3Client, items: Sequence[Item]) -> None:
    """Store objects that are not there, all with cells of one size. Raises RuntimeError naming one that was not."""
    for at in range(0, len(items), WRITE_OBJECTS):
        part = items[at : at + WRITE_OBJECTS]
        bodies = [Body(item.key, item.data) for item in part]
        for one in client.write_pages(bodies, cell_bytes=part[0].cell_bytes):
            if not one.created:
                raise RuntimeError(f"{one.key} was not stored: {one.error or 'it was there'}")


def whole(spaces: Namespace) -> Part:
    """All layers and heads of a namespace."""
    return Part(spaces.digest, Range(0, spaces.geometry.num_layers), spaces.heads)
