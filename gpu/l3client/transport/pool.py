"""A bounded pool of connections to one service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from l3client.transport.connection import Address, Connection
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, L3Error, TimeoutExpiredError, TransportError

_T = TypeVar("_T")


class ConnectionPool:
    """At most ``limit`` connections; the one used last is used next. Thread-safe."""

    def __init__(self, address: Address, *, limit: int, timeouts: Timeouts) -> None:
        self._address = address
        self._timeouts = timeouts
        self._slots = threading.BoundedSemaphore(limit)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, exchange: Callable[[Connection], _T]) -> _T:
        """Run one request and its answer on a connection.

        A kept connection may have been closed by the service in the meantime; an exchange that fails on one before
        anything was answered is run once more on a new connection. All our requests may be repeated.
        """
        if not self._slots.acquire(timeout=self._timeouts.pool):
            raise TimeoutExpiredError("all connections are in use", phase="pool")
        try:
            if self._closed:
                raise ConnectError("this client was closed")
            kept = self._take()
            if kept is not None:
                try:
                    return self._run_on(kept, exchange)
                except ConnectError:
                    if kept.answered:
                        raise
            return self._run_on(Connection(self._address, self._timeouts), exchange)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Close idle connections, and end the exchanges of those in use: they raise `ConnectError`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            # Under the lock, or a connection could be closed, and its number be another file's, before we reach it.
            for connection in self._busy:
                connection.abort()
        for connection in idle:
            connection.close()

    def _run_on(self, connection: Connection, exchange: Callable[[Connection], _T]) -> _T:
        try:
            self._take_up(connection)
            result = exchange(connection)
        except L3Error as error:
            # An error that the service answered whole leaves the connection in order.
            self._put_back(connection, usable=not isinstance(error, TransportError))
            raise
        except BaseException:
            self._put_back(connection, usable=False)
            raise
        self._put_back(connection, usable=True)
        return result

    def _take(self) -> Connection | None:
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None or not kept.stale:
                return kept
            kept.close()

    def _take_up(self, connection: Connection) -> None:
        with self._lock:
            if self._closed:
                raise ConnectError("this client was closed")
            self._busy.add(connection)

    def _put_back(self, connection: Connection, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if usable and connection.reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()
