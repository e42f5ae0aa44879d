"""The calls that carry no object bytes: those of every request over connections of our own, the others over httpx."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from l3client.transport.connection import Address, Connection
from l3client.transport.deadline import DeadlineTransport, deadline
from l3client.transport.pagewire import JSON_HEADER, Part, as_json
from l3client.transport.pool import ConnectionPool
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, ProtocolError, TimeoutExpiredError, from_problem
from l3store.layout import Coordinate, Key, Namespace, parse_coordinate

_PHASES: dict[type[httpx.TimeoutException], str] = {
    httpx.ConnectTimeout: "connect",
    httpx.ReadTimeout: "read",
    httpx.WriteTimeout: "write",
    httpx.PoolTimeout: "pool",
}
_ERROR = 400
_SUCCESS = {200, 201, 204}
_MAX_ANSWER = 64 << 20


class Control:
    """Thread-safe. Errors are those of `l3store.errors`."""

    def __init__(self, url: str, address: Address, *, timeouts: Timeouts, limit: int) -> None:
        self._seconds = timeouts.call
        # Not the pool of the byte path: a scheduler that asks what is there does not wait for transfers.
        self._pool = ConnectionPool(address, limit=limit, timeouts=timeouts)
        self._http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(
                connect=timeouts.connect, read=timeouts.read, write=timeouts.write, pool=timeouts.pool
            ),
            # What an answer unpacks to has no bound.
            headers={"Accept-Encoding": "identity"},
            transport=DeadlineTransport(limit=limit, context=address.context),
            trust_env=False,
        )

    def close(self) -> None:
        """End all calls, those under way as well: they raise `ConnectError`."""
        self._pool.close()
        self._http.close()

    def register(self, namespace: Namespace, labels: Mapping[str, Any] | None) -> dict[str, Any]:
        """Register a namespace. The answer's ``near`` lists stored ones that almost match."""
        body = namespace.to_wire() | ({"labels": dict(labels)} if labels else {})
        return self._call("PUT", f"/v1/namespaces/{namespace.digest}", body)

    def match(self, part: Part, page_hashes: Sequence[str]) -> int:
        """How many leading pages are present."""
        if not page_hashes:
            return 0
        answer = self._ask_pages("/v1/pages/match", part, page_hashes)
        pages = answer.get("pages")
        if type(pages) is not int or not 0 <= pages <= len(page_hashes):
            raise ProtocolError(f"match of {len(page_hashes)} pages gave {pages!r}")
        return pages

    def missing(self, part: Part, page_hashes: Sequence[str]) -> list[tuple[int, Coordinate]]:
        """What has to be written, by position of the page."""
        if not page_hashes:
            return []
        answer = self._ask_pages("/v1/pages/missing", part, page_hashes)
        try:
            texts = {text for _, text in answer["missing"]}  # few, of as many objects as there may be
            coordinates = {text: parse_coordinate(text) for text in texts}
            missing = [(position, coordinates[text]) for position, text in answer["missing"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"missing gave what cannot be read: {error}") from error
        if any(type(position) is not int or not 0 <= position < len(page_hashes) for position, _ in missing):
            raise ProtocolError("missing named pages that were not asked")
        return missing

    def suspect(self, key: Key) -> bool:
        """Tell the service that a cell of a key arrived with a bad sum; True where its copy was bad."""
        return bool(self._call("POST", f"/v1/objects/{key}/suspect", None).get("corrupt"))

    def delete(self, key: Key) -> None:
        """Delete what is stored of a key. Raises `MissError` where nothing is."""
        self._call("DELETE", f"/v1/objects/{key}", None)

    def version(self) -> dict[str, Any]:
        return self._call("GET", "/version", None)

    def namespaces(self) -> list[dict[str, Any]]:
        listed = self._call("GET", "/v1/namespaces", None).get("namespaces")
        if not isinstance(listed, list):
            raise ProtocolError(f"the list of namespaces is {listed!r:.80}")
        return listed

    def _ask_pages(self, path: str, part: Part, page_hashes: Sequence[str]) -> dict[str, Any]:
        body = as_json(part.body(page_hashes))

        def exchange(connection: Connection) -> bytes | bytearray:
            head = connection.request("POST", path, JSON_HEADER, [body])
            return connection.read(head.length)

        try:
            answer = json.loads(self._pool.run(exchange))
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ProtocolError(f"POST {path}: no JSON object")
        return answer

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            with deadline(self._seconds):
                response, content = self._exchange(method, path, body)
        except httpx.TimeoutException as error:
            phase = _PHASES.get(type(error), "read")
            raise TimeoutExpiredError(f"{method} {path}: {phase} timed out", phase=phase) from error
        except (httpx.HTTPError, RuntimeError) as error:  # of a closed client, httpx raises RuntimeError
            raise ConnectError(f"{method} {path}: {error}") from error
        try:
            answer = json.loads(content) if content else {}
        except (ValueError, RecursionError):
            answer = None
        if response.status_code >= _ERROR:
            raise from_problem(response.status_code, answer if isinstance(answer, dict) else {})
        if not isinstance(answer, dict) or response.status_code not in _SUCCESS:
            raise ProtocolError(f"{method} {path}: HTTP status {response.status_code} and no JSON object")
        return answer

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response, bytearray]:
        """One request and its answer.

        A kept connection may have been closed by the service just now. All that may be repeated is asked once more.
        """
        try:
            return self._ask(method, path, body)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if method == "DELETE":
                raise
            return self._ask(method, path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response, bytearray]:
        with self._http.stream(method, path, json=body) as response:
            return response, _content(response)


def _content(response: httpx.Response) -> bytearray:
    content = bytearray()
    for piece in response.iter_raw():
        content += piece
        if len(content) > _MAX_ANSWER:
            raise ProtocolError(f"{response.url.path}: an answer of more than {_MAX_ANSWER} bytes")
    return content
