"""The relayout on the GPU: one launch moves all layers of all pages, 16 bytes at a time where rows allow.

A program moves one block of one (page, layer, component). It walks the pool's bytes in order, so that side is one run,
and finds where each vector lies in the staged page. The staged side may be pinned host memory: the device reads it over
the bus.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from l3client.pools import KVPool
from l3client.relayout.placement import Placement
from l3store.layout.shape import Range

# Vectors that one program moves: 8 for each of its 128 threads, enough in flight to cover the latency of a bus.
_BLOCK = 1024


# These change from launch to launch: compiling again for one that is 1 or a multiple of 16 would only cost time.
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["pool_pages", "layers", "first_layer", "first_pool_layer", "first_component", "component_start"]
)
def relayout_kernel(  # type: ignore[no-untyped-def]
    pages,  # *u8: the staged pages; this and the pool's addresses are multiples of VECTOR_BYTES
    page_ids,  # *i32 or *i64 [n], on the device
    pointers,  # *i64 [pool layers, TABLE_COLUMNS]: addresses of the pool's tensors
    pool_pages,
    page_stride,  # the strides and component_start are in vectors
    group_stride,
    layer_stride,
    component_start,
    layers,
    first_layer,
    first_pool_layer,
    first_component,
    TABLE_COLUMNS: tl.constexpr,  # noqa: N803
    COMPONENTS: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    FIRST_HEAD: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    GROUP_HEADS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803  (in vectors)
    VECTOR_BYTES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TO_POOL: tl.constexpr,  # noqa: N803
):
    """Copy each vector of the pool's pages from, or to, its place in the staged pages."""
    if VECTOR_BYTES >= 8:
        word = tl.int64
    elif VECTOR_BYTES == 4:
        word = tl.int32
    elif VECTOR_BYTES == 2:
        word = tl.int16
    else:
        word = tl.int8
    WORDS: tl.constexpr = 2 if VECTOR_BYTES == 16 else 1  # noqa: N806
    TOKEN: tl.constexpr = HEADS * ROW  # noqa: N806
    TOTAL: tl.constexpr = PAGE_SIZE * TOKEN  # noqa: N806
    BLOCKS: tl.constexpr = (TOTAL + BLOCK - 1) // BLOCK  # noqa: N806

    program = tl.program_id(0)
    block = program % BLOCKS
    component = program // BLOCKS % COMPONENTS
    cell = program // (BLOCKS * COMPONENTS)
    layer = cell % layers
    index = cell // layers
    page = tl.load(page_ids + index).to(tl.int64)
    # Ids on the device cannot be checked without waiting for it: one that is not in the pool touches no memory.
    if (page >= 0) & (page < pool_pages):
        column = first_component + component
        address = tl.load(pointers + (first_pool_layer + layer) * TABLE_COLUMNS + column)
        held = address.to(tl.pointer_type(word)) + page * (TOTAL * WORDS)
        # Components of one launch are equally wide: each is PAGE_SIZE * GROUP_HEADS rows after the one before.
        start = (
            index.to(tl.int64) * page_stride
            + (first_layer + layer).to(tl.int64) * layer_stride
            + (component_start + component * (PAGE_SIZE * GROUP_HEADS * ROW))
        )
        staged = pages.to(tl.pointer_type(word)) + start * WORDS
        # Not on the addresses themselves: what the compiler knows of an integer is lost when it becomes a pointer.
        held = tl.multiple_of(held, VECTOR_BYTES)
        staged = tl.multiple_of(staged, VECTOR_BYTES)

        vector = block * BLOCK + tl.arange(0, BLOCK)
        head = FIRST_HEAD + vector % TOKEN // ROW
        staged_row = vector // TOKEN * GROUP_HEADS + head % GROUP_HEADS
        staged_vector = (head // GROUP_HEADS).to(tl.int64) * group_stride + (staged_row * ROW + vector % ROW)

        # The inner axis is what becomes one 128-bit access: two words next to each other.
        lane = tl.arange(0, WORDS)[None, :]
        held += vector[:, None] * WORDS + lane
        staged += staged_vector[:, None] * WORDS + lane
        mask = (vector < TOTAL)[:, None]
        if TO_POOL:
            tl.store(held, tl.load(staged, mask=mask), mask=mask)
        else:
            tl.store(staged, tl.load(held, mask=mask), mask=mask)


def pages_to_pool(pages: Tensor, pool: KVPool, page_ids: Tensor, placement: Placement, layers: Range) -> None:
    """Scatter ``pages`` ``[n, page_bytes]`` to the pool's pages ``page_ids`` ``[n]``, on the current stream."""
    _launch(pages, pool, page_ids, placement, layers, to_pool=True)


def pool_to_pages(pool: KVPool, page_ids: Tensor, pages: Tensor, placement: Placement, layers: Range) -> None:
    """Gather the pool's pages ``page_ids`` ``[n]`` into ``pages`` ``[n, page_bytes]``, on the current stream."""
    _launch(pages, pool, page_ids, placement, layers, to_pool=False)


def _launch(
    pages: Tensor, pool: KVPool, page_ids: Tensor, placement: Placement, layers: Range, *, to_pool: bool
) -> None:
    shape = placement.shape
    vector = math.gcd(shape.vector_bytes, pool.alignment, pages.data_ptr(), pages.stride(0))
    # Components of one width share a launch; K and V of different widths take one each.
    alike = len(set(shape.row_bytes)) == 1
    together = shape.components if alike else 1
    with torch.cuda.device_of(pool.pointers):  # type: ignore[no-untyped-call]
        for first in range(0, shape.components, together):
            row = shape.row_bytes[first] // vector
            vectors = shape.page_size * pool.heads * row
            block = min(_BLOCK, triton.next_power_of_2(vectors))
            grid = (len(page_ids) * len(layers) * together * -(-vectors // block),)
            relayout_kernel[grid](
                pages,
                page_ids,
                pool.pointers,
                pool.num_pages,
                pages.stride(0) // vector,
                shape.group_bytes // vector,
                shape.cell_bytes // vector,
                shape.component_offsets[first] // vector,
                len(layers),
                layers.start,
                placement.first_layer + layers.start,
                first,
                TABLE_COLUMNS=shape.components,
                COMPONENTS=together,
                PAGE_SIZE=shape.page_size,
                FIRST_HEAD=placement.first_head,
                HEADS=pool.heads,
                GROUP_HEADS=shape.group_heads,
                ROW=row,
                VECTOR_BYTES=vector,
                BLOCK=block,
                TO_POOL=to_pool,
            )
