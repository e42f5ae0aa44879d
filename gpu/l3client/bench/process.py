"""Processes that the bench starts: free ports, their CPU time and memory, and their end, by pid."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_SETTLE_STEP = 0.03
_SETTLE_IDLE = 0.001
_SETTLE_SECONDS = 5.0
_PROCESS_CPU_CLOCK = 2  # CPUCLOCK_SCHED of <linux/posix-timers.h>


class StartError(RuntimeError):
    """A server did not start: what it said."""


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system seconds that processes have used, all their threads, in nanosecond steps where Linux allows.

    It is the clock that /proc/PID/stat shows as utime + stime in steps of 10 ms, too coarse for one measurement.
    """
    return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(((~pid) << 3) | _PROCESS_CPU_CLOCK)
    except OSError:
        fields = _stat(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def settled_cpu_seconds(pids: Sequence[int]) -> float:
    """Wait until processes do nothing any more, 5 seconds at most; the CPU seconds that they have used then."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    used = cpu_seconds(pids)
    while time.monotonic() < deadline:
        time.sleep(_SETTLE_STEP)
        now = cpu_seconds(pids)
        if now - used < _SETTLE_IDLE:
            return now
        used = now
    return used


def _stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(entry)):
            parents[int(entry)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found


def peak_bytes(pids: Sequence[int]) -> int:
    """The most memory that processes have held, VmHWM of each added up. What they share is counted in each."""
    return _status_bytes(pids, "VmHWM:")


def resident_bytes(pids: Sequence[int]) -> int:
    """The memory that processes hold now, VmRSS of each added up. What they share is counted in each."""
    return _status_bytes(pids, "VmRSS:")


def _status_bytes(pids: Sequence[int], field: str) -> int:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
    return total


class Server:
    """One process of a contender, with what it prints in a log."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        pipe: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else file,
                stderr=file,
                env={**os.environ, **(env or {})},
                pass_fds=pass_fds,
            )

    @property
    def pids(self) -> list[int]:
        return family(self.process.pid)

    def said(self) -> str:
        return self.log.read_text(errors="replace").strip()[-1500:]

    def wait_for_port(self, port: int) -> None:
        """Until something listens. Raises `StartError`."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise StartError(f"it did not start (exit status {self.process.poll()}): {self.said()}")

    def line(self, seconds: float = _START_SECONDS) -> bytes:
        """The next line that it prints. Raises `StartError`."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise StartError(f"it said nothing for {seconds} s: {self.said()}")
        line: bytes = self.process.stdout.readline()
        if not line:
            raise StartError(f"it ended: {self.said()}")
        return line

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
