"""Prometheus metrics, in the design's words."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from l3store.index import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry for one service."""

    def __init__(self, store: Store) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StoreCollector(store))
        self._requests = Counter(
            "l3store_requests", "Requests answered", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "l3store_request_seconds",
            "From the headers of a request to the last byte of its answer",
            ["method", "route"],
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self._registry,
        )
        self.received = Counter("l3store_received_bytes", "Object bytes received", registry=self._registry)
        self.sent = Counter("l3store_sent_bytes", "Object bytes sent", registry=self._registry)

        # Looking a child up by its labels costs more than counting.
        self._counters: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        key = (method, route, status)
        known = self._counters.get(key)
        if known is None:
            known = self._requests.labels(method, route, str(status)), self._seconds.labels(method, route)
            self._counters[key] = known
        known[0].inc()
        known[1].observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _StoreCollector(Collector):
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        usage = self._store.index.total
        yield GaugeMetricFamily("l3store_objects", "Objects stored", usage.objects)
        yield GaugeMetricFamily("l3store_pages", "Pages of which anything is stored", len(self._store.index))
        yield GaugeMetricFamily("l3store_stored_bytes", "Bytes of stored objects", usage.bytes)
        yield GaugeMetricFamily("l3store_disk_bytes", "Bytes of their files", usage.disk_bytes)
        yield GaugeMetricFamily("l3store_capacity_bytes", "What the files may take", self._store.capacity)
        tier = self._store.tier
        yield GaugeMetricFamily("l3store_ram_bytes", "Memory for bodies and hot cells", tier.pool.total)
        yield GaugeMetricFamily("l3store_ram_used_bytes", "Of it, in use", tier.pool.used)
        yield GaugeMetricFamily("l3store_ram_resident_bytes", "Of it, objects that are kept", tier.resident_bytes)
        yield GaugeMetricFamily("l3store_ram_unwritten_bytes", "Answered and not yet written", tier.unwritten_bytes)
        yield CounterMetricFamily("l3store_ram_hit_bytes", "Cells read from memory", tier.hit_bytes)
        yield CounterMetricFamily("l3store_ram_missed_bytes", "Cells read from the backend", tier.missed_bytes)
        for field in dataclasses.fields(self._store.counters):
            name = f"l3store_{field.name}"
            yield CounterMetricFamily(name, field.name.replace("_", " "), getattr(self._store.counters, field.name))


class Measured:
    """ASGI middleware that counts requests by route, not by path: a path has a key in it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.monotonic()
        try:
            await self._app(scope, receive, noting)
        except Exception:
            # Answered further out, where it cannot be seen from here.
            status = status or 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.answered(scope["method"], route, status, time.monotonic() - began)
