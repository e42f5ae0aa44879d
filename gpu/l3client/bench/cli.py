"""`l3store bench`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from l3client.bench.bare import Bare, BareFile
from l3client.bench.contender import Contender, MismatchError
from l3client.bench.host import Host
from l3client.bench.lmcache_peer import LMCache
from l3client.bench.local import LocalFiles
from l3client.bench.many import measure_many
from l3client.bench.memory import warm_free_pages
from l3client.bench.mooncake_peer import Mooncake
from l3client.bench.nginx import Nginx
from l3client.bench.ours import AckRam, BareClient, FirstLayer, LayerOrder, OneObject, Ours, SharedService, WithoutSums
from l3client.bench.plain import Plain
from l3client.bench.process import StartError
from l3client.bench.redis_peer import Redis
from l3client.bench.report import Report
from l3client.bench.rounds import Results, measure
from l3client.bench.service import Service
from l3client.bench.workload import CASES, Case, Kind, Sizes, Workload
from l3store.errors import L3Error

PEERS = ("nginx", "redis", "lmcache", "mooncake", "fastapi", "local")
_QUICK_ROUNDS = 2


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where bytes differ or we fail, or with --strict a bar is missed; 2 for wrong arguments."""
    try:
        peers = _chosen("peer", args.peers, PEERS)
        names = _chosen("case", args.cases, [case.name for case in CASES])
    except ValueError as error:
        _complain(f"{error}")
        return 2
    cases = [case for case in CASES if case.name in names]
    sizes = Sizes.quick() if args.quick else Sizes()
    if args.objects is not None:
        sizes = replace(sizes, many_objects=args.objects)
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else 7)
    if rounds < 1 or args.prefill_tokens_per_second <= 0:
        _complain("--rounds and --prefill-tokens-per-second must be positive")
        return 2
    if sizes.many_objects <= sizes.many_few:
        _complain(f"--objects must be more than the {sizes.many_few:,} that it is compared with")
        return 2
    host, began = Host.now(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="l3store-bench-", dir=args.folder) as folder:
            results, loop = _measured(Workload(sizes), Path(folder), cases, peers, rounds, args)
            # Before the folder is removed, which takes long where many objects were stored.
            host, seconds = host.ended(loop), time.monotonic() - began
    except MismatchError as error:
        _complain(f"FAILED: {error}")
        return 1
    except (L3Error, StartError, OSError, RuntimeError) as error:
        _complain(f"{error}")
        return 1
    prefill = args.prefill_tokens_per_second
    report = Report.of(results, cases, sizes, rounds, prefill=prefill, seconds=seconds, host=host)
    sys.stdout.write((json.dumps(report.as_json(), indent=1) if args.json else report.as_text()) + "\n")
    return 1 if args.strict and report.missed else 0


def _measured(
    work: Workload, folder: Path, cases: Sequence[Case], peers: Sequence[str], rounds: int, args: argparse.Namespace
) -> tuple[Results, str | None]:
    """The cases side by side, then the one that has the machine to itself; and the service's event loop."""
    progress = _progress()
    needed = _needed(contenders(work, folder, peers, args), cases)
    warm = partial(warm_free_pages, folder, 4 * work.moved_bytes)
    results = measure(needed, cases, rounds, warm=warm, progress=progress)
    loop = next((c.service.loop for c in needed if isinstance(c, Ours) and c.service.loop), None)
    if any(case.kind is Kind.MANY for case in cases):
        loop = measure_many(work, folder, args.ram, rounds, results, progress)
    return results, loop


def contenders(work: Workload, folder: Path, peers: Sequence[str], args: argparse.Namespace) -> list[Contender]:
    """The ceiling, ourselves and the peers chosen, found or not: each says itself what it lacks."""
    filed = SharedService(Service(folder / "l3store", ack="file", ram=args.ram))
    quick = SharedService(Service(folder / "l3store-ram", ack="ram", ram=args.ram))
    makers: dict[str, Callable[[], Contender]] = {
        "nginx": lambda: Nginx(work, folder / "nginx"),
        "redis": lambda: Redis(work, folder / "redis"),
        "lmcache": lambda: LMCache(work, folder / "lmcache", args.lmcache_python),
        "mooncake": lambda: Mooncake(work, folder / "mooncake", args.mooncake_python),
        "fastapi": lambda: Plain(work, folder / "fastapi"),
        "local": lambda: LocalFiles(work, folder / "local"),
    }
    ours = (Ours, WithoutSums, LayerOrder, OneObject, BareClient, FirstLayer)
    return [
        Bare(work, folder / "bare"),
        BareFile(work, folder / "bare-file"),
        *(make(work, filed) for make in ours),
        AckRam(work, quick),
        *(makers[peer]() for peer in peers),
    ]


def _needed(made: Sequence[Contender], cases: Sequence[Case]) -> list[Contender]:
    """Those who have something to do."""
    kinds = {case.kind for case in cases}
    return [contender for contender in made if contender.kinds & kinds]


def _chosen(what: str, text: str, known: Sequence[str]) -> list[str]:
    """A list as ``all``, ``none`` or names with commas. Raises ValueError."""
    if text == "all":
        return list(known)
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return names


def _progress() -> Callable[[str], None]:
    """Shown to a person only."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(what: str) -> None:
        sys.stderr.write(f"\r\033[K{what}")
        sys.stderr.flush()

    return show


def _complain(text: str) -> None:
    sys.stderr.write(f"l3store bench: {text}\n")
