"""Batches of pages over HTTP, against an independent model of the layout: match, missing, read, write."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from l3store.layout import Namespace
from l3store.layout.sums import encode_sums
from tests.support import Client, Pages, Service, check_problem, counters, framed, page_hashes, tiny, write_body


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return "org/pages-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]


@pytest.fixture
def pages(client: Client, name: str) -> Iterator[Pages]:
    """Five pages of a namespace of this test's own, registered, not stored."""
    made = Pages(tiny(name), name, 5)
    client.register(made.namespace)
    yield made
    client.http.delete(f"/v1/namespaces/{made.namespace.digest}")


def matched(client: Client, pages: Pages, hashes: Sequence[str] | None = None, **more: Any) -> int:
    answer = client.pages("match", pages.namespace, pages.hashes if hashes is None else hashes, **more)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["pages"]
    return found


CUTS = {
    "on the grid": [[(0, 3), (3, 6)]] * 5,
    "off the grid": [[(0, 2), (2, 4), (4, 6)]] * 5,
    "whole": [[(0, 6)]] * 5,
    "uneven": [[(0, 1), (1, 6)]] * 5,
    "overlapping": [[(0, 4), (2, 6)]] * 5,
    "mixed": [[(0, 6)], [(0, 3), (3, 6)], [(0, 2), (1, 5), (5, 6)], [(0, 1), (1, 2), (2, 3), (3, 6)], [(0, 5), (1, 6)]],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("order", ["page", "layer"])
def test_reads_are_the_bytes_of_the_layout(
    client: Client, pages: Pages, order: str, cuts: list[list[tuple[int, int]]]
) -> None:
    for page, cut in enumerate(cuts):
        client.put_page(pages, page, cut)
    for (first, end), (low, high) in itertools.product([(0, 6), (0, 3), (2, 5), (5, 6)], [(0, 4), (0, 2), (2, 4)]):
        shard = {"layers": [first, end], "heads": [low, high]}
        layers, groups = slice(first, end), slice(low // 2, high // 2)
        answer = client.pages("read", pages.namespace, pages.hashes, order=order, sums=True, **shard)
        expected = pages.read(slice(0, 5), layers, groups, order)
        assert answer.headers["L3-Pages"] == "5"
        assert answer.content[: len(expected)] == expected
        assert answer.content[len(expected) :] == pages.read_sums(slice(0, 5), layers, groups, order)
        plain = client.pages("read", pages.namespace, pages.hashes, order=order, **shard)
        assert plain.content == expected
        assert plain.headers["Content-Length"] == str(len(expected))
        assert plain.headers["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize("partition", [0, 2, 4, 6])
@pytest.mark.parametrize("heads", [0, 4], ids=["MLA", "GQA"])
def test_any_grid_and_mla(client: Client, name: str, partition: int, heads: int) -> None:
    pages = Pages(tiny(name, partition=partition, heads=heads, head_dim=12), name, 3)
    assert client.register(pages.namespace).status_code == 201
    missing = client.pages("missing", pages.namespace, pages.hashes).json()["missing"]
    unit = partition or 6
    grid = [(a, min(a + unit, 6)) for a in range(0, 6, unit)]
    groups = [""] if heads == 0 else ["_H0", "_H1"]
    assert missing == [[page, f"L{a}-{b}{g}"] for page in range(3) for a, b in grid for g in groups]
    for page in range(3):
        client.put_page(pages, page, [(0, 1), (1, 6)])
    for order in ("page", "layer"):
        answer = client.pages("read", pages.namespace, pages.hashes, order=order, layers=[1, 5])
        assert answer.content == pages.read(slice(0, 3), slice(1, 5), slice(None), order)
    assert client.pages("missing", pages.namespace, pages.hashes).json() == {"missing": []}


def test_a_packed_row_and_a_v_of_another_width_have_their_own_lengths(client: Client, name: str) -> None:
    packed = tiny(f"{name}-packed", heads=0, head_dim=512, dtype="fp8_ds_mla", itemsize=1, row_bytes=41)
    assert client.register(packed).status_code == 201
    key = f"{page_hashes(name, 1)[0]}_{packed.digest}_L0-6"
    assert client.put(key, bytes(6 * 4 * 41)).status_code == 201
    uneven = tiny(f"{name}-uneven", v_head_dim=3)
    assert client.register(uneven).status_code == 201
    key = f"{page_hashes(name, 1)[0]}_{uneven.digest}_L0-6_H1"
    assert client.put(key, bytes(6 * 4 * 2 * (8 + 3) * 2)).status_code == 201


def test_match_counts_leading_pages_whose_whole_set_is_there(client: Client, pages: Pages) -> None:
    assert matched(client, pages) == 0
    for page in (0, 1, 3):
        client.put_page(pages, page, [(0, 3), (3, 6)])
    assert matched(client, pages) == 2
    assert matched(client, pages, pages.hashes[1:]) == 1
    assert matched(client, pages, pages.hashes[3:]) == 1
    # Of page 2, one object is missing: to readers that do not need it, it is there.
    for key, body in [
        (pages.key(2, 0, 3, 0), pages.body(2, 0, 3, 0)),
        (pages.key(2, 3, 6, 0), pages.body(2, 3, 6, 0)),
        (pages.key(2, 0, 3, 1), pages.body(2, 0, 3, 1)),
    ]:
        client.put(key, body)
    assert matched(client, pages) == 2
    assert matched(client, pages, heads=[0, 2]) == 4
    assert matched(client, pages, layers=[0, 3]) == 4
    assert matched(client, pages, layers=[2, 4], heads=[2, 4]) == 2
    assert matched(client, pages, layers=[5, 6], heads=[2, 4]) == 2


def test_read_gives_the_leading_pages_that_are_there(client: Client, pages: Pages) -> None:
    for page in (0, 1, 3):
        client.put_page(pages, page, [(0, 6)])
    for order in ("page", "layer"):
        answer = client.pages("read", pages.namespace, pages.hashes, order=order)
        assert answer.headers["L3-Pages"] == "2"
        assert answer.content == pages.read(slice(0, 2), slice(None), slice(None), order)
    nothing = client.pages("read", pages.namespace, pages.hashes[2:], sums=True)
    assert (nothing.status_code, nothing.headers["L3-Pages"], nothing.content) == (200, "0", b"")


def test_missing_names_what_a_writer_still_has_to_send(client: Client, pages: Pages) -> None:
    client.put_page(pages, 0, [(0, 3), (3, 6)])
    client.put(pages.key(1, 0, 3, 1), pages.body(1, 0, 3, 1))
    client.put(pages.key(2, 1, 5, 0), pages.body(2, 1, 5, 0))

    def missing(**shard: Any) -> Any:
        return client.pages("missing", pages.namespace, pages.hashes[:3], **shard).json()["missing"]

    assert missing() == [
        [1, "L0-3_H0"], [1, "L3-6_H0"], [1, "L3-6_H1"],
        [2, "L0-1_H0"], [2, "L0-3_H1"], [2, "L5-6_H0"], [2, "L3-6_H1"],
    ]  # fmt: skip
    assert missing(heads=[2, 4], layers=[0, 3]) == [[2, "L0-3_H1"]]
    # A stage off the grid is cut where the grid has its bounds.
    assert missing(heads=[2, 4], layers=[2, 6]) == [[1, "L3-6_H1"], [2, "L2-3_H1"], [2, "L3-6_H1"]]
    # What it names completes the pages, and nothing is sent twice.
    items: list[tuple[str, bytes, bytes | None]] = []
    for page, coordinate in missing():
        layers, group = coordinate[1:].split("_H")
        first, end = map(int, layers.split("-"))
        items.append((pages.key(page, first, end, int(group)), pages.body(page, first, end, int(group)), None))
    assert {r["status"] for r in client.write(items).json()["results"]} == {"created"}
    assert missing() == []
    read = client.pages("read", pages.namespace, pages.hashes[:3])
    assert read.content == pages.read(slice(0, 3), slice(None), slice(None), "page")


@pytest.mark.parametrize("order", ["page", "layer"])
def test_a_rotten_page_ends_a_read_before_it(client: Client, service: Service, pages: Pages, order: str) -> None:
    for page in range(4):
        client.put_page(pages, page, [(0, 3), (3, 6)])
    [path] = [path for path in service.files() if path.name == pages.key(2, 3, 6, 1)]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    answer = client.pages("read", pages.namespace, pages.hashes, order=order)
    assert answer.headers["L3-Pages"] == "2"
    assert answer.content == pages.read(slice(0, 2), slice(None), slice(None), order)
    assert not path.exists()
    assert matched(client, pages) == 2
    assert client.pages("missing", pages.namespace, pages.hashes[:4]).json() == {"missing": [[2, "L3-6_H1"]]}


def test_a_reader_that_asks_for_sums_can_tell_which_cell_is_rotten(
    client: Client, service: Service, pages: Pages
) -> None:
    client.put_page(pages, 0, [(0, 6)])
    [path] = [path for path in service.files() if path.name == pages.key(0, 0, 6, 0)]
    data = bytearray(path.read_bytes())
    data[3 * pages.cell_bytes] ^= 1
    path.write_bytes(data)
    answer = client.pages("read", pages.namespace, pages.hashes[:1], sums=True)
    body, sums = answer.content[: pages.array[0].size], answer.content[pages.array[0].size :]
    computed = pages.sums(body)
    assert [i for i in range(12) if computed[8 * i : 8 * i + 8] != sums[8 * i : 8 * i + 8]] == [3]


def small(name: str) -> Namespace:
    """The least that a model of 8 objects a page can be."""
    return tiny(name, page_size=1, layers=8, heads=2, head_group=1, partition=2, head_dim=2, dtype="uint8", itemsize=1)


def test_3125_pages_of_8_objects_are_matched_in_one_call(client: Client, name: str) -> None:
    pages = Pages(small(name), name, 3125)
    client.register(pages.namespace)
    items: list[tuple[str, bytes, bytes | None]] = [
        (pages.key(page, first, first + 2, group), pages.body(page, first, first + 2, group), None)
        for page in range(3125)
        for first in (0, 2, 4, 6)
        for group in (0, 1)
    ]
    results = client.write(items).json()["results"]
    assert [r["key"] for r in results] == [key for key, _, _ in items]
    assert {r["status"] for r in results} == {"created"}
    answer = client.pages("match", pages.namespace, pages.hashes)
    assert answer.json() == {"pages": 3125}
    assert answer.elapsed.total_seconds() < 2
    read = client.pages("read", pages.namespace, pages.hashes, order="layer")
    assert read.content == pages.read(slice(None), slice(None), slice(None), "layer")
    assert client.http.delete(f"/v1/namespaces/{pages.namespace.digest}").json()["objects"] == 25_000


@pytest.mark.parametrize("what", ["match", "missing", "read"])
def test_32768_pages_are_taken_and_one_more_is_413(client: Client, name: str, what: str) -> None:
    namespace = small(name)
    client.register(namespace)
    hashes = [f"{i:064x}" for i in range(32_769)]
    answer = client.pages(what, namespace, hashes[:-1])
    assert answer.status_code == 200
    if what == "match":
        assert answer.json() == {"pages": 0}
    elif what == "missing":
        assert len(answer.json()["missing"]) == 8 * 32_768
    check_problem(client.pages(what, namespace, hashes), 413, "32768 at most")


def test_a_read_beyond_the_limit_says_what_to_ask(client: Client, name: str) -> None:
    namespace = tiny(name, page_size=1024, layers=4, heads=8, head_group=8, head_dim=1024)
    client.register(namespace)
    page_bytes = 1024 * 4 * 8 * 1024 * 2 * 2
    fits = (4 << 30) // page_bytes
    check_problem(client.pages("read", namespace, page_hashes(name, fits + 1)), 413, f"{fits} pages")
    assert client.pages("read", namespace, page_hashes(name, fits)).status_code == 200


BAD = {
    "no pages": ({"page_hashes": []}, 400, "empty"),
    "no list": ({"page_hashes": "x"}, 400, "page_hashes"),
    "a page twice": ({"page_hashes": [f"{i:064x}" for i in (1, 2, 3, 2)]}, 400, "1 and 3 are the same"),
    "no page hash": ({"page_hashes": ["ab"]}, 400, "page_hashes"),
    "upper case": ({"page_hashes": ["A" * 64]}, 400, "page_hashes"),
    "a newline behind": ({"page_hashes": ["a" * 64 + "\n"]}, 400, "page_hashes"),
    "a number": ({"page_hashes": [1]}, 400, "page_hashes"),
    "layers beyond the model": ({"layers": [0, 7]}, 400, "6 layers"),
    "no layers": ({"layers": [3, 3]}, 400, "start < end"),
    "layers backwards": ({"layers": [4, 2]}, 400, "start < end"),
    "layers below zero": ({"layers": [-1, 2]}, 400, "start < end"),
    "three layers": ({"layers": [0, 2, 4]}, 400, "layers"),
    "layers as text": ({"layers": ["0", "2"]}, 400, "layers"),
    "heads off the group grid": ({"heads": [1, 3]}, 400, "ask for heads [0, 4) and cut after the read"),
    "heads beyond the model": ({"heads": [0, 6]}, 400, "4 KV heads"),
    "an unknown namespace": ({"namespace": "ukv1-0000000000000000"}, 404, "not registered"),
    "no digest": ({"namespace": "../x"}, 404, "not registered"),
    "an unknown member": ({"color": 1}, 400, "color"),
}


@pytest.mark.parametrize("what", ["match", "missing", "read"])
@pytest.mark.parametrize(("changed", "status", "words"), BAD.values(), ids=BAD.keys())
def test_bad_queries(client: Client, pages: Pages, what: str, changed: dict[str, Any], status: int, words: str) -> None:
    client.put_page(pages, 0, [(0, 6)])
    body = {"namespace": pages.namespace.digest, "page_hashes": pages.hashes, **changed}
    check_problem(client.http.post(f"/v1/pages/{what}", json=body), status, words)


def test_heads_of_an_mla_model_are_refused(client: Client, name: str) -> None:
    namespace = tiny(name, heads=0)
    client.register(namespace)
    check_problem(client.pages("match", namespace, page_hashes(name, 1), heads=[0, 1]), 400, "leave heads out")


@pytest.mark.parametrize("more", [{"order": "token"}, {"order": 1}, {"sums": "yes"}, {"sums": 1}])
def test_bad_reads(client: Client, pages: Pages, more: dict[str, Any]) -> None:
    check_problem(client.pages("read", pages.namespace, pages.hashes, **more), 400, next(iter(more)))


def test_every_item_of_a_write_has_a_result_of_its_own(client: Client, service: Service, pages: Pages) -> None:
    there, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(there, body)
    other = "ukv1-0000000000000000"
    huge = tiny("org/huge", page_size=4096, layers=4096, heads=8, head_group=8, head_dim=128)
    client.register(huge)
    items: list[tuple[str, bytes, bytes | None]] = [
        (pages.key(1, 0, 3), pages.body(1, 0, 3), pages.sums(pages.body(1, 0, 3))),
        (there, bytes(len(body)), None),
        (pages.key(1, 3, 6), pages.body(1, 3, 6)[:-1], None),
        ("../../etc/passwd", b"root", None),
        (pages.key(2, 0, 3).replace(pages.namespace.digest, other), body, None),
        (pages.key(2, 0, 7), body, None),
        (pages.key(2, 0, 3, 2), body, None),
        (pages.key(2, 0, 3), pages.body(2, 0, 3), bytes(24)),
        (pages.key(2, 3, 6), pages.body(2, 3, 6), b"12345678"),
        (f"{pages.hashes[0]}_{huge.digest}_L0-4096_H0", b"x", None),
        (pages.key(3, 0, 6, 1), pages.body(3, 0, 6, 1), None),
    ]
    results = client.write(items).json()["results"]
    assert [r["key"] for r in results] == [key for key, _, _ in items]
    assert [r["status"] for r in results] == ["created", "exists", *["error"] * 8, "created"]
    for result, words in zip(
        results[2:10],
        ["bytes, but", "not a key", "not registered", "6 layers", "head groups 0 to 1", "cell 0", "sums", "bytes, but"],
        strict=True,
    ):
        assert words in result["detail"]
    assert client.get(there).content == body
    assert client.get(pages.key(1, 0, 3)).content == pages.body(1, 0, 3)
    assert client.get(pages.key(3, 0, 6, 1)).content == pages.body(3, 0, 6, 1)
    for key, _, _ in items[5:9]:
        assert client.get(key).status_code in {400, 404}
    stored = [path.name for path in service.files() if pages.namespace.digest in path.name]
    assert sorted(stored) == sorted([there, pages.key(1, 0, 3), pages.key(3, 0, 6, 1)])
    assert service.partials() == []


def test_a_write_is_marked_with_whose_sums_it_has(client: Client, pages: Pages) -> None:
    body = pages.body(0, 0, 3)
    client.write([(pages.key(0, 0, 3), body, pages.sums(body)), (pages.key(1, 0, 3), pages.body(1, 0, 3), None)])
    assert client.get(pages.key(0, 0, 3)).headers["L3-Sums-By"] == "writer"
    assert client.get(pages.key(1, 0, 3)).headers["L3-Sums-By"] == "service"
    assert client.get(pages.key(0, 0, 3)).headers["L3-Sums"] == encode_sums(pages.sums(body))


def test_bodies_of_several_batches_arrive_whole(client: Client, name: str) -> None:
    """Batches of 8 MiB are stored while the next arrives: their bytes must not mix."""
    pages = Pages(tiny(name, page_size=64, layers=4, heads=8, head_group=4, head_dim=128, partition=2), name, 10)
    client.register(pages.namespace)
    items: list[tuple[str, bytes, bytes | None]] = []
    for page in range(10):
        for first, group in [(0, 0), (2, 0), (0, 1), (2, 1)]:
            body = pages.body(page, first, first + 2, group)
            items.append((pages.key(page, first, first + 2, group), body, pages.sums(body)))
    assert sum(len(body) for _, body, _ in items) == 10 << 20
    assert {r["status"] for r in client.write(items).json()["results"]} == {"created"}
    for order in ("page", "layer"):
        read = client.pages("read", pages.namespace, pages.hashes, order=order, sums=True)
        expected = pages.read(slice(None), slice(None), slice(None), order)
        assert read.content == expected + pages.sums(expected)
    client.http.delete(f"/v1/namespaces/{pages.namespace.digest}")


BODY = b"\0" * 768
MANIFESTS: dict[str, tuple[Any, bytes, int, str]] = {
    "empty list": ([], b"", 400, "manifest"),
    "an object": ({}, b"", 400, "manifest"),
    "no JSON": (None, b"", 400, "manifest"),
    "no key": ([{"length": 768}], BODY, 400, "key"),
    "no length": ([{"key": "k"}], BODY, 400, "length"),
    "length as text": ([{"key": "k", "length": "768"}], BODY, 400, "length"),
    "length zero": ([{"key": "k", "length": 0}], b"", 400, "length"),
    "length below zero": ([{"key": "k", "length": -1}], BODY, 400, "length"),
    "an unknown member": ([{"key": "k", "length": 768, "x": 1}], BODY, 400, "x"),
    "more announced than sent": ([{"key": "k", "length": 769}], BODY, 400, "768 follow"),
    "less announced than sent": ([{"key": "k", "length": 767}], BODY, 400, "768 follow"),
}


@pytest.mark.parametrize(("manifest", "body", "status", "words"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_bad_manifests(client: Client, manifest: Any, body: bytes, status: int, words: str) -> None:
    check_problem(client.http.post("/v1/pages/write", content=framed(manifest) + body), status, words)


def test_a_key_twice_in_one_write_is_refused_and_nothing_is_stored(client: Client, pages: Pages) -> None:
    item = (pages.key(0, 0, 3), pages.body(0, 0, 3), None)
    check_problem(client.write([item, (pages.key(1, 0, 3), pages.body(1, 0, 3), None), item]), 400, "items 0 and 2")
    for page in (0, 1):
        assert client.get(pages.key(page, 0, 3)).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "4 bytes"),
        (b"\0\0\0", 400, "4 bytes"),
        (struct.pack("<I", 10), 400, "10 bytes in a body of 4"),
        (struct.pack("<I", 0xFFFFFFFF), 413, "at most"),
        (struct.pack("<I", 0), 400, "manifest"),
    ],
)
def test_bad_write_bodies(client: Client, body: bytes, status: int, words: str) -> None:
    check_problem(client.http.post("/v1/pages/write", content=body), status, words)


def test_too_many_objects_in_one_write_are_413(client: Client) -> None:
    manifest = [{"key": f"{i}", "length": 1} for i in range(32_769)]
    answer = client.http.post("/v1/pages/write", content=framed(manifest) + bytes(32_769))
    check_problem(answer, 413, "32768 at most")


def test_thousands_of_bad_items_have_thousands_of_errors(client: Client) -> None:
    results = client.write([(f"no-key-{i}", b"x", None) for i in range(5000)]).json()["results"]
    assert len(results) == 5000
    assert all(r["status"] == "error" and "not a key" in r["detail"] for r in results)


def test_unicode_and_surrogates_in_a_manifest_are_that_items_error(client: Client) -> None:
    answer = client.write([("ключ", b"x", None), ("k\0y", b"x", None), ("x" * 10_000, b"x", None)])
    assert [r["status"] for r in answer.json()["results"]] == ["error"] * 3
    lone = b'[{"key": "\\ud800", "length": 1}]'
    check_problem(client.http.post("/v1/pages/write", content=struct.pack("<I", len(lone)) + lone + b"x"), 400)


def test_match_refreshes_and_is_counted(client: Client, pages: Pages) -> None:
    client.put_page(pages, 0, [(0, 6)])
    before = counters(client)
    assert matched(client, pages) == 1
    after = counters(client)
    assert after["l3store_match_pages_asked_total"] == before["l3store_match_pages_asked_total"] + 5
    assert after["l3store_match_pages_hit_total"] == before["l3store_match_pages_hit_total"] + 1


def test_the_whole_manifest_is_json_of_the_wire(client: Client, pages: Pages) -> None:
    """Spelled out, for those who write a client."""
    body = pages.body(4, 0, 3)
    manifest = json.dumps([{"key": pages.key(4, 0, 3), "length": 768, "sums": encode_sums(pages.sums(body))}]).encode()
    answer = client.http.post(
        "/v1/pages/write",
        content=len(manifest).to_bytes(4, "little") + manifest + body,
        headers={"Content-Type": "application/vnd.l3store.pages"},
    )
    assert answer.json() == {"results": [{"key": pages.key(4, 0, 3), "status": "created"}]}
    assert write_body([(pages.key(4, 0, 3), body, pages.sums(body))])[:4] == len(manifest).to_bytes(4, "little")
