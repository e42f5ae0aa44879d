"""The measurement: rounds in which every contender does every case once, in rotated order, each run verified."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from l3client.bench.contender import Contender, MismatchError, NotFoundError
from l3client.bench.process import cpu_seconds, peak_bytes, settled_cpu_seconds
from l3client.bench.workload import WRITES, Case, Kind

_UNMOVED = frozenset({Kind.SMALL, Kind.MATCH})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one contender. Seconds; CPU seconds are user and system of all threads.

    ``server_cpu`` is up to the last answer; ``settled_cpu`` up to when the server had nothing more to do, which differs
    where it writes behind.
    """

    seconds: float
    moved: int
    latencies: tuple[float, ...]
    client_cpu: float
    server_cpu: float
    settled_cpu: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class Results:
    """``samples``: by case and contender, by round. ``absent``: who was not measured, or not to the end, and why."""

    samples: dict[tuple[str, str], dict[int, Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    abouts: dict[str, str] = field(default_factory=dict)
    verified: int = 0


def measure(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    rounds: int,
    *,
    warm: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """Start, measure ``rounds`` rounds after one that warms, and stop.

    ``warm`` is called before each run that moves much. Raises `MismatchError` where anyone's bytes are wrong, and what
    a required contender raises.
    """
    results = Results()
    running: list[Contender] = []
    try:
        for contender in contenders:
            progress(f"starting {contender.name}")
            running.append(contender)
            _start(contender, results)
        # What is loaded stays; the collector need not look at it between measurements.
        gc.collect()
        gc.freeze()
        for turn in range(rounds + 1):
            for case in cases:
                progress(f"round {turn} of {rounds}: {case.title}")
                for contender in _in_turn([c for c in running if case.kind in c.kinds], turn):
                    if contender.name not in results.absent:
                        _once(contender, case, turn, results, warm)
        for contender in running:
            results.peaks[contender.name] = peak_bytes(contender.server_pids)
    finally:
        gc.unfreeze()
        for contender in reversed(running):
            contender.stop()
    return results


def _start(contender: Contender, results: Results) -> None:
    try:
        contender.start()
    except NotFoundError as error:
        results.absent[contender.name] = f"not found: {error}"
    except Exception as error:
        if contender.required or isinstance(error, MismatchError):
            raise
        results.absent[contender.name] = f"did not start: {error}"
    else:
        results.abouts[contender.name] = contender.about


def _in_turn(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    """Another begins in every round, so that nobody always follows the same neighbour's leftovers at the same place."""
    first = turn % len(contenders) if contenders else 0
    return [*contenders[first:], *contenders[:first]]


def _once(contender: Contender, case: Case, turn: int, results: Results, warm: Callable[[], None]) -> None:
    try:
        contender.prepare(case, turn)
        if case.kind not in _UNMOVED:
            warm()
        sample = _sample(contender, case)
        results.verified += contender.verify(case)
        contender.clean(case)
    except Exception as error:
        if contender.required or isinstance(error, MismatchError):
            raise
        results.absent[contender.name] = f"failed at {case.name}: {error}"
        return
    if turn:
        results.samples.setdefault((case.name, contender.name), {})[turn] = sample


def _sample(contender: Contender, case: Case) -> Sample:
    servers, clients = contender.server_pids, contender.client_pids
    gc.collect()
    server_before, client_before = cpu_seconds(servers), time.process_time() + cpu_seconds(clients)
    timing = contender.run(case)
    client_cpu = time.process_time() + cpu_seconds(clients) - client_before
    server_cpu = cpu_seconds(servers) - server_before
    # What it writes behind is its cost too, and must not run while the next contender is measured.
    settled_cpu = settled_cpu_seconds(servers) - server_before if case.kind in WRITES else server_cpu
    return Sample(
        seconds=timing.seconds,
        moved=timing.moved,
        latencies=timing.latencies,
        client_cpu=client_cpu,
        server_cpu=server_cpu,
        settled_cpu=settled_cpu,
        parts=timing.parts,
    )
