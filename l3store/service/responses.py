"""Responses whose bodies are object bytes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from l3store.errors import L3Error
from l3store.layout.sums import Buffer
from l3store.service.wire import wire_of

MEDIA_TYPE = "application/octet-stream"

_log = logging.getLogger("l3store.service")


class BytesResponse(Response):
    """A body of known length, sent piece by piece; a piece is some buffers in a row.

    ``done`` is called when the last piece was handed over, or failed.

    Where a piece cannot be had after the headers went out, the connection is closed, and the client sees a short body.
    """

    def __init__(
        self,
        pieces: AsyncIterator[Sequence[Buffer]],
        *,
        status: int,
        length: int,
        headers: Mapping[str, str],
        done: Callable[[], None],
    ) -> None:
        self.status_code = status
        self.background = None
        self._pieces = pieces
        self._done = done
        self.body = b""
        self.init_headers({"content-length": str(length), "content-type": MEDIA_TYPE, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = wire_of(scope)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._pieces:
                if wire is not None:
                    await wire.send_buffers(piece)
                else:
                    await send({"type": "http.response.body", "body": b"".join(piece), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            # Nothing more is read for a client that is gone.
            return
        except L3Error as error:
            # The status is out: an answer that ends early is all that can still be said.
            _log.warning("cut an answer short: %s", error)
        finally:
            self._done()
