"""The relayout against a model written from the layout formula alone: torch, and the Triton kernel interpreted."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from l3client.pools import KVPool, MHAPool, MLAPool
from l3client.relayout import Placement, pages_to_pool, pool_to_pages, reference
from l3store.layout.shape import PageShape, Range

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pool, a staged page, which of their layers and heads meet, and the pages to move."""

    shape: PageShape
    mla: bool
    dtype: torch.dtype
    dims: tuple[int, ...]
    heads: int
    first_head: int
    pool_layers: int
    first_layer: int
    layers: Range | None
    pool_pages: int
    page_ids: tuple[int, ...]
    id_dtype: torch.dtype
    gap: int  # bytes between one staged page and the next
    seed: int

    @property
    def placement(self) -> Placement:
        return Placement(shape=self.shape, first_head=self.first_head, first_layer=self.first_layer)

    @property
    def ids(self) -> Tensor:
        return torch.tensor(self.page_ids, dtype=self.id_dtype)

    def pool(self, seed: int) -> KVPool:
        """A pool of random bytes, NaNs of every kind among them."""
        random = torch.Generator().manual_seed(seed)
        slots = self.pool_pages * self.shape.page_size

        def layers(dim: int) -> list[Tensor]:
            row = dim * self.dtype.itemsize
            size = [slots, row] if self.mla else [slots, self.heads, row]
            return [
                torch.randint(256, size, dtype=torch.uint8, generator=random).view(self.dtype)
                for _ in range(self.pool_layers)
            ]

        tensors = [layers(dim) for dim in self.dims]
        size = self.shape.page_size
        return MLAPool(tensors[0], page_size=size) if self.mla else MHAPool(tensors[0], tensors[1], page_size=size)

    def pages(self, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        size = (len(self.page_ids), self.shape.page_bytes + self.gap)
        return torch.randint(256, size, dtype=torch.uint8, generator=random)[:, : self.shape.page_bytes]


@st.composite
def cases(draw: st.DrawFn, *, whole: bool) -> Case:
    """``whole``: the pool holds every head of the staged page, as a writer's does."""
    mla = draw(st.booleans())
    dtype = draw(st.sampled_from(DTYPES))
    dims: tuple[int, ...] = draw(st.sampled_from([(4, 4), (8, 8), (16, 16), (6, 6), (3, 3), (16, 4), (8, 6), (5, 1)]))
    if dtype == torch.uint8:
        dims = draw(st.sampled_from([(656, 656), (6, 6), (656, 6), (32, 32)]))
    dims = dims[:1] if mla else dims
    groups = 1 if mla else draw(st.integers(1, 3))
    group_heads = 1 if mla else draw(st.integers(1, 4))
    total = groups * group_heads
    heads = total if whole else draw(st.integers(1, total))
    run, extra = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    first_layer = draw(st.integers(0, extra))
    start = draw(st.integers(0, run - 1))
    pool_pages = draw(st.integers(1, 6))
    return Case(
        shape=PageShape(
            groups=groups,
            layers=run,
            page_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
            group_heads=group_heads,
            row_bytes=tuple(dim * dtype.itemsize for dim in dims),
        ),
        mla=mla,
        dtype=dtype,
        dims=dims,
        heads=heads,
        first_head=draw(st.integers(0, total - heads)),
        pool_layers=run + extra,
        first_layer=first_layer,
        layers=draw(st.sampled_from([None, Range(start, draw(st.integers(start + 1, run)))])),
        pool_pages=pool_pages,
        page_ids=tuple(draw(st.permutations(range(pool_pages)))[: draw(st.integers(0, pool_pages))]),
        id_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        gap=draw(st.sampled_from([0, 0, 16, 8, 1])),
        seed=draw(st.integers(0, 2**31)),
    )


def rows(case: Case) -> Iterator[tuple[int, int, int, int, int, slice]]:
    """Every row that moves: (staged page, pool layer, component, slot, pool head, its bytes in the staged page).

    Written from the order (group, layer, component, token, head, row) and nothing of the package's arithmetic.
    """
    shape = case.shape
    run = range(shape.layers) if case.layers is None else range(case.layers.start, case.layers.end)
    components = range(len(shape.row_bytes))
    for index, page in enumerate(case.page_ids):
        offset = 0
        for group in range(shape.groups):
            for layer in range(shape.layers):
                for component in components:
                    for token in range(shape.page_size):
                        for head_in_group in range(shape.group_heads):
                            row = shape.row_bytes[component]
                            head = group * shape.group_heads + head_in_group - case.first_head
                            if 0 <= head < case.heads and layer in run:
                                slot = page * shape.page_size + token
                                place = slice(offset, offset + row)
                                yield index, case.first_layer + layer, component, slot, head, place
                            offset += row


def contents(pool: KVPool) -> list[list[Bytes]]:
    return [[tensor.numpy().copy() for tensor in pool.layer(layer)] for layer in range(pool.num_layers)]


def assert_same(pool: KVPool, want: list[list[Bytes]]) -> None:
    for layer, components in enumerate(want):
        for component, expected in enumerate(components):
            np.testing.assert_array_equal(pool.layer(layer)[component].numpy(), expected, f"{layer}, {component}")


def run_of(case: Case) -> Range:
    return case.layers or Range(0, case.shape.layers)


def check_pages_to_pool(case: Case, kernel: ModuleType | None = None) -> None:
    pool, pages = case.pool(case.seed), case.pages(case.seed + 1)
    before, want = pages.numpy().copy(), contents(pool)
    for index, layer, component, slot, head, place in rows(case):
        want[layer][component][slot, head] = before[index, place]
    if kernel is None:
        pages_to_pool(pages, pool, case.ids, case.placement, layers=case.layers)
    elif case.page_ids:
        kernel.pages_to_pool(pages, pool, case.ids, case.placement, run_of(case))
    assert_same(pool, want)
    np.testing.assert_array_equal(pages.numpy(), before)


def check_pool_to_pages(case: Case, kernel: ModuleType | None = None) -> None:
    pool, pages = case.pool(case.seed), case.pages(case.seed + 1)
    want, before = pages.numpy().copy(), contents(pool)
    for index, layer, component, slot, head, place in rows(case):
        want[index, place] = before[layer][component][slot, head]
    if kernel is None:
        pool_to_pages(pool, case.ids, pages, case.placement, layers=case.layers)
    elif case.page_ids:
        kernel.pool_to_pages(pool, case.ids, pages, case.placement, run_of(case))
    np.testing.assert_array_equal(pages.numpy(), want)
    assert_same(pool, before)


@settings(max_examples=120, deadline=None)
@given(cases(whole=False))
def test_pages_to_pool_is_the_formula(case: Case) -> None:
    check_pages_to_pool(case)


@settings(max_examples=120, deadline=None)
@given(cases(whole=True))
def test_pool_to_pages_is_the_formula(case: Case) -> None:
    check_pool_to_pages(case)


@settings(max_examples=60, deadline=None)
@given(cases(whole=True))
def test_no_byte_of_the_layers_asked_for_is_left_unwritten(case: Case) -> None:
    run = run_of(case)
    first, second = case.pages(case.seed), case.pages(case.seed + 1)
    second.copy_(255 - first)
    pool = case.pool(case.seed + 2)
    for pages in (first, second):
        pool_to_pages(pool, case.ids, pages, case.placement, layers=case.layers)
    for group in range(case.shape.groups):
        span = case.shape.run_span(run, group)
        np.testing.assert_array_equal(first[:, span.offset : span.end], second[:, span.offset : span.end])


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """A copy of the kernel's module whose kernel runs in Triton's interpreter, whatever was imported before."""
    pytest.importorskip("triton")
    spec = importlib.util.find_spec("l3client.relayout.triton_kernel")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    assert type(module.relayout_kernel).__name__ == "InterpretedFunction"
    return module


@settings(max_examples=40, deadline=None)
@given(case=cases(whole=False))
def test_the_kernel_writes_the_pool_by_the_formula(interpreted: ModuleType, case: Case) -> None:
    check_pages_to_pool(case, interpreted)


@settings(max_examples=40, deadline=None)
@given(case=cases(whole=True))
def test_the_kernel_writes_pages_by_the_formula(interpreted: ModuleType, case: Case) -> None:
    check_pool_to_pages(case, interpreted)


def example(**changes: object) -> Case:
    """Two groups of two heads, two layers, pages of four tokens; a pool of that and a layer on either side."""
    fields: dict[str, object] = {
        "shape": PageShape(groups=2, layers=2, page_size=4, group_heads=2, row_bytes=(32, 32)),
        "mla": False,
        "dtype": torch.bfloat16,
        "dims": (16, 16),
        "heads": 4,
        "first_head": 0,
        "pool_layers": 4,
        "first_layer": 1,
        "layers": None,
        "pool_pages": 5,
        "page_ids": (3, 0),
        "id_dtype": torch.int64,
        "gap": 0,
        "seed": 7,
    }
    return Case(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("first_head", range(4))
def test_a_reader_of_one_head_cuts_inside_a_group(interpreted: ModuleType, first_head: int) -> None:
    case = example(heads=1, first_head=first_head)
    check_pages_to_pool(case)
    check_pages_to_pool(case, interpreted)


def test_the_kernel_moves_pages_longer_than_one_block(interpreted: ModuleType) -> None:
    shape = PageShape(groups=1, layers=1, page_size=64, group_heads=1, row_bytes=(656,))
    case = example(shape=shape, mla=True, dtype=torch.uint8, dims=(656,), heads=1, pool_layers=2)
    assert 64 * 656 // 16 > 2 * 1024
    check_pages_to_pool(case, interpreted)
    check_pool_to_pages(case, interpreted)


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_the_kernel_touches_nothing_for_an_id_outside_the_pool(interpreted: ModuleType, bad: int) -> None:
    case = example()
    pool, pages = case.pool(1), case.pages(2)
    want = contents(pool)
    pages_before = pages.clone()
    ids = torch.tensor([bad, bad])
    interpreted.pages_to_pool(pages, pool, ids, case.placement, Range(0, 2))
    interpreted.pool_to_pages(pool, ids, pages, case.placement, Range(0, 2))
    assert_same(pool, want)
    assert torch.equal(pages, pages_before)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_memory_that_is_not_aligned_moves_in_narrower_words(interpreted: ModuleType, offset: int) -> None:
    shape = PageShape(groups=1, layers=1, page_size=4, group_heads=2, row_bytes=(16, 16))

    def shifted(size: int) -> Tensor:
        return torch.randint(256, (offset + size,), dtype=torch.uint8)[offset:]

    pool = MHAPool([shifted(128).view(4, 2, 16)], [shifted(128).view(4, 2, 16)], page_size=4)
    pages = shifted(shape.page_bytes).view(1, -1)
    ids = torch.tensor([0])
    for implementation in (reference, interpreted):
        for component in pool.layer(0):
            component.zero_()
        implementation.pages_to_pool(pages, pool, ids, Placement(shape=shape), Range(0, 1))
        assert torch.equal(torch.cat([component.flatten() for component in pool.layer(0)]), pages[0])
        back = shifted(shape.page_bytes).view(1, -1)
        implementation.pool_to_pages(pool, ids, back, Placement(shape=shape), Range(0, 1))
        assert torch.equal(back, pages)


def test_memory_that_is_aligned_inside_memory_that_is_not() -> None:
    # Torch looks at the offset in the storage, the processor at the address: both must allow the word.
    shape = PageShape(groups=1, layers=1, page_size=4, group_heads=1, row_bytes=(16,))
    memory = bytearray(128)
    shift = (8 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
    pages = torch.frombuffer(memory, dtype=torch.uint8, offset=shift)[8:72].view(1, 64)
    assert (pages.data_ptr() % 16, pages.storage_offset() % 16) == (0, 8)
    pages.copy_(torch.arange(64))
    pool = MLAPool([torch.zeros(8, 16, dtype=torch.uint8)], page_size=4)
    pages_to_pool(pages, pool, torch.tensor([1]), Placement(shape=shape))
    assert torch.equal(pool.layer(0)[0][4:].flatten(), pages[0])


def test_a_round_trip_through_a_page_at_a_time() -> None:
    case = example(page_ids=(4, 2, 0, 1))
    source, target = case.pool(1), case.pool(2)
    pages = case.pages(3)
    pool_to_pages(source, case.ids, pages, case.placement)
    for index in range(4):
        pages_to_pool(pages[index : index + 1], target, case.ids[index : index + 1], case.placement)
    size = case.shape.page_size
    for layer in (1, 2):
        for got, want in zip(target.layer(layer), source.layer(layer), strict=True):
            for page in case.page_ids:
                assert torch.equal(got[page * size : (page + 1) * size], want[page * size : (page + 1) * size])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_ids": (0, 5)}, r"page ids 0 to 5 are not all in \[0, 5\)"),
        ({"page_ids": (-1, 2)}, r"page ids -1 to 2 are not all in"),
        ({"id_dtype": torch.float32}, "page_ids is torch.float32"),
        ({"id_dtype": torch.int16}, "page_ids is torch.int16"),
        ({"first_head": 1}, r"heads \[1, 5\) are not in a staged page of 4"),
        ({"first_layer": 3}, r"layers \[0, 2\) of the staged page, which has 2, are layers \[3, 5\) of the pool"),
        ({"layers": Range(1, 3)}, r"layers \[1, 3\) of the staged page, which has 2"),
        ({"dims": (16, 8)}, r"row_bytes \(32, 16\) and the staged page \(32, 32\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(changes: dict[str, object], message: str) -> None:
    case = example(**changes)
    pool, pages = case.pool(1), case.pages(2)
    want, before = contents(pool), pages.clone()
    with pytest.raises(ValueError, match=message):
        pages_to_pool(pages, pool, case.ids, case.placement, layers=case.layers)
    with pytest.raises(ValueError, match=message):
        pool_to_pages(pool, case.ids, pages, case.placement, layers=case.layers)
    assert_same(pool, want)
    assert torch.equal(pages, before)


def test_a_pool_of_another_page_size_is_refused() -> None:
    case = example()
    pool = MHAPool(*([torch.zeros(8, 4, 16, dtype=torch.bfloat16)] * 4 for _ in range(2)), page_size=8)
    with pytest.raises(ValueError, match="page_size 8 and the staged page 4"):
        pages_to_pool(case.pages(1), pool, torch.tensor([0, 0]), case.placement)


@pytest.mark.parametrize(("heads", "first_head"), [(1, 0), (2, 0), (2, 2), (3, 1)])
def test_a_writer_must_fill_the_staged_page(heads: int, first_head: int) -> None:
    case = example(heads=heads, first_head=first_head)
    with pytest.raises(ValueError, match=rf"holds heads \[{first_head}, {first_head + heads}\) of a staged page of 4"):
        pool_to_pages(case.pool(1), case.ids, case.pages(2), case.placement)


def bad_pages() -> list[tuple[Tensor, str]]:
    size = example().shape.page_bytes
    return [
        (torch.zeros(2, size - 1, dtype=torch.uint8), rf"it needs to be uint8 \[n, {size}\]"),
        (torch.zeros(2, size, dtype=torch.int8), "pages is torch.int8"),
        (torch.zeros(2 * size, dtype=torch.uint8), "it needs to be uint8"),
        (torch.zeros(size, 2, dtype=torch.uint8).T, "one run of bytes"),
        (torch.zeros(1, size, dtype=torch.uint8).expand(2, size), "apart from the next"),
        (torch.zeros(2, size, dtype=torch.uint8, device="meta"), "pages is on meta and the pool on cpu"),
        (torch.zeros(3, size, dtype=torch.uint8), "2 page_ids for 3 staged pages"),
    ]


@pytest.mark.parametrize(("pages", "message"), bad_pages())
def test_pages_of_another_form_are_refused(pages: Tensor, message: str) -> None:
    case = example()
    with pytest.raises(ValueError, match=message):
        pages_to_pool(pages, case.pool(1), case.ids, case.placement)


def test_page_ids_of_another_form_are_refused() -> None:
    case = example()
    for ids, message in (
        (torch.tensor([[0], [1]]), "one contiguous axis"),
        (torch.arange(4)[::2], "one contiguous axis"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "page_ids is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            pages_to_pool(case.pages(1), case.pool(2), ids, case.placement)


@pytest.mark.parametrize("field", ["first_head", "first_layer"])
def test_a_placement_counts_from_zero(field: str) -> None:
    with pytest.raises(ValueError, match="count from 0"):
        Placement(shape=example().shape, **{field: -1})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_gpu_agrees_with_the_reference(*, pinned: bool, heads: int) -> None:
    case = example(heads=heads, shape=PageShape(groups=2, layers=2, page_size=64, group_heads=2, row_bytes=(32, 32)))
    host = case.pool(1)
    device = MHAPool(
        *([host.layer(layer)[c].cuda() for layer in range(host.num_layers)] for c in range(2)), page_size=64
    )
    pages = case.pages(2)
    staged = pages.contiguous().pin_memory() if pinned else pages.cuda()
    pages_to_pool(pages, host, case.ids, case.placement)
    pages_to_pool(staged, device, case.ids.cuda(), case.placement)
    torch.cuda.synchronize()
    assert_same(
        MHAPool(*([device.layer(n)[c].cpu() for n in range(4)] for c in range(2)), page_size=64), contents(host)
    )
    if heads == 4:
        staged.zero_()
        pool_to_pages(device, case.ids, staged, case.placement)
        torch.cuda.synchronize()
        assert torch.equal(staged.cpu(), pages)
