"""The case of many objects, over services that do nothing: who is read when, and what is compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from l3client.bench import host, many
from l3client.bench.bars import FEW, FIND, MANY, judge
from l3client.bench.contender import MismatchError
from l3client.bench.crowd import Crowd
from l3client.bench.host import Host
from l3client.bench.process import Server
from l3client.bench.rounds import Results, Sample
from l3client.bench.service import Service
from l3client.bench.workload import CELL, Item, Sizes, Workload
from l3client.transport import L3Client, Part
from l3client.transport.control import Control
from l3store.layout import Key

SIZES = Sizes(
    objects=1, batches=1, batch_pages=4, layers_pages=1, layers=2, many_objects=30, many_few=10, many_reads=47
)
LOG: list[str] = []


class FakeControl(Control):
    """Knows as many pages as ``known``."""

    def __init__(self, known: int) -> None:
        self.known = known

    def match(self, part: Part, page_hashes: Sequence[str]) -> int:
        del part
        return min(self.known, len(page_hashes))


@dataclass
class FakeClient(L3Client):
    """Has the objects; of one it gives a wrong byte."""

    items: dict[str, Item]
    wrong: Key | None = None
    known: int = 0

    @property
    def control(self) -> Control:
        return FakeControl(self.known)

    def get(self, key: Key, into: memoryview, *, cell_bytes: int) -> None:
        assert cell_bytes == len(into)
        into[:] = self.items[str(key)].data
        if key == self.wrong:
            into[-1] ^= 1


class FakeCrowd(Crowd):
    """Starts at once, with a kilobyte of memory for each object."""

    def set_client(self, client: L3Client) -> None:
        self._client = client

    def kill(self) -> None:
        LOG.append(f"kill {self.name}")

    def start(self) -> None:
        LOG.append(f"start {self.name}")
        self._begin()
        self.parts = {"ready": 3.0}
        self.resident = self.tiny << 10

    def read(self, items: list[Item], *, timed: bool = True) -> None:  # type: ignore[override]
        LOG.append(f"{'read' if timed else 'warm'} {self.name} {len(items)}")
        super().read(items, timed=timed)


@pytest.fixture
def work() -> Workload:
    LOG.clear()
    return Workload(SIZES)


@pytest.fixture
def crowds(work: Workload, tmp_path: Path) -> list[FakeCrowd]:
    return [FakeCrowd(name, Service(tmp_path, ram="1Mi"), work, tiny) for name, tiny in ((MANY, 30), (FEW, 10))]


def served(crowds: list[FakeCrowd], work: Workload, wrong: int | None = None) -> tuple[Item, ...]:
    items = many._read_items(work)[1]
    for crowd in crowds:
        crowd.set_client(FakeClient({str(i.key): i for i in items}, None if wrong is None else items[wrong].key))
    return items


@pytest.fixture(autouse=True)
def find(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(find: str, folder: Path) -> Sample:
        LOG.append(f"{find} {folder.name}")
        return Sample(
            seconds=2, moved=0, latencies=(2,), client_cpu=0, server_cpu=0, settled_cpu=0, parts={"ready": 2.0}
        )

    monkeypatch.setattr(many, "_find", look)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_round(turn: int, crowds: list[FakeCrowd], work: Workload) -> None:
    items = served(crowds, work)
    samples = many._round(crowds, items, turn, "find")
    started = [f"start {MANY}", f"start {FEW}"]
    assert LOG[:5] == [
        f"kill {MANY}",
        f"kill {FEW}",
        *(["find data", *started] if turn == 1 else [*started, "find data"]),
    ]
    pairs = [(MANY, FEW), (FEW, MANY), (MANY, FEW)] if turn == 2 else [(FEW, MANY), (MANY, FEW), (FEW, MANY)]
    assert LOG[5:7] == [f"warm {MANY} 20", f"warm {FEW} 20"]
    assert LOG[7:] == [f"read {who} {n}" for pair, n in zip(pairs, (20, 20, 7), strict=True) for who in pair]
    for name in (MANY, FEW):
        assert (samples[name].moved, len(samples[name].latencies)) == (47 * CELL, 47)
    assert samples[MANY].parts["index_bytes"] == 1024


def test_verdicts(crowds: list[FakeCrowd], work: Workload) -> None:
    samples = many._round(crowds, served(crowds, work), 1, "find")
    results = Results({("many", name): {1: sample} for name, sample in samples.items()})
    of_many = [v for v in judge(results) if v.bar.case == "many"]
    ratios = [v.ratio.median for v in of_many if v.ratio]
    assert len(of_many) == len(ratios) == 3
    assert ratios[1:] == [1024, 1.5]
    assert [v.met for v in of_many[1:]] == [False, False]


def test_without_find_there_is_no_sample_of_it(crowds: list[FakeCrowd], work: Workload) -> None:
    assert FIND not in many._round(crowds, served(crowds, work), 1, None)


@pytest.mark.parametrize("wrong", [0, many.GROUP, many.GROUP + 46])
def test_a_wrong_byte_ends_it(wrong: int, crowds: list[FakeCrowd], work: Workload) -> None:
    items = served(crowds, work, wrong)
    with pytest.raises(MismatchError, match=f"gave other bytes of {items[wrong].key}"):
        many._round(crowds, items, 1, "find")


def test_a_start_that_lost_a_page_ends_it(crowds: list[FakeCrowd]) -> None:
    crowd = crowds[0]
    tiny = crowd._tiny(30)
    assert len({str(item.key) for item in tiny}) == 30
    assert len({item.key.page_hash for item in tiny}) == 8
    crowd.set_client(FakeClient({}, known=8))
    crowd.check_known()
    crowd.set_client(FakeClient({}, known=7))
    with pytest.raises(MismatchError, match=f"started without the page {tiny[-1].key.page_hash}"):
        crowd.check_known()


def test_a_service_that_ended_says_why(tmp_path: Path) -> None:
    service = Service(tmp_path, ram="1Mi")
    assert service.ended is None
    service._server = server = Server([sys.executable, "-c", "print('broken'); raise SystemExit(3)"], tmp_path / "log")
    server.process.wait()
    assert service.ended == "it ended (exit status 3): broken"
    service.kill()
    assert (service.ended, service.running) == (None, False)


def test_where_it_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Host.now().ended("uvloop")
    text = made.as_text()
    assert all(word in text for word in (made.version, "on uvloop", made.cpu, f"{made.cores} cores", made.date))
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    assert Host.now().commit is None
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "none")
    assert Host.now().cpu
