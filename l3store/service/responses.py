"""Responses whose bodies are object bytes."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from l3store.backend import Sums
from l3store.errors import L3Error
from l3store.layout.sums import Buffer, encode_sums
from l3store.service.conditional import etag
from l3store.service.metrics import Metrics
from l3store.service.wire import wire_of

MEDIA_TYPE = "application/octet-stream"

RawHeaders = Sequence[tuple[bytes, bytes]]

_DESCRIBED = 8192

_log = logging.getLogger("l3store.service")


class BytesResponse(Response):
    """A body of known length, sent piece by piece; a piece is some buffers in a row, the first goes with the head.

    ``done`` is called when the last piece was handed over, or failed. Where a piece cannot be had after the headers
    went out, the connection is closed, and the client sees a short body.
    """

    def __init__(
        self,
        body: list[memoryview] | AsyncIterator[Sequence[Buffer]],
        *,
        status: int,
        length: int,
        headers: RawHeaders,
        done: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self.status_code = status
        self.background = None
        self.raw_headers = [(b"content-length", b"%d" % length), _TYPE, *headers]
        self._pieces = body
        self._done = done
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = wire_of(scope)
        put = wire.send_buffers if wire is not None else _by_message(send)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if isinstance(self._pieces, list):
                await put(self._pieces)
                self._metrics.sent_bytes += sum(map(len, self._pieces))
            else:
                async for piece in self._pieces:
                    await put(piece)
                    self._metrics.sent_bytes += sum(map(len, piece))
            if wire is None or not wire.complete:
                await send(_END)
        except ClientDisconnect:
            # Nothing more is read for a client that is gone.
            return
        except L3Error as error:
            # The status is out: an answer that ends early is all that can still be said.
            _log.warning("cut an answer short: %s", error)
        finally:
            self._done()


@functools.lru_cache(_DESCRIBED)
def described(sums: Sums) -> RawHeaders:
    """The headers that say what the bytes are that have these sums."""
    return (
        (b"etag", etag(sums).encode()),
        (b"accept-ranges", b"bytes"),
        (b"l3-sums", encode_sums(sums.packed).encode()),
        (b"l3-sums-by", b"writer" if sums.by_writer else b"service"),
    )


def _by_message(send: Send) -> Callable[[Sequence[Buffer]], Awaitable[None]]:
    async def put(piece: Sequence[Buffer]) -> None:
        await send({"type": "http.response.body", "body": b"".join(piece), "more_body": True})

    return put


_TYPE = (b"content-type", MEDIA_TYPE.encode())
_END = {"type": "http.response.body", "body": b"", "more_body": False}
