"""How long each phase of a call may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds.

    connect  to open a connection
    read     without a byte from the service
    write    without a byte taken by the service
    pool     to get one of the connections, when all are in use
    """

    connect: float = 2.0
    read: float = 10.0
    write: float = 10.0
    pool: float = 10.0
