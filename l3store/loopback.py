"""Connections within one machine."""

from __future__ import annotations

import contextlib
import socket

_PACED = b"bbr"
_UNPACED = (b"cubic", b"reno")


def unpace(connected: socket.socket) -> None:
    """Have a TCP connection from this machine to itself send as fast as it is read; others stay as they are.

    BBR, where it is the system's default, spaces what it sends in time, to spare a network that is not there; one
    connection then moves a fifth less, at a quarter more processor time.
    """
    if connected.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    with contextlib.suppress(OSError, AttributeError):
        host = str(connected.getpeername()[0]).removeprefix("::ffff:")
        if host != "::1" and not host.startswith("127."):
            return
        if not connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(_PACED):
            return
        for name in _UNPACED:
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                return
