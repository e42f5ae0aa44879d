"""Prometheus metrics, in the design's words."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from l3store.index import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """One registry for one service. Counted as plain numbers, on the loop's thread, and shaped when they are asked."""

    def __init__(self, store: Store) -> None:
        self.received_bytes = 0
        self.sent_bytes = 0
        self.requests: dict[tuple[str, str, int], int] = {}
        self.seconds: dict[tuple[str, str], Histogram] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(self, store))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        key = (method, route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        histogram = self.seconds.get(key[:2])
        if histogram is None:
            histogram = self.seconds[key[:2]] = Histogram()
        histogram.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class Histogram:
    """How many observations fell into each of `_BUCKETS`, or beyond them; and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(_BUCKETS, value)] += 1
        self.sum += value

    def cumulated(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as the exposition format wants them."""
        counts, total = [], 0
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self.counts, strict=True):
            total += count
            counts.append((bound, float(total)))
        return counts


class _Collected(Collector):
    def __init__(self, metrics: Metrics, store: Store) -> None:
        self._metrics = metrics
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield from self._wire()
        yield from self._stored()

    def _wire(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("l3store_requests", "Requests answered", labels=["method", "route", "status"])
        for (method, route, status), count in self._metrics.requests.items():
            requests.add_metric([method, route, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "l3store_request_seconds",
            "From the headers of a request to the last byte of its answer",
            labels=["method", "route"],
        )
        for labels, histogram in self._metrics.seconds.items():
            seconds.add_metric(labels, histogram.cumulated(), histogram.sum)
        yield seconds
        yield CounterMetricFamily("l3store_received_bytes", "Object bytes received", self._metrics.received_bytes)
        yield CounterMetricFamily("l3store_sent_bytes", "Object bytes sent", self._metrics.sent_bytes)

    def _stored(self) -> Iterator[Metric]:
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
