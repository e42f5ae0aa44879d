"""Bytes between page order, as they are stored, and pool order, as the engine keeps them.

    page order  (page, group, layer, component, token, head, row)
    pool order  (layer, component, page, token, head, row)

A pool on a CUDA device is served by a Triton kernel on the current stream, one launch for all pages (two where K and V
differ in width). The call returns before the bytes have moved: leave ``pages`` and ``page_ids`` alone until that
stream is past it. ``pages`` may then be on the same device or in pinned host memory, which the kernel reads and writes
over the bus with no copy between. A pool on the CPU is served by torch, and the call returns when it is done.

``page_ids`` may be on the CPU or on the pool's device. On the CPU they are checked. On a GPU they are not, as that
would mean waiting for it: an id outside the pool then moves nothing, and what would be written stays as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from l3client.pools import KVPool
from l3client.relayout import reference
from l3client.relayout.placement import Placement
from l3store.layout.shape import Range

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Placement", "pages_to_pool", "pool_to_pages"]


def pages_to_pool(
    pages: Tensor, pool: KVPool, page_ids: Tensor, placement: Placement, *, layers: Range | None = None
) -> None:
    """Write staged pages into the pool.

    ``pages`` is uint8 ``[n, page_bytes]``, each row contiguous; ``page_ids`` is int32 or int64 ``[n]``, and an id given
    twice ends as either of its pages. The pool's heads may be any run of the staged ones, across groups or inside one.
    ``layers`` moves only those layers of the staged page, counted from its first.

    Raises ValueError before anything moves.
    """
    layers = placement.resolve(pool, layers)
    ids = _checked(pages, pool, page_ids, placement)
    if len(ids):
        _implementation(pool).pages_to_pool(pages, pool, ids, placement, layers)


def pool_to_pages(
    pool: KVPool, page_ids: Tensor, pages: Tensor, placement: Placement, *, layers: Range | None = None
) -> None:
    """Write pages of the pool into staged pages: every byte of them, or of ``layers`` if given.

    Shapes are those of :func:`pages_to_pool`. Raises ValueError before anything moves, also where the pool does not
    hold every head of the staged page, as bytes would be left that nobody wrote.
    """
    layers = placement.resolve(pool, layers)
    placement.require_whole(pool)
    ids = _checked(pages, pool, page_ids, placement)
    if len(ids):
        _implementation(pool).pool_to_pages(pool, ids, pages, placement, layers)


def _implementation(pool: KVPool) -> ModuleType:
    if pool.device.type != "cuda":
        return reference
    from l3client.relayout import triton_kernel  # the engine brings Triton; a machine without a GPU needs none

    return triton_kernel


def _checked(pages: Tensor, pool: KVPool, page_ids: Tensor, placement: Placement) -> Tensor:
    """``page_ids`` on the pool's device, after every check that does not wait for a GPU."""
    _check_pages(pages, pool, placement)
    if page_ids.ndim != 1 or page_ids.dtype not in (torch.int32, torch.int64) or not page_ids.is_contiguous():
        raise ValueError(
            f"page_ids is {page_ids.dtype} {list(page_ids.shape)} with strides {page_ids.stride()}: "
            "it needs one contiguous axis of int32 or int64"
        )
    if len(page_ids) != len(pages):
        raise ValueError(f"{len(page_ids)} page_ids for {len(pages)} staged pages: pass one for each")
    if page_ids.device == pool.device and pool.device.type != "cpu":
        return page_ids
    if page_ids.device.type != "cpu":
        raise ValueError(
            f"page_ids is on {page_ids.device}: it needs to be on the CPU or on {pool.device}, as the pool"
        )
    if len(page_ids):
        low, high = (int(bound) for bound in page_ids.aminmax())
        if low < 0 or high >= pool.num_pages:
            raise ValueError(f"page ids {low} to {high} are not all in [0, {pool.num_pages}), the pages of this pool")
    return page_ids.to(pool.device, non_blocking=True)


def _check_pages(pages: Tensor, pool: KVPool, placement: Placement) -> None:
    page_bytes = placement.shape.page_bytes
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != page_bytes:
        raise ValueError(f"pages is {pages.dtype} {list(pages.shape)}: it needs to be uint8 [n, {page_bytes}]")
    if pages.stride(1) != 1 or (len(pages) > 1 and pages.stride(0) < page_bytes):
        raise ValueError(
            f"pages has strides {pages.stride()}: each page needs to be one run of bytes, apart from the next"
        )
    if pages.device != pool.device and not (pages.device.type == "cpu" and pages.is_pinned()):
        raise ValueError(
            f"pages is on {pages.device} and the pool on {pool.device}: "
            "stage in pinned host memory, or on the pool's device"
        )
