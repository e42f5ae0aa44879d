"""The front door: match, backup and restore for the KV pool of one rank."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from l3client.backup import Backup
from l3client.breaker import BackOff, BackOffError, Breaker
from l3client.lanes import Lanes
from l3client.pools import KVPool
from l3client.rank import MAX_PAGES, Rank, Tally, place, slices
from l3client.restore import Restore
from l3client.staging import StagingOptions, StagingPool
from l3client.streams import Event, as_event, work_so_far
from l3client.transfer import Transfer
from l3client.transport import L3Client
from l3store.errors import TooLargeError
from l3store.layout import Namespace, Shard, ShardPlan, plan_reads, plan_writes

_RESTORES_AT_ONCE = 2
_BYTES = {torch.uint8, torch.int8}
"""How engines store what torch has no type for, or no kernels: they say nothing of the logical dtype."""

After = Event | torch.cuda.Event


class Connector:
    """One rank's pool and its shard of a namespace, over one service. Thread-safe.

    Nothing here raises for what goes wrong between us and the service: `match` is then 0 and a transfer's result is
    smaller. `failures` counts it by kind. A service that does not answer is left alone for a while (`BackOff`).

    On a GPU, ``after`` is what copies wait for on the device: a `torch.cuda.Event`, or an event of `l3client.streams`.
    Without it they wait for what the caller had enqueued on its current stream by the time of the call.
    """

    def __init__(
        self,
        client: L3Client,
        namespace: Namespace,
        shard: Shard,
        pool: KVPool,
        *,
        read_only: bool = False,
        staging: StagingOptions | None = None,
        back_off: BackOff | None = None,
    ) -> None:
        """Raises `SplitGroupError` where the rank's heads split a head group and it is not ``read_only``.

        Also raises ValueError where the pool is not this shard of this namespace.
        """
        if not read_only:
            plan_writes(namespace, shard)
        plan = plan_reads(namespace, shard)
        options = staging or StagingOptions()
        _check_shape(pool, shard)
        _check_dtype(pool, namespace)
        place(namespace, plan, plan.layers).resolve(pool, None)
        self._client = client
        self._read_only = read_only
        self._replica = not shard.writer
        self._tally = Tally()
        self._breaker = Breaker(back_off or BackOff())
        self._attached_with: Mapping[str, Any] | None = None
        self._staging = StagingPool(
            max(options.buffer_bytes, plan.shape.page_bytes), options.buffers, pinned=pool.device.type == "cuda"
        )
        self._rank = Rank(
            client=client, namespace=namespace, plan=plan, pool=pool, staging=self._staging,
            patience=options.timeout, tally=self._tally,
        )  # fmt: skip
        self._lanes = Lanes(pool.device, self._staging, backups=1, restores=_RESTORES_AT_ONCE)
        # Also at the interpreter's exit, and for one that is dropped: a thread that is inside torch while the
        # interpreter goes away would abort the process.
        self._close = weakref.finalize(self, self._lanes.close)

    def attach(self, labels: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Register the namespace: the stored ones that almost match. Raises `L3Error`.

        `TooLargeError` where the service takes no objects of the size that this rank writes. A backup that finds the
        namespace unknown later registers it again, with the same labels.
        """
        self._check_limits(self._client.control.version().get("limits"))
        near: list[dict[str, Any]] = self._client.register(self.namespace, labels).get("near", [])
        self._attached_with = dict(labels or {})
        return near

    def close(self) -> None:
        """End all work, within a few seconds. Transfers that are not over end with 0 pages."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        return self._rank.namespace

    @property
    def plan(self) -> ShardPlan:
        """The rank's part of every page."""
        return self._rank.plan

    @property
    def failures(self) -> Counter[str]:
        """What went wrong so far, by kind."""
        return self._tally.counts

    def match(self, page_hashes: Sequence[str]) -> int:
        """How many leading pages the store has for this rank; 0 where it cannot be asked."""
        try:
            self._breaker.check()
            matched = self._match(page_hashes)
        except Exception as error:  # noqa: BLE001 - whatever it is, an engine must not fall over a cache
            self._ended(error)
            return 0
        self._ended(None)
        return matched

    def backup(self, page_hashes: Sequence[str], page_ids: Sequence[int], *, after: After | None = None) -> Transfer:
        """Store what the store does not have of these pages, from the pool's pages ``page_ids``, one for each hash.

        Packing begins after ``after``, and nothing is stored where that failed; until the transfer is done the pages
        must stay as they are. The result counts leading pages that are stored whole; it is 0 where we are read-only.

        A replica has nothing to store, as its writer stores the same: its transfer is done at once and does not lower
        the minimum over all ranks, which is what is stored. On its own it says nothing.
        """
        hashes = list(page_hashes)
        ids = self._page_ids(hashes, page_ids)
        transfer = Transfer(len(hashes), self.plan.layers)
        if self._read_only or self._replica or not hashes:
            transfer.finish(0 if self._read_only else len(hashes))
            return transfer
        if self._allows(transfer):
            first = self._first(after)
            work = Backup(self._rank, hashes, ids, transfer, after=first, register_again=self._register_again)
            self._lanes.run(self._lanes.backups, transfer, work.run, self._ended)
        return transfer

    def restore(self, page_hashes: Sequence[str], page_ids: Sequence[int], *, after: After | None = None) -> Transfer:
        """Load these pages into the pool's pages ``page_ids``, one for each hash, all pages of a layer at a time.

        Nothing is written to the pool before ``after``. The pages belong to the transfer until it is done. The result
        counts leading pages of which every cell arrived and matched its sum; the slots of the others hold anything.
        """
        hashes = list(page_hashes)
        ids = self._page_ids(hashes, page_ids)
        transfer = Transfer(len(hashes), self.plan.layers)
        if not hashes:
            transfer.finish(0)
        elif self._allows(transfer):
            work = Restore(self._rank, hashes, ids, transfer, after=self._first(after))
            self._lanes.run(self._lanes.restores, transfer, work.run, self._ended)
        return transfer

    def _match(self, page_hashes: Sequence[str]) -> int:
        matched = 0
        for batch in slices(len(page_hashes), MAX_PAGES):
            pages = self._client.control.match(self._rank.part, page_hashes[batch])
            matched += pages
            if pages < batch.stop - batch.start:
                break
        return matched

    def _first(self, after: After | None) -> Event | None:
        return work_so_far(self._rank.pool.device) if after is None else as_event(after)

    def _allows(self, transfer: Transfer) -> bool:
        try:
            self._breaker.check()
        except BackOffError as error:
            self._ended(error)
            transfer.finish(0, error)
            return False
        return True

    def _ended(self, error: BaseException | None) -> None:
        self._breaker.note(error)
        if error is not None:
            self._tally.add(type(error).__name__)

    def _register_again(self) -> bool:
        if self._attached_with is None:
            return False
        self._client.register(self.namespace, self._attached_with)
        return True

    def _check_limits(self, limits: object) -> None:
        most = limits.get("max_object_bytes") if isinstance(limits, dict) else None
        if self._read_only or self._replica or not isinstance(most, int):
            return
        for planned in self.plan.objects:
            if planned.span.length > most:
                raise TooLargeError(
                    f"objects like {planned.coordinate} have {planned.span.length} bytes, and {self._client.url} takes "
                    f"{most} at most: give the service more --ram, or the namespace a smaller layer_partition"
                )

    def _page_ids(self, page_hashes: Sequence[str], page_ids: Sequence[int]) -> Tensor:
        # A copy: the caller's list may change while we work.
        ids = torch.as_tensor(page_ids, dtype=torch.int64, device="cpu").clone()
        if ids.shape != (len(page_hashes),):
            raise ValueError(f"{list(ids.shape)} page ids for {len(page_hashes)} page hashes: one for each")
        pages = self._rank.pool.num_pages
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < pages):
            raise ValueError(f"page ids {int(ids.min())} to {int(ids.max())} are not in [0, {pages})")
        return ids


def _check_shape(pool: KVPool, shard: Shard) -> None:
    heads = 1 if shard.heads is None else len(shard.heads)
    if (pool.num_layers, pool.heads) != (len(shard.layers), heads):
        raise ValueError(
            f"the pool has {pool.num_layers} layers of {pool.heads} heads, its shard {len(shard.layers)} of {heads}"
        )


def _check_dtype(pool: KVPool, namespace: Namespace) -> None:
    """What is of another type than its name says would be served to others as what it is not."""
    logical = namespace.fields.dtype
    if not isinstance(getattr(torch, logical, None), torch.dtype):
        return  # a format that torch has no name for: nothing to compare
    for dtype in pool.dtypes:
        if dtype not in _BYTES and str(dtype) != f"torch.{logical}":
            raise ValueError(
                f"the pool's tensors are {str(dtype).removeprefix('torch.')} and the namespace says dtype {logical}: "
                "pass the pool that the namespace is of, or name the dtype that it has"
            )


__all__ = ["After", "BackOff", "Connector", "StagingOptions"]
