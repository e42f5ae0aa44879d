"""The relayout in plain torch: what the kernel is tested against, and what runs where there is no GPU.

Strided views of both sides meet in ``index_copy_`` and ``index_select(out=...)``: one pass over the bytes, no copy
between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from l3client.pools import KVPool
from l3client.relayout.placement import Placement
from l3store.layout.shape import Range

# index_copy_ works element by element, so the widest element is the fastest: 16 bytes move 12 times what 1 byte moves.
_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def pages_to_pool(pages: Tensor, pool: KVPool, page_ids: Tensor, placement: Placement, layers: Range) -> None:
    """Scatter ``pages`` ``[n, page_bytes]`` to the pool's pages ``page_ids`` ``[n]``; arguments are checked."""
    ids = page_ids.to(torch.int64)
    for staged, held in _pairs(pages, pool, placement, layers):
        held.index_copy_(0, ids, staged)


def pool_to_pages(pool: KVPool, page_ids: Tensor, pages: Tensor, placement: Placement, layers: Range) -> None:
    """Gather the pool's pages ``page_ids`` ``[n]`` into ``pages`` ``[n, page_bytes]``; arguments are checked."""
    ids = page_ids.to(torch.int64)
    for staged, held in _pairs(pages, pool, placement, layers):
        torch.index_select(held, 0, ids, out=staged)


def _pairs(pages: Tensor, pool: KVPool, placement: Placement, layers: Range) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same heads of one layer and component: staged ``[n, groups, page_size, heads, words]``, and the
    pool's ``[pool pages, groups, page_size, heads, words]``."""
    shape = placement.shape
    width = math.gcd(shape.vector_bytes, pool.alignment, pages.data_ptr(), pages.storage_offset(), pages.stride(0))
    word = _WORDS[width]
    staged_words = pages.view(word)
    cell, group = shape.cell_bytes // width, shape.group_bytes // width
    for component, row_bytes in enumerate(shape.row_bytes):
        row = row_bytes // width
        staged_token, held_token = shape.group_heads * row, pool.heads * row
        component_start = staged_words.storage_offset() + shape.component_offsets[component] // width
        for cut in placement.head_cuts(pool):
            axes = (len(cut.groups), shape.page_size, len(cut.heads), row)
            staged_start = component_start + cut.groups.start * group + cut.heads.start * row
            staged_strides = (staged_words.stride(0), group, staged_token, row, 1)
            held_strides = (shape.page_size * held_token, staged_token, held_token, row, 1)
            for layer in layers:
                held = pool.layer(placement.first_layer + layer)[component].view(word)
                yield (
                    staged_words.as_strided((len(pages), *axes), staged_strides, staged_start + layer * cell),
                    held.as_strided(
                        (pool.num_pages, *axes), held_strides, held.storage_offset() + cut.pool.start * row
                    ),
                )
