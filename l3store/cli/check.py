"""`l3store check`: verify the sizes and sums of everything in a data folder."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from l3store.backend import CellRun, DiskBackend
from l3store.backend.file import overhead
from l3store.cli._commands import Commands
from l3store.errors import MissError
from l3store.index import Store
from l3store.layout import Key
from l3store.layout.sums import sum_cells


@dataclass(slots=True)
class Report:
    """What was found. ``wrong_size`` and ``bad_sums`` are keys."""

    objects: int = 0
    bytes: int = 0
    wrong_size: list[str] = field(default_factory=list)
    bad_sums: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.wrong_size and not self.bad_sums


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("check", help="verify a data folder", description=__doc__)
    parser.add_argument("folder", type=Path, help="the data folder of a service that is not running")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    if not (args.folder / "objects").is_dir():
        print(f"l3store check: {args.folder} is not a data folder: it has no objects/", file=sys.stderr)
        return 2
    try:
        report = asyncio.run(check(args.folder))
    except OSError as error:
        print(f"l3store check: {error.strerror or error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({**asdict(report), "clean": report.clean}))
    else:
        for name, keys in (("wrong size", report.wrong_size), ("bad sums", report.bad_sums)):
            for key in keys:
                print(f"{name}: {key}")
        print(f"{report.objects} objects, {report.bytes} bytes: {'clean' if report.clean else 'damaged'}")
    return 0 if report.clean else 1


async def check(folder: Path) -> Report:
    """Read everything that is stored. Changes no object; leftovers of writes are swept, as at a start."""
    report = Report()
    backend = DiskBackend(folder)
    store = Store(backend, capacity=sys.maxsize)
    try:
        await store.start()
        for entry in store.index.namespaces():
            for key in list(store.index.keys(entry)):
                await _check_object(backend, key, entry.namespace.cell_bytes, report)
    finally:
        await store.close()
    return report


async def _check_object(backend: DiskBackend, key: Key, cell_bytes: int, report: Report) -> None:
    run = CellRun(key, 0, len(key.coordinate.layers), cell_bytes)
    report.objects += 1
    report.bytes += run.length
    size = (await asyncio.to_thread(backend.path(key).stat)).st_size
    if size != run.length + overhead(run.cells):
        report.wrong_size.append(str(key))
        return
    data = memoryview(bytearray(run.length))
    try:
        sums = await backend.read([run], data)
    except MissError:
        report.bad_sums.append(str(key))
        return
    if sum_cells(data, cell_bytes) != sums.packed:
        report.bad_sums.append(str(key))
