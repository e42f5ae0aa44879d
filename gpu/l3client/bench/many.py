"""The case ``many``: what the number of stored objects costs in latency, in memory, and when a service starts.

Two services hold the same objects of 64 KiB; one holds a great many tiny objects besides, the other a few. In every
round both are killed and started again; then they are read from in turns. It is a phase of its own: nobody else runs.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from l3client.bench.bars import FEW, FIND, MANY
from l3client.bench.crowd import Crowd
from l3client.bench.process import peak_bytes
from l3client.bench.rounds import Results, Sample
from l3client.bench.service import Service
from l3client.bench.workload import CELL, Item, Workload, namespace, page_hash
from l3store.errors import L3Error
from l3store.layout import Coordinate, Key, Namespace

CASE = "many"
GROUP = 20
"""Reads of one service in a row, before it is the other's turn."""
_START_SECONDS = 600.0


def measure_many(
    work: Workload, folder: Path, ram: str, rounds: int, results: Results, progress: Callable[[str], None]
) -> str | None:
    """Add the samples of ``rounds`` rounds, after one that warms, to ``results``; the event loop of the services.

    Raises `MismatchError`, `StartError`, RuntimeError and errors of `l3store.errors`.
    """
    sizes = work.sizes
    spaces, items = _read_items(work)
    crowds = [
        Crowd(name, Service(folder / name.rpartition(" ")[2], ram=ram, ready_seconds=_START_SECONDS), work, tiny)
        for name, tiny in ((MANY, sizes.many_objects), (FEW, sizes.many_few))
    ]
    find = shutil.which("find")
    try:
        for crowd in crowds:
            progress(f"storing {crowd.tiny:,} objects")
            crowd.fill(spaces, items)
            results.abouts[crowd.name] = crowd.about
        if find is None:
            results.absent[FIND] = "not found: no find in PATH"
        else:
            results.abouts[FIND] = "find DIR -type f -printf '%s' in the folder with many objects, warm; ready: its end"
        # What was stored is not written to the disk while something is measured.
        os.sync()
        for turn in range(rounds + 1):
            progress(f"round {turn} of {rounds}: {CASE}")
            samples = _round(crowds, items, turn, find)
            results.verified += len(crowds) * sum(len(item.data) for item in items)
            for name, sample in samples.items() if turn else ():
                results.samples.setdefault((CASE, name), {})[turn] = sample
        results.peaks.update({crowd.name: peak_bytes(crowd.service.pids) for crowd in crowds})
        return crowds[0].service.loop
    except (L3Error, OSError) as error:
        for crowd in crowds:
            if why := crowd.service.ended:
                raise RuntimeError(f"{crowd.name}: {why}") from error
        raise
    finally:
        for crowd in crowds:
            crowd.stop()


def _read_items(work: Workload) -> tuple[Namespace, tuple[Item, ...]]:
    """What both store and what is read: 64 KiB each, `GROUP` for warming and then `Sizes.many_reads`."""
    spaces = namespace("many/read", layers=1, partition=1)
    cells = len(work.source) // CELL
    places = [i % cells * CELL for i in range(GROUP + work.sizes.many_reads)]
    return spaces, tuple(
        Item(Key(page_hash(), spaces.digest, Coordinate(0, 1, 0)), work.source[at : at + CELL], 0) for at in places
    )


def _round(crowds: Sequence[Crowd], items: Sequence[Item], turn: int, find: str | None) -> dict[str, Sample]:
    """Both started again, their memory, `find`, then reads; samples by contender.

    `find` comes before the start in every other round, and after it in the rest.
    """
    many, few = crowds
    for crowd in crowds:
        crowd.kill()
    samples: dict[str, Sample] = {}
    look = partial(_find, find, many.service.data) if find else None
    if look and turn % 2:
        samples[FIND] = look()
    for crowd in crowds:
        crowd.start()
    if look and not turn % 2:
        samples[FIND] = look()
    many.parts["index_bytes"] = (many.resident - few.resident) / (many.tiny - few.tiny)
    _read(crowds, items, turn)
    for crowd in crowds:
        crowd.check_known()
    return {**samples, **{crowd.name: crowd.sample() for crowd in crowds}}


def _find(find: str, folder: Path) -> Sample:
    """Raises RuntimeError where it fails."""
    began = time.perf_counter()
    command = [find, str(folder), "-type", "f", "-printf", "%s"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"find failed: {done.stderr.strip()[-500:]}")
    return Sample(
        seconds=seconds, moved=0, latencies=(seconds,), client_cpu=0.0, server_cpu=0.0, settled_cpu=0.0,
        parts={"ready": seconds},
    )  # fmt: skip


def _read(crowds: Sequence[Crowd], items: Sequence[Item], turn: int) -> None:
    """Every object once from each, in an order of the round's own, group by group in turns."""
    for crowd in crowds:
        crowd.read(items[:GROUP], timed=False)
    gc.collect()
    order = list(items[GROUP:])
    random.shuffle(order)
    for number, group in enumerate(_groups(order)):
        first = (number + turn) % 2
        for crowd in (crowds[first], crowds[1 - first]):
            crowd.read(group)


def _groups(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[at : at + GROUP] for at in range(0, len(items), GROUP))
