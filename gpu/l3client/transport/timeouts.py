"""How long each phase of a call, and a call as a whole, may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds, of phases and of whole calls: a service that sends a byte now and then is in time for the phases only.

    connect        to open a connection
    read           without a byte from the service
    write          without a byte taken by the service
    pool           to get one of the connections, when all are in use
    call           a whole call, apart from the bytes of objects
    bytes_per_sec  at which these must move at least, so that a call with many may take longer
    """

    connect: float = 2.0
    read: float = 10.0
    write: float = 10.0
    pool: float = 10.0
    call: float = 15.0
    bytes_per_sec: float = 4 << 20

    def whole(self, count: int) -> float:
        """Seconds for a call that moves ``count`` bytes, both ways together."""
        return self.call + count / self.bytes_per_sec
