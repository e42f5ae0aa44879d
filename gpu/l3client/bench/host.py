"""Where and when a measurement was made, and of which version."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

_ROOT = Path(__file__).parents[3]
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``load_...``: processes that ran or waited, mean of the minute before the measurement and of its last.

    ``commit`` is None but in a checkout; ``loop`` is the service's event loop, None where no service was started.
    """

    version: str
    commit: str | None
    date: str
    cpu: str
    cores: int
    system: str
    python: str
    load_before: float
    load_after: float
    loop: str | None = None

    @classmethod
    def now(cls) -> Self:
        load = os.getloadavg()[0]
        return cls(
            version=_version(),
            commit=_commit(),
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            load_before=load,
            load_after=load,
        )

    def ended(self, loop: str | None) -> Self:
        """At the end of the measurement."""
        return replace(self, load_after=os.getloadavg()[0], loop=loop)

    def as_text(self) -> str:
        commit = f" at {self.commit}" if self.commit else ""
        loop = f" on {self.loop}" if self.loop else ""
        return (
            f"l3store {self.version}{commit}{loop}, Python {self.python}; {self.date}\n"
            f"{self.cpu}, {self.cores} cores, {self.system}; load average {self.load_before:.2f} at the beginning, "
            f"{self.load_after:.2f} at the end"
        )


def _version() -> str:
    try:
        return version("l3store")
    except PackageNotFoundError:
        return "of unknown version"


def _commit() -> str | None:
    """Of the checkout that this file lies in."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    """The model's name, or at least the architecture's."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
