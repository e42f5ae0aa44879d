"""The error tree that the service and the client share.

    L3Error                       HTTP   what it means to a client
    ├─ MissError                  404    a miss: compute it
    │  ├─ UnknownNamespaceError   404    register first, then it may hit
    │  └─ CorruptError            404    the bytes failed their sums; quarantined
    ├─ RefusedError               400    a bug in the caller: the same request fails again
    │  ├─ LengthRequiredError     411
    │  ├─ TooLargeError           413    ask for less: the detail says how much
    │  ├─ UnsatisfiableError      416    the range is not inside the object
    │  ├─ ConflictError           409    registered with another geometry
    │  ├─ PreconditionError       412    `If-None-Match: *` and it is there
    │  ├─ HeadersTooLargeError    431    the request line and headers are longer than any of ours
    │  ├─ SlowBodyError           408    the body stopped coming
    │  └─ NotRoutedError          404    no such path or method (405)
    ├─ RetryError                 503    later, or elsewhere
    │  ├─ StorageFullError        507
    │  └─ NotReadyError           503    the index is not complete yet
    └─ TransportError             -      the service could not be asked: a miss
       ├─ ConnectError            -      no connection
       ├─ TimeoutExpiredError     -      a phase took longer than its timeout; `phase` names it
       └─ ProtocolError           -      what came is not what HTTP or the wire says

Layout errors (`l3store.layout.errors`) are ValueErrors of their own and reach a client as 400.
"""

from __future__ import annotations

from typing import Any, ClassVar


class L3Error(Exception):
    """Anything that goes wrong between a client and the bytes. ``detail`` says what, where and what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, **members: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.members = members

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that belong to the error."""
        return {}

    def to_problem(self) -> dict[str, Any]:
        """An RFC 9457 problem document."""
        return {
            "type": f"urn:l3store:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }


class MissError(L3Error):
    status, code, title = 404, "not-found", "Not stored"


class UnknownNamespaceError(MissError):
    code, title = "unknown-namespace", "Namespace not registered"


class CorruptError(MissError):
    """``key`` is the stored object whose cells failed their sums."""

    code, title = "corrupt", "Stored bytes failed their sums"


class RefusedError(L3Error):
    status, code, title = 400, "bad-request", "Bad request"


class WrongLengthError(RefusedError):
    code, title = "wrong-length", "Wrong length"


class WrongSumsError(RefusedError):
    code, title = "wrong-sums", "Bytes and sums disagree"


class LengthRequiredError(RefusedError):
    status, code, title = 411, "length-required", "Length required"


class TooLargeError(RefusedError):
    status, code, title = 413, "too-large", "Too large"


class UnsatisfiableError(RefusedError):
    """``size`` is the object's, in bytes."""

    status, code, title = 416, "unsatisfiable-range", "Range not satisfiable"

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Range": f"bytes */{self.members['size']}"} if "size" in self.members else {}


class ConflictError(RefusedError):
    status, code, title = 409, "conflict", "Registered differently"


class PreconditionError(RefusedError):
    status, code, title = 412, "precondition-failed", "Already stored"


class HeadersTooLargeError(RefusedError):
    status, code, title = 431, "headers-too-large", "Headers too large"


class SlowBodyError(RefusedError):
    status, code, title = 408, "slow-body", "The body stopped coming"


class NotRoutedError(RefusedError):
    status, code, title = 404, "no-such-resource", "No such resource"


class MethodNotAllowedError(NotRoutedError):
    status, code, title = 405, "method-not-allowed", "Method not allowed"


class RetryError(L3Error):
    """``retry_after`` is in seconds."""

    status, code, title = 503, "unavailable", "Unavailable"
    retry_after: ClassVar[int] = 1

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after)}


class StorageFullError(RetryError):
    status, code, title = 507, "storage-full", "Storage full"
    retry_after: ClassVar[int] = 5


class NotReadyError(RetryError):
    code, title = "not-ready", "Not ready"


class TransportError(L3Error):
    code, title = "transport", "The service could not be asked"


class ConnectError(TransportError, ConnectionError):
    code, title = "connect", "No connection"


class TimeoutExpiredError(TransportError, TimeoutError):
    code, title = "timeout", "Timed out"

    def __init__(self, detail: str, *, phase: str) -> None:
        super().__init__(detail, phase=phase)
        self.phase = phase


class ProtocolError(TransportError):
    code, title = "protocol", "Unexpected answer"


class ServiceError(TransportError):
    """The service answered with an error that has no class here."""

    code, title = "service", "The service failed"


_BY_CODE: dict[str, type[L3Error]] = {
    kind.code: kind
    for kind in (
        MissError, UnknownNamespaceError, CorruptError, RefusedError, WrongLengthError, WrongSumsError,
        LengthRequiredError, TooLargeError, UnsatisfiableError, ConflictError, PreconditionError, NotRoutedError,
        MethodNotAllowedError, HeadersTooLargeError, SlowBodyError, RetryError, StorageFullError, NotReadyError,
    )
}  # fmt: skip

_BY_STATUS: dict[int, type[L3Error]] = {
    400: RefusedError, 404: MissError, 409: ConflictError, 411: LengthRequiredError, 412: PreconditionError,
    413: TooLargeError, 416: UnsatisfiableError, 503: RetryError, 507: StorageFullError,
}  # fmt: skip


def from_problem(status: int, problem: dict[str, Any]) -> L3Error:
    """The error that a problem document describes, as a client raises it."""
    code = str(problem.get("type", "")).rpartition(":")[2]
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ServiceError)
    detail = problem.get("detail")
    return kind(detail if isinstance(detail, str) else f"HTTP status {status}")
