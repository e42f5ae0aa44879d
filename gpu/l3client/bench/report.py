"""What was measured, as rows: for JSON, and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from l3client.bench.bars import BARE, BARE_FILE, LAYERED, OURS, Verdict, judge, rate
from l3client.bench.host import Host
from l3client.bench.overhead import PageOverhead, page_overhead
from l3client.bench.rounds import Results, Sample
from l3client.bench.stats import HitCost, Spread, break_even, paired, quantile
from l3client.bench.workload import PAGE_TOKENS, TOKEN_BYTES, Case, Kind, Sizes

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender in one case, over all rounds.

    gb_per_second  of the rounds; None where a case moves no bytes
    ratios         paired: its rate over the ceiling's, over bare receive-and-write's, and ours over its. Where no bytes
                   move, its median latency against theirs, turned so that larger is faster
    p50, p99       seconds of single operations of all rounds, ``operations`` of them; of a batch where a batch is read
                   or written, of the first layer where that is what is timed
    ..._cpu        seconds for each GB
    """

    case: str
    contender: str
    rounds: int
    gb_per_second: Spread | None
    of_bare: Spread | None
    of_bare_file: Spread | None
    ours_over_it: Spread | None
    p50: float
    p99: float
    operations: int
    client_cpu: Spread | None
    server_cpu: Spread | None
    settled_cpu: Spread | None
    server_peak_bytes: int
    parts: dict[str, Spread]
    rates: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From how many tokens on a hit pays. ``tokens`` None: never at this rate."""

    contender: str
    gb_per_second: float
    fixed_seconds: float
    lookup_seconds_per_page: float
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a run has to say. ``seconds``: of the whole run."""

    host: Host
    sizes: Sizes
    rounds: int
    prefill_tokens_per_second: float
    seconds: float
    rows: list[Row]
    verdicts: list[Verdict]
    break_even: list[BreakEven]
    page_overhead: list[PageOverhead]
    results: Results
    cases: Sequence[Case]

    @classmethod
    def of(
        cls,
        results: Results,
        cases: Sequence[Case],
        sizes: Sizes,
        rounds: int,
        *,
        prefill: float,
        seconds: float,
        host: Host,
    ) -> Report:
        rows = [
            _row(case, name, results)
            for case in cases
            for name in results.abouts
            if (case.name, name) in results.samples
        ]
        even = [e for name in results.abouts if (e := _break_even(name, rows, sizes, prefill)) is not None]
        pages = sizes.batches * sizes.batch_pages
        overheads = [o for name in (OURS, LAYERED) if (o := page_overhead(results, name, pages)) is not None]
        return cls(
            host=host, sizes=sizes, rounds=rounds, prefill_tokens_per_second=prefill, seconds=seconds, rows=rows,
            verdicts=judge(results), break_even=even, page_overhead=overheads, results=results, cases=cases,
        )  # fmt: skip

    @property
    def missed(self) -> bool:
        return any(verdict.met is False for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.host),
            "sizes": asdict(self.sizes),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "verified_bytes": self.results.verified,
            "contenders": self.results.abouts,
            "absent": self.results.absent,
            "rows": [asdict(row) for row in self.rows],
            "bars": [
                {
                    "bar": v.bar.text, "case": v.bar.case, "limit": v.limit,
                    "ratio": None if v.ratio is None else asdict(v.ratio), "met": v.met, "why": v.why,
                }
                for v in self.verdicts
            ],
            "page_overhead": [asdict(o) for o in self.page_overhead],
            "break_even": {
                "prefill_tokens_per_second": self.prefill_tokens_per_second,
                "kv_bytes_per_token": TOKEN_BYTES,
                "contenders": [asdict(e) for e in self.break_even],
            },
        }  # fmt: skip

    def as_text(self) -> str:
        head = (
            f"{self.host.as_text()}\n"
            f"{self.rounds} rounds in {self.seconds:.0f} s; {self.results.verified / _GB:.1f} GB compared, all equal. "
            "Medians (min-max).\n"
            "bare: ratio to the ceiling of the same round; l3/it: l3store to this one in the same round. "
            "CPU in seconds for each GB."
        )
        blocks = [head]
        blocks += [self._case(case) for case in self.cases if any(r.case == case.name for r in self.rows)]
        if self.page_overhead:
            blocks.append(self._page_overhead())
        blocks += [self._bars(), self._break_even(), self._who()]
        return "\n\n".join(blocks)

    def _case(self, case: Case) -> str:
        rows = [row for row in self.rows if row.case == case.name]
        columns: list[tuple[str, Callable[[Row], str]]] = [
            ("GB/s", lambda r: _wide(r.gb_per_second)),
            ("bare", lambda r: _ratio(r.of_bare)),
            ("bare file", lambda r: _ratio(r.of_bare_file)),
            ("l3/it", lambda r: _ratio(r.ours_over_it)),
            ("p50 ms", lambda r: f"{r.p50 * 1e3:.3f}"),
            ("p99 ms", lambda r: f"{r.p99 * 1e3:.3f}"),
            ("client CPU", lambda r: _ratio(r.client_cpu)),
            ("server CPU", lambda r: _ratio(r.server_cpu)),
            ("settled", lambda r: _ratio(r.settled_cpu)),
            ("peak MiB", lambda r: f"{r.server_peak_bytes / (1 << 20):.0f}" if r.server_peak_bytes else "-"),
        ]
        if case.kind not in {Kind.PUT, Kind.WRITE}:
            columns = [column for column in columns if column[0] not in {"bare file", "settled"}]
        lines = [["", *(name for name, _ in columns)]]
        lines += [[row.contender, *(show(row) for _, show in columns)] for row in rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = [
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        extra = [
            f"  {row.contender}: "
            + ", ".join(f"{name.removesuffix('_bytes')} {_parts(name, s)}" for name, s in row.parts.items())
            for row in rows
            if row.parts
        ]
        return "\n".join([f"{case.title} ({_amount(case, self.sizes)})", *text, *extra])

    def _bars(self) -> str:
        lines = ["Bars: medians of ratios that are paired by round"]
        width = max(len(v.bar.text) for v in self.verdicts)
        for v in self.verdicts:
            if v.ratio is None:
                lines.append(f"  {v.bar.text.ljust(width)}  {v.limit:>8}  not measured: {v.why}")
            else:
                said = "met" if v.met else "MISSED"
                lines.append(f"  {v.bar.text.ljust(width)}  {v.limit:>8}  {_wide(v.ratio):<18} {said}")
        return "\n".join(lines)

    def _page_overhead(self) -> str:
        lines = ["Python overhead of a page: CPU of pages/read less that of one GET of as many bytes, us a page"]
        lines += [
            f"  {o.contender:<22} client {_wide(o.client_us)}, server {_wide(o.server_us)}" for o in self.page_overhead
        ]
        return "\n".join(lines)

    def _break_even(self) -> str:
        prefill = self.prefill_tokens_per_second
        head = (
            f"Break-even at {prefill:,.0f} tokens/s of prefill and {TOKEN_BYTES:,} KV bytes a token: computing makes "
            f"{TOKEN_BYTES * prefill / _GB:.2f} GB of KV a second"
        )
        lines = [head]
        for e in self.break_even:
            pays = "never pays" if e.tokens is None else f"pays from {e.tokens:,} tokens on"
            lines.append(
                f"  {e.contender:<22} {e.gb_per_second:.2f} GB/s, {e.fixed_seconds * 1e3:.2f} ms fixed, "
                f"{e.lookup_seconds_per_page * 1e6:.1f} us of lookup a page: {pays}"
            )
        return "\n".join(lines)

    def _who(self) -> str:
        lines = [f"{name}: {about}" for name, about in self.results.abouts.items()]
        lines += [f"{name}: left out; {why}" for name, why in self.results.absent.items()]
        return "\n".join(lines)


def _row(case: Case, name: str, results: Results) -> Row:
    samples = results.samples[case.name, name]
    speed: Callable[[Sample], float] = rate if any(s.moved for s in samples.values()) else _calls
    mine = {turn: speed(s) for turn, s in samples.items()}

    def over(other: str) -> Spread | None:
        base = {turn: speed(s) for turn, s in results.samples.get((case.name, other), {}).items()}
        ratios = paired(mine, base)
        return Spread.of(ratios) if ratios and other != name else None

    ours = {turn: speed(s) for turn, s in results.samples.get((case.name, OURS), {}).items()}
    over_it = paired(ours, mine)
    latencies = [latency for s in samples.values() for latency in s.latencies]
    moves = speed is rate

    def per_gb(value: Callable[[Sample], float]) -> Spread | None:
        return Spread.of([value(s) / s.moved * _GB for s in samples.values()]) if moves else None

    return Row(
        case=case.name,
        contender=name,
        rounds=len(samples),
        gb_per_second=Spread.of([r / _GB for r in mine.values()]) if moves else None,
        of_bare=over(BARE),
        of_bare_file=over(BARE_FILE),
        ours_over_it=Spread.of(over_it) if over_it and name != OURS else None,
        p50=quantile(latencies, 0.5),
        p99=quantile(latencies, 0.99),
        operations=len(latencies),
        client_cpu=per_gb(lambda s: s.client_cpu),
        server_cpu=per_gb(lambda s: s.server_cpu),
        settled_cpu=per_gb(lambda s: s.settled_cpu),
        server_peak_bytes=results.peaks.get(name, 0),
        parts={
            part: Spread.of([s.parts[part] for s in samples.values()]) for part in next(iter(samples.values())).parts
        },
        rates=[r / _GB if moves else r for r in mine.values()],
    )


def _calls(sample: Sample) -> float:
    """Calls a second, by the median call."""
    return 1 / quantile(sample.latencies, 0.5)


def _break_even(name: str, rows: Sequence[Row], sizes: Sizes, prefill: float) -> BreakEven | None:
    """At the contender's fastest reading row; fixed is one 64 KiB GET, lookup is a page's share of the match row."""
    mine = {row.case: row for row in rows if row.contender == name}
    speeds = [r.gb_per_second.median for c, r in mine.items() if c in {"get/1", "get/4", "read"} and r.gb_per_second]
    if not speeds or "small" not in mine:
        return None
    lookup = mine["match"].p50 / sizes.match_pages if "match" in mine else 0.0
    cost = HitCost(fixed=mine["small"].p50, per_page=lookup, bytes_per_second=max(speeds) * _GB)
    tokens = break_even(cost, token_bytes=TOKEN_BYTES, page_tokens=PAGE_TOKENS, prefill_tokens_per_second=prefill)
    return BreakEven(
        contender=name,
        gb_per_second=max(speeds),
        fixed_seconds=cost.fixed,
        lookup_seconds_per_page=lookup,
        tokens=tokens,
    )


def _amount(case: Case, sizes: Sizes) -> str:
    batch = f"{sizes.batches} of {sizes.batch_pages} pages x 4 objects of 64 KiB a round; times are of one batch"
    return {
        Kind.GET: f"{sizes.passes} x {sizes.objects} a round, warm",
        Kind.PUT: f"{sizes.objects} a round",
        Kind.READ: batch,
        Kind.WRITE: batch,
        Kind.SMALL: f"{sizes.small_reads} a round, warm",
        Kind.LAYERS: f"{sizes.layers_pages} pages x {sizes.layers} layers x 4 groups of 64 KiB",
        Kind.MATCH: f"{sizes.match_pages:,} pages x 4 objects, {sizes.match_calls} calls a round",
        Kind.MANY: f"{sizes.many_objects:,} objects of 256 bytes, 4 a page, against {sizes.many_few:,}; "
        f"{sizes.many_reads} of 64 KiB in both, each read once a round after a start",
    }[case.kind]


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def _wide(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _parts(name: str, spread: Spread) -> str:
    """Parts are seconds, but for those that say otherwise."""
    if name == "of_bound":
        return _wide(spread)
    if name == "resident_bytes":
        return f"{spread.median / (1 << 20):.1f} MiB"
    if name == "index_bytes":
        return f"{spread.median:.0f} bytes an object"
    return f"{spread.median * 1e3:.1f} ms"
