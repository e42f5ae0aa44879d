"""Only what paces is changed, and only within the machine."""

from __future__ import annotations

import socket

import pytest

from l3store.loopback import unpace


class Connected:
    """As much of a socket as is asked, with a peer of our choosing."""

    family = socket.AF_INET

    def __init__(self, peer: str, control: bytes, allowed: set[bytes]) -> None:
        self._peer = peer
        self._allowed = allowed
        self.control = control

    def getpeername(self) -> tuple[str, int]:
        return self._peer, 1

    def getsockopt(self, _level: int, _name: int, _size: int) -> bytes:
        return self.control.ljust(16, b"\0")

    def setsockopt(self, _level: int, _name: int, value: bytes) -> None:
        if value not in self._allowed:
            raise PermissionError
        self.control = value


@pytest.mark.parametrize(
    ("peer", "control", "allowed", "then"),
    [
        ("127.0.0.1", b"bbr", {b"cubic", b"reno"}, b"cubic"),
        ("127.1.2.3", b"bbr", {b"reno"}, b"reno"),
        ("::1", b"bbr", {b"cubic"}, b"cubic"),
        ("::ffff:127.0.0.1", b"bbr", {b"cubic"}, b"cubic"),
        ("127.0.0.1", b"bbr", set(), b"bbr"),
        ("127.0.0.1", b"dctcp", {b"cubic"}, b"dctcp"),
        ("10.0.0.1", b"bbr", {b"cubic"}, b"bbr"),
        ("fe80::1", b"bbr", {b"cubic"}, b"bbr"),
    ],
)
def test_what_is_changed(peer: str, control: bytes, allowed: set[bytes], then: bytes) -> None:
    connected = Connected(peer, control, allowed)
    unpace(connected)  # type: ignore[arg-type]
    assert connected.control == then


def test_a_real_connection_still_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            for connected in (one, other):
                unpace(connected)
                assert not connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
            one.sendall(b"x" * 1000)
            assert other.recv(1000, socket.MSG_WAITALL) == b"x" * 1000


def test_what_is_no_connection_is_left_alone() -> None:
    with socket.socket() as unconnected:
        unpace(unconnected)
    one, other = socket.socketpair()
    with one, other:
        unpace(one)
