"""The bars, and whether they are met: medians of ratios that are paired round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from l3client.bench.rounds import Results, Sample
from l3client.bench.stats import Spread, paired, quantile

Metric = Callable[[Sample], float]


def rate(sample: Sample) -> float:
    """Bytes a second."""
    return sample.moved / sample.seconds


def server_cpu(sample: Sample) -> float:
    """Seconds a byte, up to the last answer."""
    return sample.server_cpu / sample.moved


def settled_cpu(sample: Sample) -> float:
    """Seconds a byte, with what was done behind."""
    return sample.settled_cpu / sample.moved


def median_latency(sample: Sample) -> float:
    """Seconds."""
    return quantile(sample.latencies, 0.5)


def ready(sample: Sample) -> float:
    """Seconds until all objects of a folder are known: to a service that starts, or to `find`."""
    return sample.parts["ready"]


def index_bytes(sample: Sample) -> float:
    """Bytes of memory that each stored object takes, as growth of RSS."""
    return sample.parts["index_bytes"]


def of_bound(sample: Sample) -> float:
    """The first layer's time as a part of what it may take."""
    return sample.parts["of_bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """``who`` over ``than`` in a case; ``than`` None: the metric itself is the ratio."""

    text: str
    case: str
    who: str
    than: str | None
    metric: Metric
    limit: float
    at_least: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``ratio`` and ``met`` are None where it was not measured; ``why`` says so then."""

    bar: Bar
    ratio: Spread | None
    met: bool | None
    why: str = ""

    @property
    def limit(self) -> str:
        return f"{'>=' if self.bar.at_least else '<='} {self.bar.limit:g}"


OURS, RAM, BARE, BARE_FILE = "l3store", "l3store, ack ram", "bare", "bare file"
PEERS = ("redis", "lmcache", "mooncake", "fastapi")
LOCAL = "local files"
LAYERED, ONE_OBJECT = "l3store, layer order", "l3store, one object"
MANY, FEW, FIND = "l3store, many", "l3store, few", "find"

BARS: tuple[Bar, ...] = (
    Bar(text="GET, 4 connections, of the ceiling", case="get/4", who=OURS, than=BARE, metric=rate, limit=0.75),
    Bar(text="GET, 4 connections, over nginx", case="get/4", who=OURS, than="nginx", metric=rate, limit=1.2),
    *(
        Bar(text=f"GET, 4 connections, over {peer}", case="get/4", who=OURS, than=peer, metric=rate, limit=1.0)
        for peer in (*PEERS, LOCAL)
    ),
    Bar(text="GET, 1 connection, of the ceiling", case="get/1", who=OURS, than=BARE, metric=rate, limit=0.7),
    Bar(text="PUT --ack ram, 4 connections, of the ceiling", case="put/4", who=RAM, than=BARE, metric=rate, limit=0.6),
    Bar(text="PUT --ack ram, 4 connections, over nginx", case="put/4", who=RAM, than="nginx", metric=rate, limit=2.0),
    *(
        bar
        for n in (1, 4)
        for bar in (
            Bar(
                text=f"PUT --ack file, {n} connection{'s' * (n > 1)}, of receive-and-write",
                case=f"put/{n}", who=OURS, than=BARE_FILE, metric=rate, limit=0.7,
            ),
            Bar(
                text=f"PUT --ack file, {n} connection{'s' * (n > 1)}, over nginx",
                case=f"put/{n}", who=OURS, than="nginx", metric=rate, limit=1.0,
            ),
        )
    ),
    Bar(
        text="service CPU of GET, over the bare server's",
        case="get/4", who=OURS, than=BARE, metric=server_cpu, limit=2.0, at_least=False,
    ),
    Bar(
        text="service CPU of PUT --ack ram, over the bare server's, up to the answer",
        case="put/4", who=RAM, than=BARE, metric=server_cpu, limit=2.2, at_least=False,
    ),
    Bar(
        text="service CPU of PUT --ack ram, over the bare server's, its file included",
        case="put/4", who=RAM, than=BARE, metric=settled_cpu, limit=2.2, at_least=False,
    ),
    Bar(
        text="service CPU of pages/read, over the bare server's",
        case="read", who=OURS, than=BARE, metric=server_cpu, limit=1.3, at_least=False,
    ),
    *(
        bar
        for who, order in ((OURS, "page"), (LAYERED, "layer"))
        for bar in (
            Bar(
                text=f"pages/read, {order} order, of one object with as many bytes",
                case="read", who=who, than=ONE_OBJECT, metric=rate, limit=0.9,
            ),
            Bar(
                text=f"pages/read, {order} order, of the ceiling",
                case="read", who=who, than=BARE, metric=rate, limit=0.7,
            ),
        )
    ),
    Bar(
        text="one 64 KiB GET, p50, over a plain FastAPI route",
        case="small", who=OURS, than="fastapi", metric=median_latency, limit=0.7, at_least=False,
    ),
    Bar(
        text="first layer of a layer-major read, over 1.5 x its share + a one-page read",
        case="layers", who="l3store, first layer", than=None, metric=of_bound, limit=1.0, at_least=False,
    ),
    Bar(
        text="pages/match, over one Redis EXISTS of the same names",
        case="match", who=OURS, than="redis", metric=median_latency, limit=0.5, at_least=False,
    ),
    Bar(
        text="GET, 4 connections, sums on over off",
        case="get/4", who=OURS, than="l3store, sums off", metric=rate, limit=0.9,
    ),
    Bar(
        text="GET, 1 connection, sums on over off",
        case="get/1", who=OURS, than="l3store, sums off", metric=rate, limit=0.75,
    ),
    Bar(
        text="one 64 KiB GET, p50, many objects stored, over few",
        case="many", who=MANY, than=FEW, metric=median_latency, limit=1.2, at_least=False,
    ),
    Bar(
        text="memory of the index with many objects, bytes an object",
        case="many", who=MANY, than=None, metric=index_bytes, limit=400, at_least=False,
    ),
    Bar(
        text="start with many objects after kill -9 until ready, over find in the same folder",
        case="many", who=MANY, than=FIND, metric=ready, limit=1.0, at_least=False,
    ),
)  # fmt: skip
"""``many`` and ``few`` are numbers that the heading of their case says: 1,000,000 and 1,000 by default."""


def judge(results: Results, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """One verdict for each bar, in order."""
    return [_judge(bar, results) for bar in bars]


def _judge(bar: Bar, results: Results) -> Verdict:
    for name in (bar.who, bar.than):
        if name is not None and name in results.absent:
            return Verdict(bar=bar, ratio=None, met=None, why=f"{name}: {results.absent[name]}")
    mine = results.samples.get((bar.case, bar.who), {})
    values = {turn: bar.metric(sample) for turn, sample in mine.items()}
    if bar.than is None:
        ratios = list(values.values())
    else:
        theirs = results.samples.get((bar.case, bar.than), {})
        ratios = paired(values, {turn: bar.metric(sample) for turn, sample in theirs.items()})
    if not ratios:
        return Verdict(bar=bar, ratio=None, met=None, why="it was not chosen")
    ratio = Spread.of(ratios)
    met = ratio.median >= bar.limit if bar.at_least else ratio.median <= bar.limit
    return Verdict(bar=bar, ratio=ratio, met=met)
