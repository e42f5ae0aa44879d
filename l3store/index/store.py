"""The store: what is registered and what is stored, over one backend. Writes, deletes, evicts and heals.

Owned by one event loop. Reads are `l3store.index.reader`. Errors are those of `l3store.errors`, or layout errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from l3store.backend import Ack, Backend, BufferPool, CellRun, NewObject, RamTier
from l3store.backend.file import footprint
from l3store.errors import (
    ConflictError,
    CorruptError,
    L3Error,
    MissError,
    NotReadyError,
    RetryError,
    StorageFullError,
    UnknownNamespaceError,
)
from l3store.index.departures import Departures
from l3store.index.names import Alike, pages_alike
from l3store.index.pages import NamespaceIndex, PageIndex, Usage
from l3store.index.registry import Labels, Near, Registration, geometry_conflict, nearest
from l3store.layout import (
    InvalidNamespaceError,
    Key,
    LayoutError,
    Namespace,
    parse_key,
)

_DEFAULT_SHARE = 0.8
_DEFAULT_POOL_BYTES = 1 << 30

_log = logging.getLogger("l3store.store")


@dataclass(slots=True)
class Counters:
    """What happened since the start; each is a metric of this name."""

    objects_created: int = 0
    objects_existed: int = 0
    write_errors: int = 0
    evicted_objects: int = 0
    corrupt_objects: int = 0
    lost_objects: int = 0
    suspects_sound: int = 0
    suspects_corrupt: int = 0
    match_pages_asked: int = 0
    match_pages_hit: int = 0


class Store:
    """``capacity`` bounds the bytes of all files; None is a share of what the backend has for us, known after `start`.

    The least recently used pages make room, each with all it has.
    """

    def __init__(self, backend: Backend, *, capacity: int | None, tier: RamTier | None = None) -> None:
        self.backend = backend
        self.tier = tier or RamTier(backend, BufferPool(_DEFAULT_POOL_BYTES), ack=Ack.FILE)
        self.tier.on_lost = self._lost
        self.index = PageIndex()
        self.capacity = sys.maxsize if capacity is None else capacity
        self._share_disk = capacity is None
        self.counters = Counters()
        self._registrations: dict[str, Registration] = {}
        # What is stored without a registration; its size is unknown until that comes again.
        self._orphans: dict[str, list[Alike]] = defaultdict(list)
        self._departures = Departures()
        self._reserved = 0
        self._not_ready: str | None = "the index is being rebuilt; ask again in a second"
        self._registering = asyncio.Lock()
        self._evicting = asyncio.Lock()

    async def start(self) -> None:
        """Load registrations and rebuild the index from names. Until it is complete all else raises `NotReadyError`."""
        began = time.monotonic()
        try:
            await self._load()
            await self._make_room()
        except BaseException as error:
            self._not_ready = f"the store could not start: {error}"
            raise
        self._not_ready = None
        # What was loaded so far stays. Else every full collection looks at all of it again, on the loop's thread.
        gc.freeze()
        for digest, orphans in self._orphans.items():
            count = sum(alike.pages * len(alike.coordinates) for alike in orphans)
            _log.warning("%d objects of %s wait for its registration", count, digest)
        total = self.index.total
        _log.info("indexed %d objects, %d bytes, in %.2f s", total.objects, total.bytes, time.monotonic() - began)

    async def _load(self) -> None:
        for digest, stored in (await self.backend.load_namespaces()).items():
            try:
                registration = Registration.from_dict(stored)
                if registration.namespace.digest != digest:
                    raise InvalidNamespaceError("digest", f"the fields have {registration.namespace.digest}")
            except LayoutError as error:
                _log.error("the registration of %s cannot be read, its objects stay unused: %s", digest, error)
                continue
            self._registrations[digest] = registration
            self.index.open(registration.namespace)
        async for names in self.backend.scan():
            for alike in pages_alike(names):
                self._adopt(alike)
        if self._share_disk:
            self.capacity = int(_DEFAULT_SHARE * (self.index.total.disk_bytes + await self.backend.free_bytes()))

    async def close(self) -> None:
        await self.tier.close()

    async def check_health(self) -> None:
        """Raise `NotReadyError` where the index is not complete or a write would fail now."""
        self.check_ready()
        try:
            await self.backend.probe()
        except (OSError, StorageFullError) as error:
            raise NotReadyError(f"the data folder cannot be written: {error}") from error

    def check_ready(self) -> None:
        if self._not_ready is not None:
            raise NotReadyError(self._not_ready)

    async def register(self, namespace: Namespace, labels: Labels | None) -> tuple[bool, list[Near]]:
        """Register a namespace: whether it is new, and the stored ones that almost match.

        Raises `ConflictError`, naming the fields, where it is known with another geometry.
        """
        self.check_ready()
        digest = namespace.digest
        async with self._registering:
            known = self._registrations.get(digest)
            if known is not None and (differs := geometry_conflict(known.namespace, namespace)):
                fields = "; ".join(f"{name} is {stored}, not {asked}" for name, (asked, stored) in differs.items())
                raise ConflictError(
                    f"{digest} is registered with another geometry: {fields}. Deployments of one namespace share one "
                    "geometry; tell different weights apart with extension.model_revision",
                    fields=list(differs),
                )
            near = nearest(namespace, labels, self._registrations.values())
            registration = known or Registration(namespace)
            if registration.note(labels) or known is None:
                with _retryable(f"the registration of {digest} could not be stored"):
                    await self.backend.save_namespace(digest, registration.to_dict())
            if known is None:
                self._registrations[digest] = registration
                self.index.open(namespace)
                for alike in self._orphans.pop(digest, []):
                    self._adopt(alike)
        return known is None, near

    def registration(self, digest: str) -> tuple[Registration, Usage]:
        """A namespace and what it stores."""
        entry = self.entry(digest)
        return self._registrations[digest], entry.usage

    def registrations(self) -> list[tuple[Registration, Usage]]:
        """All namespaces, by digest."""
        self.check_ready()
        return [self.registration(digest) for digest in sorted(self._registrations)]

    async def drop(self, digest: str) -> int:
        """Forget a namespace and delete its objects; how many there were."""
        async with self._registering:
            self.entry(digest)
            with _retryable(f"{digest} could not be dropped"):
                await self.backend.drop_namespace(digest)
            keys = self.index.close(digest)
            del self._registrations[digest]
        with _retryable(f"{digest} is dropped, but not all of its objects could be deleted"):
            await self._delete(keys)
        return len(keys)

    def entry(self, digest: str) -> NamespaceIndex:
        """A namespace's part of the index. Raises `UnknownNamespaceError`; `NotReadyError` before it is complete."""
        self.check_ready()
        entry = self.index.get(digest)
        if entry is None:
            raise UnknownNamespaceError(
                f"{digest} is not registered: PUT /v1/namespaces/{digest} first; its answer names what comes close"
            )
        return entry

    def entry_of(self, key: Key) -> NamespaceIndex:
        """`entry`, after a check that the key's layers and head group are in the model. Raises a layout error."""
        entry = self.entry(key.digest)
        entry.check(key.coordinate)
        return entry

    def has(self, key: Key) -> bool:
        """Whether every cell that a key names is stored, however it is cut."""
        runs = self.index.runs(self.entry_of(key), key.page_hash)
        coordinate = key.coordinate
        return coordinate in runs.coordinates or runs.pieces(coordinate.layers, coordinate.head_group or 0) is not None

    async def put(self, objects: Sequence[NewObject]) -> list[bool | L3Error]:
        """Store verified objects of registered namespaces. For each: True created, False there already, or why not."""
        size = sum(_footprint(new) for new in objects)
        if self._reserved + size > self.capacity:
            # Nothing that could be evicted would make this fit.
            full = StorageFullError(
                f"{size} bytes do not fit beside the {self._reserved} that are being written: capacity {self.capacity}"
            )
            return [self._note(new.key, full) for new in objects]
        self._reserved += size
        try:
            await self._make_room()
            results = await self._write(objects)
            # The file system can be fuller than our budget knows. Old pages make room once, then the writer is told.
            refused = [at for at, result in enumerate(results) if isinstance(result, StorageFullError)]
            if refused and await self._evict(2 * size):
                await self._write_again(objects, results, refused)
            return [self._note(new.key, result) for new, result in zip(objects, results, strict=True)]
        finally:
            self._reserved -= size

    async def _write(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        """Store and index."""
        keys = [new.key for new in objects]
        await self._departures.over(keys)
        with self._departures.watched(keys) as departed:
            results = await self.tier.put(objects)
        # From here to the index nothing else may happen: what is not indexed cannot be deleted, nor counted.
        outcomes = list(enumerate(zip(objects, results, strict=True)))
        # Dropped meanwhile: what is there now is nobody's, also where it was there already, from our first attempt.
        strays = [
            new.key for _, (new, result) in outcomes if isinstance(result, bool) and not self.index.get(new.key.digest)
        ]
        # Deleted while we wrote: before our file or after it, and perhaps with it.
        raced = [at for at, (new, result) in outcomes if isinstance(result, bool) and new.key in departed]
        for at, (new, result) in outcomes:
            if at not in raced:
                results[at] = self._take_in(new.key, result)
        if strays:
            await self._delete(strays)
        if raced:
            await self._write_again(objects, results, raced)
        return results

    def _take_in(self, key: Key, result: bool | Exception) -> bool | Exception:
        """Index what is stored, now or since before."""
        if not isinstance(result, bool):
            return result
        entry = self.index.get(key.digest)
        if entry is None:
            return UnknownNamespaceError(f"{key.digest} was dropped while {key} was being written")
        self.index.add(entry, key)
        return result

    async def _write_again(
        self, objects: Sequence[NewObject], results: list[bool | Exception], which: Sequence[int]
    ) -> None:
        for at, result in zip(which, await self._write([objects[at] for at in which]), strict=True):
            results[at] = result

    def refresh(self, keys: Sequence[Key]) -> None:
        """Make pages the most recently used, the first most: keys come in the order of a prefix."""
        for key in reversed(keys):
            entry = self.index.get(key.digest)
            if entry is not None:
                self.index.touch(entry, key.page_hash)

    async def delete(self, key: Key) -> bool:
        """Delete every stored object that holds any of the cells a key names; False where there is none."""
        entry = self.entry_of(key)
        runs = self.index.runs(entry, key.page_hash)
        group = key.coordinate.head_group or 0
        keys = [Key(key.page_hash, key.digest, c) for c in runs.overlapping(key.coordinate.layers, group)]
        for gone in keys:
            self.index.remove(entry, gone)
        with _retryable(f"{key} could not be deleted"):
            try:
                await self._delete(keys)
            except OSError:
                # What is still there stays known, so that it can be deleted again; what is not heals when it is read.
                for kept in keys:
                    self.index.add(entry, kept)
                raise
        return bool(keys)

    async def heal(self, error: MissError) -> None:
        """Take out of the index what the backend could not serve; what is corrupt is set aside, never deleted."""
        key = parse_key(error.members["key"])
        entry = self.index.get(key.digest)
        if entry is None or not self._indexed(key):
            return
        corrupt = isinstance(error, CorruptError)
        if not corrupt:
            departures = self._departures.count
            if await self._there(entry, key) or departures != self._departures.count:
                # Deleted under the reader and stored again, or something was just now: the reader looks again.
                return
        if not self.index.remove(entry, key):
            return
        async with self._departures.leaving([key]):
            try:
                if corrupt:
                    self.counters.corrupt_objects += 1
                    _log.warning("quarantined: %s", error)
                    await self.tier.quarantine(key)
                else:
                    self.counters.lost_objects += 1
                    _log.warning("lost from the data folder: %s", error)
                    # Should a writer have come in between, its file must not stay behind uncounted.
                    await self.tier.delete([key])
            except OSError as failed:
                # It is out of the index, so it is not served again before a restart.
                _log.error("could not set %s aside: %s", key, failed)

    async def _there(self, entry: NamespaceIndex, key: Key) -> bool:
        with _retryable(f"{key} could not be read"):
            try:
                await self.tier.read_sums([CellRun(key, 0, 1, entry.namespace.cell_bytes)])
            except CorruptError:
                return True
            except MissError:
                return False
        return True

    def _lost(self, key: Key, error: Exception) -> None:
        """An object that was answered from memory could not be written."""
        entry = self.index.get(key.digest)
        if entry is not None and self.index.remove(entry, key):
            self.counters.write_errors += 1

    def _adopt(self, alike: Alike) -> None:
        """Index what was found at rest."""
        entry = self.index.get(alike.digest)
        if entry is None:
            self._orphans[alike.digest].append(alike)
            return
        known = []
        for coordinate in alike.coordinates:
            try:
                entry.check(coordinate)
            except LayoutError as error:
                _log.warning("ignored %d objects of %s: %s", alike.pages, alike.digest, error)
            else:
                known.append(coordinate)
        if known:
            self.index.add_pages(entry, alike.page_hashes, frozenset(known))

    def _note(self, key: Key, result: bool | Exception) -> bool | L3Error:
        """Count what was stored and what was not."""
        if isinstance(result, bool):
            if result:
                self.counters.objects_created += 1
            else:
                self.counters.objects_existed += 1
            return result
        self.counters.write_errors += 1
        if isinstance(result, L3Error):
            return result
        _log.error("could not store %s: %s", key, result)
        return RetryError(f"could not store {key}: {result}")

    async def _make_room(self) -> None:
        """Evict until what is stored and what is being written fit the capacity, as far as that can be."""
        # One at a time: who finds room in the index must not write before the files that made it are gone.
        async with self._evicting:
            excess = self.index.total.disk_bytes + self._reserved - self.capacity
            if excess > 0:
                await self._evict(excess)

    async def _evict(self, disk_bytes: int) -> int:
        keys = self.index.evict(disk_bytes)
        self.counters.evicted_objects += len(keys)
        try:
            await self._delete(keys)
        except OSError as error:
            _log.error("could not delete all that was evicted: %s", error)
        return len(keys)

    def _indexed(self, key: Key) -> bool:
        entry = self.index.get(key.digest)
        return entry is not None and key.coordinate in self.index.runs(entry, key.page_hash).coordinates

    async def _delete(self, keys: Sequence[Key]) -> None:
        """Delete from the backend what the index has given up."""
        async with self._departures.leaving(keys):
            await self.tier.delete(keys)


def _footprint(new: NewObject) -> int:
    cells = new.key.coordinate.end_layer - new.key.coordinate.start_layer
    return footprint(cells, len(memoryview(new.body)) // cells)


@contextlib.contextmanager
def _retryable(what: str) -> Iterator[None]:
    """Disk errors as what they are to a client: it may try again."""
    try:
        yield
    except OSError as error:
        raise RetryError(f"{what}: {error}") from error
