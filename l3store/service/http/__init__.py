"""HTTP/1.1 on the socket: heads by a C parser, bodies straight between the socket and their memory."""

from __future__ import annotations

from l3store.service.http.connection import WireConnection

__all__ = ["WireConnection"]
