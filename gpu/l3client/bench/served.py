"""The base of contenders whose server is one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from l3client.bench.contender import Threaded
from l3client.bench.process import Server, free_port
from l3client.bench.workload import Workload


class Served(Threaded):
    """Subclasses say the command that listens on ``port`` of loopback, and what its environment has besides ours."""

    env: Mapping[str, str] = {}

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        self.server: Server | None = None
        self.port = 0

    @property
    def server_pids(self) -> list[int]:
        return self.server.pids if self.server else []

    def command(self) -> Sequence[str]:
        """Make ready what the server needs in ``folder``. Raises `NotFoundError` where it is not installed."""
        raise NotImplementedError

    def launch(self) -> None:
        self.port = free_port()
        self.server = Server(self.command(), self.folder / "log", env=self.env)
        self.server.wait_for_port(self.port)

    def halt(self) -> None:
        if self.server:
            self.server.stop()
