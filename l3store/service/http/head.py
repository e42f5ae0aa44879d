"""The head of a request, read by a C parser that never sees a byte of a body."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

import httptools

from l3store.errors import RefusedError

MAX_HEAD_BYTES = 64 << 10
"""A request line and its headers; beyond it, 431."""


@dataclass(slots=True)
class Head:
    """What stands before a body.

    length      of the body, as announced; 0 where none is
    framed      whether `length` can be believed: no Transfer-Encoding
    expects     the client waits for 100 Continue
    keep_alive  the client wants the connection to stay
    """

    method: str = ""
    target: bytes = b""
    path: str = ""
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    version: str = "1.1"
    length: int = 0
    framed: bool = True
    expects: bool = False
    keep_alive: bool = True


def parse_head(data: bytes) -> Head:
    """Read a head up to and with its blank line. Raises `RefusedError` for what is not HTTP or ambiguous."""
    sink = _Sink()
    parser = httptools.HttpRequestParser(sink)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        # Offers to upgrade are ordinary (curl makes one where it could speak HTTP/2), and may be ignored.
        pass
    except httptools.HttpParserError as error:
        raise RefusedError(f"this is not an HTTP/1.1 request, or its framing is ambiguous: {error}") from error
    head = sink.head
    if not sink.complete:
        raise RefusedError("this is not an HTTP/1.1 request: its head does not end where its blank line is")
    head.method = parser.get_method().decode("ascii")
    head.version = parser.get_http_version()
    head.keep_alive = head.version == "1.1" and b"close" not in sink.connection
    _read_target(head)
    return head


class _Sink:
    """Takes the parser's callbacks."""

    def __init__(self) -> None:
        self.head = Head()
        self.connection = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.head.headers.append((name, value))
        if name == b"content-length":
            # A length that is no number, or a second one, is refused by the parser or by the application.
            self.head.length = int(value) if value.isdigit() else 0
        elif name == b"transfer-encoding":
            self.head.framed = False
        elif name == b"expect":
            self.head.expects = value.lower() == b"100-continue"
        elif name == b"connection":
            self.connection += b"," + value.lower()

    def on_headers_complete(self) -> None:
        self.complete = True


def _read_target(head: Head) -> None:
    try:
        url = httptools.parse_url(head.target)
    except httptools.HttpParserInvalidURLError as error:
        raise RefusedError(f"{head.target[:120]!r} is not a request target") from error
    raw = url.path or b"/"
    head.query = url.query or b""
    head.target = raw
    head.path = unquote(raw.decode("ascii", "replace")) if b"%" in raw else raw.decode("ascii", "replace")
