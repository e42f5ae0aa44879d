"""A connected socket whose calls give up after a while: in the kernel's time, or in Python's for TLS.

A timeout of Python's makes a socket non-blocking, and every call on it two: one that asks, one that moves. SO_RCVTIMEO
and SO_SNDTIMEO leave it blocking, which also lets one call receive a whole chunk (MSG_WAITALL).
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Sequence

from l3store.loopback import unpace

Bytes = bytes | memoryview

MAX_VECTORS = 1024
"""Buffers that Linux takes in one call."""

_MIN_PATIENCE = 0.001  # to the kernel, zero is for ever
_TLS_PIECE = 256 << 10


class Stream:
    """A connected socket, for one thread at a time.

    A call blocks until something moved; when nothing does for as long as was said in `set_patience`, it raises
    BlockingIOError or TimeoutError and can be made again with the same arguments. Other failures are OSErrors.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        self._socket = connected
        self._poller = select.poll()
        self._poller.register(connected, select.POLLIN)

    def set_patience(self, seconds: float) -> None:
        """How long a call may take, with the bytes that come meanwhile: then it returns what it has."""
        micros = int(max(seconds, _MIN_PATIENCE) * 1e6)
        interval = struct.pack("@ll", *divmod(micros, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def send(self, buffers: Sequence[Bytes]) -> int:
        """Send of up to `MAX_VECTORS` buffers what is taken; how many bytes that is."""
        return self._socket.send(buffers[0]) if len(buffers) == 1 else self._socket.sendmsg(buffers)

    def receive(self, most: int) -> bytes:
        """Receive what has come, at least a byte; nothing is the end of the stream."""
        return self._socket.recv(most)

    def fill(self, targets: Sequence[memoryview]) -> int:
        """Fill up to `MAX_VECTORS` views, in order, and none of them empty; how many bytes came, 0 at the end."""
        if len(targets) == 1:
            return self._socket.recv_into(targets[0], 0, socket.MSG_WAITALL)
        return self._socket.recvmsg_into(targets, 0, socket.MSG_WAITALL)[0]

    @property
    def readable(self) -> bool:
        """Whether there are bytes, the end of the stream or an error to receive."""
        return bool(self._poller.poll(0))

    def abort(self) -> None:
        """Wake a thread that is in a call of this stream, from another one: to it, the stream has ended."""
        with contextlib.suppress(OSError):
            # Not the one of an SSLSocket, which takes away what the other thread is using.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TLSStream(Stream):
    """TLS has neither scattered buffers nor, because it keeps state of its own, timeouts of the kernel's."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._tls = connected

    def set_patience(self, seconds: float) -> None:
        self._tls.settimeout(max(seconds, _MIN_PATIENCE))

    def send(self, buffers: Sequence[Bytes]) -> int:
        # In pieces, for it returns only when all is sent: a slow network is not one where nothing moves.
        first = next((buffer for buffer in buffers if len(buffer)), b"")
        return self._tls.send(memoryview(first)[:_TLS_PIECE])

    def fill(self, targets: Sequence[memoryview]) -> int:
        return self._tls.recv_into(targets[0])

    @property
    def readable(self) -> bool:
        return bool(self._tls.pending()) or super().readable


def connect(host: str, port: int, *, context: ssl.SSLContext | None, seconds: float) -> Stream:
    """Open a stream, TLS where there is a context. Raises OSError, TimeoutError, or UnicodeError for a host's name."""
    with contextlib.ExitStack() as undo:
        connected = socket.create_connection((host, port), seconds)
        undo.callback(connected.close)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(connected)
        if context is not None:
            connected = context.wrap_socket(connected, server_hostname=host)
        stream = TLSStream(connected) if isinstance(connected, ssl.SSLSocket) else Stream(connected)
        undo.pop_all()
    return stream
