"""`l3store bench` measures what is installed, names what is not, and does not pass over a wrong byte."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from l3client.bench import cli
from l3client.bench.bare import Bare
from l3client.bench.contender import Contender, Handle
from l3client.bench.local import FileHandle, LocalFiles
from l3client.bench.workload import Item, Workload
from l3store.cli import main

READS = {"get/1", "get/4", "read", "small"}
OBJECTS = READS | {"put/1", "put/4", "write"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = [sys.executable, "-m", "l3store", "bench", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    written: dict[str, Any] = json.loads(done.stdout)
    return written


def cases_of(report: dict[str, Any], contender: str) -> set[str]:
    return {row["case"] for row in report["rows"] if row["contender"] == contender}


def test_everything_that_can_be_measured_is(report: dict[str, Any]) -> None:
    assert cases_of(report, "bare") == OBJECTS
    assert cases_of(report, "bare file") == {"put/1", "put/4"}
    assert cases_of(report, "l3store") == OBJECTS | {"match"}
    assert cases_of(report, "l3store, layer order") == {"read"}
    assert cases_of(report, "l3store, one object") == {"read"}
    assert cases_of(report, "l3store, first layer") == {"layers"}
    assert cases_of(report, "l3store, many") == cases_of(report, "l3store, few") == {"many"}
    assert cases_of(report, "find") == ({"many"} if shutil.which("find") else set())
    assert cases_of(report, "fastapi") == OBJECTS
    assert cases_of(report, "local files") == OBJECTS | {"match"}
    if shutil.which("nginx"):
        assert cases_of(report, "nginx") == OBJECTS
    if shutil.which("redis-server") and importlib.util.find_spec("redis"):
        assert cases_of(report, "redis") == OBJECTS | {"match"}


def test_who_is_not_measured_is_named(report: dict[str, Any]) -> None:
    peers = {"nginx", "redis", "lmcache", "mooncake", "fastapi", "local files"}
    assert peers <= report["contenders"].keys() | report["absent"].keys()
    assert not report["contenders"].keys() & report["absent"].keys()
    assert all("not found" in why for why in report["absent"].values())


def test_figures_make_sense(report: dict[str, Any]) -> None:
    assert report["verified_bytes"] > 100 << 20
    for row in report["rows"]:
        spreads = [row[name] for name in ("gb_per_second", "of_bare", "of_bare_file", "ours_over_it", "client_cpu")]
        assert all(0 < s["low"] <= s["median"] <= s["high"] for s in spreads if s is not None), row
        assert 0 < row["p50"] <= row["p99"]
        assert row["rounds"] == report["rounds"]
        if row["contender"] not in {"local files", "find"}:
            assert row["server_peak_bytes"] > 1 << 20
            assert row["server_cpu"] is None or row["server_cpu"]["median"] > 0
    # Memory for each of so few objects is noise of either sign.
    ratios = [bar["ratio"]["median"] for bar in report["bars"] if bar["ratio"] and "memory" not in bar["bar"]]
    assert ratios
    assert all(ratio > 0 for ratio in ratios)
    assert all(bar["met"] is not None or bar["why"] for bar in report["bars"])


def test_the_report_says_where_it_was_made(report: dict[str, Any]) -> None:
    machine = report["machine"]
    assert machine["loop"] == ("uvloop" if importlib.util.find_spec("uvloop") else "asyncio")
    assert all(machine[name] for name in ("version", "date", "cpu", "cores", "system", "python"))


def test_many_objects_beside_few(report: dict[str, Any]) -> None:
    """A service that was killed starts with all that it stored; its figures are there, and judged."""
    rows = {row["contender"]: row for row in report["rows"] if row["case"] == "many"}
    for name in ("l3store, many", "l3store, few"):
        assert rows[name]["operations"] == report["rounds"] * report["sizes"]["many_reads"]
        assert rows[name]["parts"]["ready"]["low"] > 0
        assert rows[name]["parts"]["resident_bytes"]["low"] > 1 << 20
    judged = [bar for bar in report["bars"] if bar["case"] == "many"]
    assert len(judged) == 3
    assert all(bar["ratio"] is not None for bar in judged if shutil.which("find") or "find" not in bar["bar"])


def test_the_overhead_of_a_page(report: dict[str, Any]) -> None:
    assert [o["contender"] for o in report["page_overhead"]] == ["l3store", "l3store, layer order"]


def test_without_find_the_start_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("l3client.bench.many.shutil.which", lambda _: None)
    args = ["--quick", "--rounds", "1", "--cases", "many", "--peers", "none", "--objects", "300", "--json"]
    assert main(["bench", *args]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["sizes"]["many_objects"] == 300
    assert {row["contender"] for row in written["rows"]} == {"l3store, many", "l3store, few"}
    assert [bar["why"] for bar in written["bars"] if bar["case"] == "many"] == [
        "", "", "find: not found: no find in PATH"
    ]  # fmt: skip


class Liar(LocalFiles):
    """Gives one wrong byte, now and then."""

    name = "liar"

    def connect(self) -> Handle:
        return LyingHandle(self.folder)


class LyingHandle(FileHandle):
    reads = 0

    def get(self, item: Item, into: memoryview) -> None:
        super().get(item, into)
        self.reads += 1
        if self.reads % 7 == 0:
            into[len(into) // 2] ^= 0x10


class Rotten(LocalFiles):
    """One stored byte rots before the first round."""

    name = "rotten"

    def load(self) -> None:
        super().load()
        path = self.folder / str(self.work.big[3].key)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


class Forgetful(LocalFiles):
    """Says that it stored what it did not."""

    name = "forgetful"

    def write_batch(self, batch: object) -> None:
        del batch


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in this process, with the ceiling and one more contender only."""

    def run(kind: type[LocalFiles], *args: str) -> tuple[int, str, str]:
        def contenders(work: Workload, folder: Path, peers: Sequence[str], args: argparse.Namespace) -> list[Contender]:
            del peers, args
            return [Bare(work, folder / "bare"), kind(work, folder / "other")]

        monkeypatch.setattr(cli, "contenders", contenders)
        status = main(["bench", "--quick", "--rounds", "1", *args])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("kind", [Liar, Rotten])
def test_a_wrong_byte_fails_the_run(bench: Any, kind: type[LocalFiles]) -> None:
    status, out, err = bench(kind, "--json")
    assert (status, out) == (1, "")
    assert f"FAILED: {kind.name} gave other bytes of " in err


def test_a_peer_that_loses_bytes_is_left_out(bench: Any) -> None:
    status, out, err = bench(Forgetful)
    assert (status, err) == (0, "")
    assert "forgetful: left out; failed at write: " in out


def test_strict_fails_where_a_bar_is_missed(bench: Any) -> None:
    """Nothing of ours is measured here, so that no bar is."""
    status, out, _ = bench(LocalFiles, "--strict", "--cases", "get/1")
    assert status == 0
    assert "not measured" in out


@pytest.mark.parametrize(
    "args",
    [
        ("--peers", "memcached"),
        ("--cases", "get/9"),
        ("--rounds", "-1"),
        ("--objects", "200"),
        ("--prefill-tokens-per-second", "0"),
    ],
)
def test_wrong_arguments_are_said(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", *args]) == 2
    assert capsys.readouterr().err.startswith("l3store bench: ")
