"""The head of a request, read by a C parser that never sees a byte of a body."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

import httptools

from l3store.errors import HeadersTooLargeError, RefusedError

MAX_HEAD_BYTES = 64 << 10
"""A request line and its headers; beyond it, 431."""

_BLANK_LINE = b"\r\n\r\n"
_VERSIONS = {"1.0", "1.1"}
_WITH_BODY = {"PUT", "POST", "PATCH"}


@dataclass(slots=True)
class Head:
    """What stands before a body.

    length      of the body, as announced; 0 where none is
    framed      whether it is known where the body ends: no Transfer-Encoding, and a length where a body is usual
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


class HeadReader:
    """Reads heads as they arrive. The parser is given bytes up to the blank line, and never one of a body."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._sink = _Sink()
        self._parser = httptools.HttpRequestParser(self._sink)
        self._fed = 0

    def feed(self, data: bytes) -> tuple[Head, int] | None:
        """``data`` is all that has come since the end of the last head. The head and its length, once it is whole.

        Raises `RefusedError` for what is no HTTP or is ambiguous, as soon as that can be told, and
        `HeadersTooLargeError`.
        """
        begin = self._fed
        if not begin and data[:1] in b"\r\n":
            # An empty line or two before a request is to be tolerated (RFC 9112, 2.2).
            begin = len(data) - len(data.lstrip(b"\r\n"))
        blank = data.find(_BLANK_LINE, max(0, begin - len(_BLANK_LINE)))
        end = len(data) if blank < 0 else blank + len(_BLANK_LINE)
        try:
            self._parser.feed_data(data if not self._fed and end == len(data) else data[self._fed : end])
        except httptools.HttpParserUpgrade:
            # Offers to upgrade are ordinary (curl makes one where it could speak HTTP/2), and may be ignored.
            pass
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _AmbiguousError):
                raise RefusedError(str(error.__context__)) from error
            raise RefusedError(f"this is not an HTTP/1.1 request, or its framing is ambiguous: {error}") from error
        self._fed = end
        if blank < 0:
            if end >= MAX_HEAD_BYTES:
                raise HeadersTooLargeError(f"a request line and headers of more than {MAX_HEAD_BYTES} bytes")
            return None
        if not self._sink.complete:
            raise RefusedError("this is not an HTTP/1.1 request: its head does not end where its blank line is")
        head = self._sink.head(self._parser)
        self._begin()
        return head, end


class _AmbiguousError(ValueError):
    """Raised in a callback of the parser, which wraps it."""


class _Sink:
    """Takes the parser's callbacks."""

    __slots__ = ("_connection", "_expects", "_headers", "_hosts", "_length", "_target", "_untold", "complete")

    def __init__(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._connection = b""
        self._length: int | None = None
        self._untold = False
        self._expects = False
        self._hosts = 0
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        # Blanks around a value are not part of it (RFC 9110, 5.5), and the parser leaves those behind it.
        value = value.strip(b" \t")
        self._headers.append((name, value))
        if name == b"host":
            self._hosts += 1
        elif name == b"content-length":
            if not value.isdigit() or len(value) > 19:
                raise _AmbiguousError("Content-Length is not a number")
            if self._length is not None:
                raise _AmbiguousError("more than one Content-Length")
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._untold = True
        elif name == b"expect":
            self._expects = value.lower() == b"100-continue"
        elif name == b"connection":
            self._connection += b"," + value.lower()

    def on_headers_complete(self) -> None:
        self.complete = True

    def head(self, parser: httptools.HttpRequestParser) -> Head:
        """What was read. Raises `RefusedError`."""
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise RefusedError(f"HTTP/{version[:8]} is not spoken here: HTTP/1.1 is")
        if self._hosts > 1 or (version == "1.1" and not self._hosts):
            raise RefusedError("a request has exactly one Host header (RFC 9112, 3.2)")
        method = parser.get_method().decode("ascii")
        target, path, query = _read_target(self._target)
        return Head(
            method,
            target,
            path,
            query,
            self._headers,
            version,
            self._length or 0,
            # A body whose length was forgotten would be read as the next request.
            not self._untold and (self._length is not None or method not in _WITH_BODY),
            self._expects,
            version == "1.1" and b"close" not in self._connection,
        )


def _read_target(target: bytes) -> tuple[bytes, str, bytes]:
    """The path as it came, unquoted, and the query of a request target. Raises `RefusedError`."""
    if target.startswith(b"/") and b"#" not in target:
        raw, _, query = target.partition(b"?")
    else:
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError as error:
            raise RefusedError(f"{target[:120]!r} is not a request target") from error
        raw, query = url.path or b"/", url.query or b""
    path = raw.decode("ascii", "replace")
    return raw, unquote(path) if b"%" in raw else path, query
