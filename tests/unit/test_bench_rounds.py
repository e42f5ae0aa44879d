"""Rounds, verdicts and the report over contenders that do nothing: order, failures, lies, ratios."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from l3client.bench.bars import BARS, Bar, judge, rate
from l3client.bench.contender import MismatchError, NotFoundError, Timing, together
from l3client.bench.host import Host
from l3client.bench.overhead import page_overhead
from l3client.bench.report import Report
from l3client.bench.rounds import Results, Sample, measure
from l3client.bench.workload import CASES, Case, Kind, Sizes

GET = Case("get/4", "get", Kind.GET, 4)
LOG: list[str] = []


@dataclass
class Fake:
    """Moves ``speed`` bytes in one second, without doing it."""

    name: str
    speed: int = 100
    kinds: frozenset[Kind] = frozenset({Kind.GET})
    required: bool = False
    about: str = "nobody"
    fails: dict[str, Exception] = field(default_factory=dict)
    server_pids: list[int] = field(default_factory=list)
    client_pids: list[int] = field(default_factory=list)

    def _do(self, what: str) -> None:
        LOG.append(f"{what} {self.name}")
        if what in self.fails:
            raise self.fails[what]

    def start(self) -> None:
        self._do("start")

    def prepare(self, case: Case, turn: int) -> None:
        self._do("prepare")

    def run(self, case: Case) -> Timing:
        self._do("run")
        return Timing(1.0, self.speed, (0.5, 0.25), {"of_bound": 0.5} if case.kind is Kind.LAYERS else {})

    def verify(self, case: Case) -> int:
        self._do("verify")
        return self.speed

    def clean(self, case: Case) -> None:
        self._do("clean")

    def stop(self) -> None:
        self._do("stop")


def report_of(results: Results) -> Report:
    return Report.of(results, CASES, Sizes.quick(), 2, prefill=8000.0, seconds=1.0, host=Host.now().ended("asyncio"))


@pytest.fixture(autouse=True)
def log() -> None:
    LOG.clear()


def done(what: str) -> list[str]:
    return [entry.split(" ", 1)[1] for entry in LOG if entry.startswith(what)]


def test_every_round_measures_everyone_once_and_another_begins() -> None:
    results = measure([Fake("a"), Fake("b"), Fake("c")], [GET], 2)
    assert done("run") == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: sorted(s) for (_, name), s in results.samples.items()} == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    assert results.verified == 9 * 100
    assert done("stop") == ["c", "b", "a"]


def test_only_what_a_contender_can_do_is_asked_of_it() -> None:
    put = Case("put/4", "put", Kind.PUT, 4)
    results = measure([Fake("a"), Fake("b", kinds=frozenset({Kind.PUT}))], [GET, put], 1)
    assert set(results.samples) == {("get/4", "a"), ("put/4", "b")}


@pytest.mark.parametrize("when", ["start", "prepare", "run", "verify", "clean"])
def test_a_peer_that_fails_is_left_out_and_named(when: str) -> None:
    results = measure([Fake("a"), Fake("b", fails={when: OSError("gone")})], [GET], 3)
    assert "gone" in results.absent["b"]
    assert len(results.samples["get/4", "a"]) == 3
    assert sorted(done("stop")) == ["a", "b"]
    assert done(when).count("b") == 1


def test_a_peer_that_is_not_there_is_named() -> None:
    results = measure([Fake("a", fails={"start": NotFoundError("no a in PATH")})], [GET], 1)
    assert results.absent == {"a": "not found: no a in PATH"}
    assert not results.samples


@pytest.mark.parametrize("when", ["start", "run"])
def test_we_must_not_fail(when: str) -> None:
    with pytest.raises(OSError, match="gone"):
        measure([Fake("b"), Fake("a", required=True, fails={when: OSError("gone")})], [GET], 1)
    assert sorted(done("stop")) == ["a", "b"]


@pytest.mark.parametrize("when", ["run", "verify"])
def test_other_bytes_end_the_run_whoever_gave_them(when: str) -> None:
    with pytest.raises(MismatchError):
        measure([Fake("a"), Fake("b", fails={when: MismatchError("b")})], [GET], 1)
    assert sorted(done("stop")) == ["a", "b"]


def test_verdicts() -> None:
    results = measure(
        [Fake("bare", 100), Fake("l3store", 80), Fake("nginx", fails={"start": NotFoundError("none")})], [GET], 3
    )

    def bar(than: str | None, limit: float, *, at_least: bool = True) -> Bar:
        return Bar(text="", case="get/4", who="l3store", than=than, metric=rate, limit=limit, at_least=at_least)

    bars = [bar("bare", 0.75), bar("bare", 0.85), bar("bare", 0.85, at_least=False), bar("nginx", 1), bar("redis", 1)]
    verdicts = judge(results, bars)
    assert [verdict.met for verdict in verdicts] == [True, False, True, None, None]
    assert [verdict.ratio.median for verdict in verdicts[:3] if verdict.ratio] == [0.8] * 3
    assert verdicts[3].why == "nginx: not found: none"
    assert verdicts[4].why == "it was not chosen"


def test_the_report_has_every_row_and_every_bar() -> None:
    everything = frozenset(Kind)
    results = measure([Fake("bare", 200, everything), Fake("l3store", 100, everything)], CASES, 2)
    report = report_of(results)
    written = json.loads(json.dumps(report.as_json()))
    assert {(row["case"], row["contender"]) for row in written["rows"]} == {
        (case.name, name) for case in CASES for name in ("bare", "l3store")
    }
    assert [bar["bar"] for bar in written["bars"]] == [bar.text for bar in BARS]
    ours = next(row for row in written["rows"] if row["case"] == "get/4" and row["contender"] == "l3store")
    assert ours["of_bare"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert (ours["p50"], ours["p99"], ours["operations"]) == (0.25, 0.5, 4)
    assert report.missed
    assert written["machine"]["loop"] == "asyncio"
    text = report.as_text()
    assert all(case.title in text for case in CASES)
    assert "MISSED" in text


def test_the_overhead_of_a_page_is_paired_by_round() -> None:
    """Ours takes 30 and 50 ms of the client, one object 20 and 20, in rounds of 1,000 pages: 10 and 30 us a page."""

    def samples(client: dict[int, float], server: float) -> dict[int, Sample]:
        return {
            turn: Sample(
                seconds=1, moved=1, latencies=(1,), client_cpu=cpu, server_cpu=turn * server, settled_cpu=0
            )
            for turn, cpu in client.items()
        }  # fmt: skip

    results = Results()
    assert page_overhead(results, "l3store", 1000) is None
    results.samples["read", "l3store"] = samples({1: 0.03, 2: 0.05, 3: 9.0}, 0.003)
    assert page_overhead(results, "l3store", 1000) is None
    results.samples["read", "l3store, one object"] = samples({1: 0.02, 2: 0.02}, 0.002)
    overhead = page_overhead(results, "l3store", 1000)
    assert overhead is not None
    assert [overhead.client_us.low, overhead.client_us.high] == pytest.approx([10, 30])
    assert [overhead.server_us.low, overhead.server_us.high] == pytest.approx([1, 2])


def test_no_results_are_no_rows() -> None:
    report = report_of(Results(absent={"l3store": "x"}))
    assert (report.rows, report.missed) == ([], False)
    assert "l3store: left out; x" in report.as_text()


def test_threads_start_together_and_an_error_in_one_is_raised() -> None:
    seconds, results = together(lambda index: [float(index)], 4)
    assert seconds > 0
    assert sorted(results) == [0, 1, 2, 3]

    def work(index: int) -> list[float]:
        if index == 2:
            raise OSError("two")
        return []

    with pytest.raises(OSError, match="two"):
        together(work, 4)
