"""A bounded pool of connections to one service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from l3client.transport.connection import Address, Connection
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, L3Error, TimeoutExpiredError, TransportError

_T = TypeVar("_T")


class ConnectionPool:
    """At most ``limit`` connections; the one used last is used next. Thread-safe."""

    def __init__(self, address: Address, *, limit: int, timeouts: Timeouts) -> None:
        if limit < 1:
            raise ValueError(f"a pool needs at least one connection, not {limit}")
        self._address = address
        self._timeouts = timeouts
        self._free = limit
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0
        self._closed = False

    def run(self, exchange: Callable[[Connection], _T]) -> _T:
        """Run one request and its answer on a connection.

        A kept connection may have been closed by the service in the meantime; an exchange that fails on one before
        anything was answered is run once more on a new connection. All our requests may be repeated. The call's time
        begins when it has its place in the pool, and is the same for both.
        """
        kept = self._enter()
        try:
            began = time.monotonic()
            while kept is not None and kept.stale:
                kept = self._replace(kept)
            if kept is not None:
                kept.began = began
                try:
                    return self._run_on(kept, exchange)
                except ConnectError:
                    if kept.answered:
                        raise
            fresh = Connection(self._address, self._timeouts, began=began)
            self._take_up(fresh)
            return self._run_on(fresh, exchange)
        finally:
            self._leave()

    def close(self) -> None:
        """Close idle connections, and end the exchanges of those in use: they raise `ConnectError`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            # Under the lock, or a connection could be closed, and its number be another file's, before we reach it.
            for connection in self._busy:
                connection.abort()
            self._freed.notify_all()
        for connection in idle:
            connection.close()

    def _enter(self) -> Connection | None:
        """Wait for a place, and take the connection used last, if one is kept."""
        with self._lock:
            if not self._free and not self._closed:
                self._waiting += 1
                try:
                    self._freed.wait_for(lambda: self._free or self._closed, self._timeouts.pool)
                finally:
                    self._waiting -= 1
            if self._closed:
                raise ConnectError("this client was closed")
            if not self._free:
                raise TimeoutExpiredError("all connections are in use", phase="pool")
            self._free -= 1
            return self._take()

    def _leave(self) -> None:
        with self._lock:
            self._free += 1
            if self._waiting:
                self._freed.notify()

    def _take(self) -> Connection | None:
        if not self._idle:
            return None
        kept = self._idle.pop()
        self._busy.add(kept)
        return kept

    def _replace(self, stale: Connection) -> Connection | None:
        self._put_back(stale, usable=False)
        with self._lock:
            return self._take()

    def _take_up(self, fresh: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._busy.add(fresh)
                return
        fresh.close()
        raise ConnectError("this client was closed")

    def _run_on(self, connection: Connection, exchange: Callable[[Connection], _T]) -> _T:
        usable = False
        try:
            result = exchange(connection)
            usable = True
        except L3Error as error:
            # An error that the service answered whole leaves the connection in order.
            usable = not isinstance(error, TransportError)
            raise
        finally:
            self._put_back(connection, usable=usable)
        return result

    def _put_back(self, connection: Connection, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if usable and connection.reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()
