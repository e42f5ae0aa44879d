"""Faults that others' cache tiers had in the field, tried on this service. Each test is named after its report."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from l3store.layout import Namespace, chain_seed, hash_pages
from l3store.layout.sums import encode_sums
from tests.support import Client, Pages, Service, Wire, check_problem, counters, tiny

LARGE: dict[str, Any] = {"page_size": 1024, "layers": 4, "heads": 8, "head_group": 8, "head_dim": 128, "partition": 4}
"""Objects of 16 MiB."""


@pytest.fixture
def registered(client: Client) -> Iterator[Callable[..., Pages]]:
    """Make pages of a namespace, registered; it is dropped with the test."""
    digests = []

    def register(model_id: str, count: int = 4, **more: Any) -> Pages:
        pages = Pages(tiny(model_id, **more), "shared", count)
        assert client.register(pages.namespace).status_code in {200, 201}
        digests.append(pages.namespace.digest)
        return pages

    yield register
    for digest in digests:
        client.http.delete(f"/v1/namespaces/{digest}")


def file_of(service: Service, key: str) -> Path:
    [path] = [path for path in service.files() if path.name == key]
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def match(client: Client, pages: Pages, **shard: Any) -> int:
    found: int = client.pages("match", pages.namespace, pages.hashes, **shard).json()["pages"]
    return found


def test_sglang_39880_a_half_written_page_is_never_seen(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 1. Its kill -9 is in tests/faults."""
    pages = registered("org/39880", **LARGE)
    key, body = pages.key(0, 0, 4), pages.body(0, 0, 4)
    seen: set[int] = set()
    with Wire(service) as wire:
        wire.request(f"PUT /v1/objects/{key} HTTP/1.1\nContent-Length: {len(body)}")
        for at in range(0, len(body) - 1, 2 << 20):
            wire.send(body[at : min(at + (2 << 20), len(body) - 1)])
            seen |= {client.get(key).status_code, client.http.head(f"/v1/objects/{key}").status_code}
            assert client.pages("missing", pages.namespace, pages.hashes[:1]).json() == {"missing": [[0, "L0-4_H0"]]}
        assert seen == {404}
        wire.send(body[-1:])
        assert wire.answer().status == 201
    assert client.get(key).content == body


def test_vllm_54363_a_flipped_bit_is_a_miss_and_not_wrong_bytes(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 2: read with its cell verified, or with the sum that shows it; a range of sound cells is served."""
    pages = registered("org/54363")
    for page in range(4):
        client.put(pages.key(page, 0, 6), pages.body(page, 0, 6))
        flip(file_of(service, pages.key(page, 0, 6)), 2 * pages.cell_bytes + 5)
    before = counters(client)["l3store_corrupt_objects_total"]
    whole = client.get(pages.key(0, 0, 6))
    assert whole.headers["L3-Sums"] == encode_sums(pages.sums(pages.body(0, 0, 6)))
    assert whole.headers["L3-Sums"] != encode_sums(pages.sums(whole.content))
    assert client.http.post(f"/v1/objects/{pages.key(0, 0, 6)}/suspect").json()["corrupt"] is True
    check_problem(client.get(pages.key(0, 0, 6)), 404)
    check_problem(client.get(pages.key(1, 0, 6), Range="bytes=520-530"), 404)
    sound = client.get(pages.key(2, 0, 6), Range="bytes=0-99")
    assert (sound.status_code, sound.content) == (206, pages.body(2, 0, 6)[:100])
    read = client.pages("read", pages.namespace, pages.hashes[3:], heads=[0, 2])
    assert (read.headers["L3-Pages"], read.content) == ("0", b"")
    assert counters(client)["l3store_corrupt_objects_total"] == before + 3


def test_mooncake_3140_range_reads_are_verified_too(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 3: a range across several cells that cuts the first and the last, each byte of the rot in turn."""
    pages = registered("org/3140", count=6)
    for page, at in enumerate([0, 255, 256, 600, 1023, 1024]):
        key = pages.key(page, 0, 6)
        client.put(key, pages.body(page, 0, 6))
        flip(file_of(service, key), at)
        answer = client.get(key, Range="bytes=100-1000")
        if at < 1024:
            check_problem(answer, 404)
        else:
            assert answer.content == pages.body(page, 0, 6)[100:1001]


def test_sglang_33268_runs_of_another_dtype_do_not_hit(client: Client, registered: Callable[..., Pages]) -> None:
    """Report 4."""
    spaces = [
        registered("org/33268"),
        registered("org/33268", dtype="float8_e4m3fn", itemsize=1, head_dim=16),
        registered("org/33268", dtype="float8_e5m2", itemsize=1, head_dim=16),
    ]
    assert len({pages.namespace.digest for pages in spaces}) == 3
    client.put_page(spaces[0], 0, [(0, 6)])
    assert [match(client, pages) for pages in spaces] == [1, 0, 0]


def test_sglang_26747_tenants_and_salts_do_not_share(client: Client, registered: Callable[..., Pages]) -> None:
    """Report 5: by the chain's seed, and by the namespace."""
    tokens = list(range(64))
    seeds = [None, chain_seed(), chain_seed(cache_salt=""), chain_seed(cache_salt="a"), chain_seed(cache_salt="b")]
    seeds += [chain_seed("a", "bc"), chain_seed("ab", "c"), chain_seed(extra_key="a")]
    chains = [tuple(hash_pages(tokens, 16, prior=seed)) for seed in seeds]
    assert chains[0] == chains[1]
    assert len(set(chains[1:])) == len(chains) - 1
    spaces = [registered("org/26747"), registered("org/26747", tenant="a"), registered("org/26747", tenant="b")]
    client.put_page(spaces[1], 0, [(0, 6)])
    assert [match(client, pages) for pages in spaces] == [0, 1, 0]


def test_lmcache_5210_names_of_models_do_not_alias_nor_escape(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 6."""
    names = [
        "org/a_b",
        "org_a/b",
        "org-a/b",
        "Org/a b",
        "org%2Fa_b",
        "../org/a_b",
        "..",
        "/etc/passwd",
        "org/a_b ",
        "ü",
    ]
    outside = sorted(service.data_dir.parent.iterdir())
    spaces = [registered(name) for name in names]
    assert len({pages.namespace.digest for pages in spaces}) == len(names)
    for number, pages in enumerate(spaces):
        assert client.put(pages.key(0, 0, 6), bytes([number]) * len(pages.body(0, 0, 6))).status_code == 201
    for number, pages in enumerate(spaces):
        assert client.get(pages.key(0, 0, 6)).content == bytes([number]) * len(pages.body(0, 0, 6))
    listed = {n["namespace"]["model_id"] for n in client.http.get("/v1/namespaces").json()["namespaces"]}
    assert set(names) <= listed
    assert sorted(service.data_dir.parent.iterdir()) == outside
    assert client.http.delete(f"/v1/namespaces/{spaces[0].namespace.digest}").json()["objects"] == 1
    assert client.get(spaces[1].key(0, 0, 6)).status_code == 200


def test_vllm_55907_layouts_of_equal_size_do_not_alias(client: Client, registered: Callable[..., Pages]) -> None:
    """Report 7."""
    spaces = [
        registered("org/55907", page_size=32, head_group=2),
        registered("org/55907", page_size=64, head_group=1),
        registered("org/55907", page_size=16, head_group=4),
    ]
    assert len({pages.cell_bytes for pages in spaces}) == 1
    client.put(spaces[0].key(0, 0, 3), spaces[0].body(0, 0, 3))
    for pages in spaces[1:]:
        check_problem(client.get(pages.key(0, 0, 3)), 404)
    other = spaces[0].namespace
    fields = dataclasses.replace(other.fields, object_layout="page-unified-v2")
    renamed = Namespace(fields=fields, geometry=other.geometry)
    assert renamed.digest != other.digest
    check_problem(client.register(renamed), 400, "object_layout")


def test_sglang_10969_ranks_write_their_own_objects_and_replicas_one(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 8: four ranks at once, then four replicas of an MLA model."""
    pages = registered("org/10969", head_group=1)
    bodies = [pages.body(0, 0, 3, group) for group in range(4)]
    with ThreadPoolExecutor(4) as pool:
        written = pool.map(lambda group: client.put(pages.key(0, 0, 3, group), bodies[group]).status_code, range(4))
        assert list(written) == [201] * 4
    assert [client.get(pages.key(0, 0, 3, group)).content for group in range(4)] == bodies
    mla = registered("org/10969-mla", heads=0)
    with ThreadPoolExecutor(4) as pool:
        written = pool.map(lambda _: client.put(mla.key(0, 0, 3), mla.body(0, 0, 3)).status_code, range(4))
        assert sorted(written) == [200, 200, 200, 201]
    assert [path.name for path in service.files() if mla.namespace.digest in path.name] == [mla.key(0, 0, 3)]


def test_sglang_9256_releases_do_not_share(client: Client, registered: Callable[..., Pages]) -> None:
    """Report 9."""
    spaces = [registered("org/9256", model_revision=tag) for tag in ("release-1", "release-2", "release-1")]
    client.put_page(spaces[0], 0, [(0, 6)])
    assert [match(client, pages) for pages in spaces] == [1, 0, 1]


def test_mooncake_2827_one_bad_item_does_not_fail_the_batch(client: Client, registered: Callable[..., Pages]) -> None:
    """Report 11: of 128, number 57 exists, 58 is oversize and 59 has a bad key."""
    pages = registered("org/2827", count=128)
    items: list[tuple[str, bytes, bytes | None]] = [
        (pages.key(page, 0, 3), pages.body(page, 0, 3), None) for page in range(128)
    ]
    client.put(items[57][0], items[57][1])
    items[58] = (items[58][0], items[58][1] * 1000, None)
    items[59] = (f"{'z' * 64}_{pages.namespace.digest}_L0-3_H0", items[59][1], None)
    results = client.write(items).json()["results"]
    statuses = [result["status"] for result in results]
    assert statuses == ["created"] * 57 + ["exists", "error", "error"] + ["created"] * 68
    assert client.pages("match", pages.namespace, pages.hashes[:58], layers=[0, 3], heads=[0, 2]).json() == {
        "pages": 58
    }
    assert client.pages("match", pages.namespace, pages.hashes[60:], layers=[0, 3], heads=[0, 2]).json() == {
        "pages": 68
    }


def test_sglang_batch_set_a_failed_object_hides_its_page_and_a_retry_sends_only_it(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 12: object 5 of 8 fails."""
    pages = registered("org/batch-set", head_group=1, count=1)
    names = [(first, group) for first in (0, 3) for group in range(4)]
    items: list[tuple[str, bytes, bytes | None]] = [
        (pages.key(0, first, first + 3, group), pages.body(0, first, first + 3, group), None) for first, group in names
    ]
    items[4] = (items[4][0], items[4][1], bytes(24))
    statuses = [result["status"] for result in client.write(items).json()["results"]]
    assert statuses == ["created"] * 4 + ["error"] + ["created"] * 3
    # To every reader that needs a cell of it, the page is not there.
    for shard in ({}, {"layers": [3, 6]}, {"heads": [0, 1]}, {"layers": [2, 4], "heads": [0, 2]}):
        assert match(client, pages, **shard) == 0
    stored = {path: path.stat().st_mtime_ns for path in service.files() if pages.namespace.digest in path.name}
    missing = client.pages("missing", pages.namespace, pages.hashes).json()["missing"]
    assert missing == [[0, "L3-6_H0"]]
    assert client.put(pages.key(0, 3, 6, 0), pages.body(0, 3, 6, 0)).status_code == 201
    assert match(client, pages) == 1
    assert all(path.stat().st_mtime_ns == written for path, written in stored.items())


def test_sglang_31108_one_lost_object_shrinks_the_hit_of_every_reader(
    client: Client, registered: Callable[..., Pages]
) -> None:
    """Report 13: a reader set of PP2/TP2, and the page before it is still a hit."""
    pages = registered("org/31108")
    for page in range(4):
        client.put_page(pages, page, [(0, 3), (3, 6)])
    client.http.delete(f"/v1/objects/{pages.key(2, 3, 6, 1)}")
    readers = [{"layers": layers, "heads": heads} for layers in ([0, 3], [3, 6]) for heads in ([0, 2], [2, 4])]
    assert [match(client, pages, **reader) for reader in readers] == [4, 4, 4, 2]
    assert match(client, pages) == 2
    assert client.pages("read", pages.namespace, pages.hashes).headers["L3-Pages"] == "2"


def test_sglang_28653_no_folder_is_flat(client: Client, service: Service, registered: Callable[..., Pages]) -> None:
    """Report 16, in its short form: names fan out over 256 folders."""
    pages = registered("org/28653", count=400, page_size=1, layers=1, partition=1)
    items: list[tuple[str, bytes, bytes | None]] = [
        (pages.key(page, 0, 1), pages.body(page, 0, 1), None) for page in range(400)
    ]
    client.write(items)
    objects = service.data_dir / "objects"
    paths = [path.relative_to(objects) for path in service.files() if pages.namespace.digest in path.name]
    assert len(paths) == 400
    assert all(len(path.parts) == 2 and path.name.startswith(path.parts[0]) for path in paths)
    assert len({path.parts[0] for path in paths}) > 150


def test_sglang_29716_a_file_that_another_deleted_is_a_miss_once_and_then_unknown(
    client: Client, service: Service, registered: Callable[..., Pages]
) -> None:
    """Report 22."""
    pages = registered("org/29716")
    client.put_page(pages, 0, [(0, 6)])
    for path in service.files():
        if pages.namespace.digest in path.name:
            path.unlink()
    check_problem(client.get(pages.key(0, 0, 6)), 404)
    assert match(client, pages, heads=[0, 2]) == 0
    read = client.pages("read", pages.namespace, pages.hashes)
    assert read.headers["L3-Pages"] == "0"
    assert client.http.get(f"/v1/namespaces/{pages.namespace.digest}").json()["objects"] <= 1


@pytest.mark.parametrize("act", ["delete", "drop", "evict"])
def test_mooncake_850_a_slow_reader_keeps_its_bytes(
    start_service: Callable[..., Service], connect: Callable[[Service], Client], tmp_path: Path, act: str
) -> None:
    """Report 25: what is deleted, dropped or evicted under a reader is read whole or the answer ends; never mixed."""
    service = start_service(tmp_path / "data", "--capacity", "100Mi")
    client = connect(service)
    pages = Pages(tiny("org/850", **LARGE), "850", 5)
    client.register(pages.namespace)
    for page in range(5):
        assert client.put(pages.key(page, 0, 4), pages.body(page, 0, 4)).status_code == 201
    body = json.dumps({"namespace": pages.namespace.digest, "page_hashes": pages.hashes}).encode()
    got = bytearray()
    with Wire(service) as wire:
        head = f"POST /v1/pages/read HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}"
        wire.request(head, body)
        first = wire.socket.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        got += first.partition(b"\r\n\r\n")[2]
        if act == "delete":
            for page in range(5):
                assert client.http.delete(f"/v1/objects/{pages.key(page, 0, 4)}").status_code == 204
                assert client.put(pages.key(page, 0, 4), bytes(16 << 20)).status_code == 201
        elif act == "drop":
            assert client.http.delete(f"/v1/namespaces/{pages.namespace.digest}").status_code == 200
        else:
            others = Pages(tiny("org/850-other", **LARGE), "850-other", 5)
            client.register(others.namespace)
            for page in range(5):
                assert client.put(others.key(page, 0, 4), others.body(page, 0, 4)).status_code == 201
        while data := wire.socket.recv(1 << 20):
            got += data
            if len(got) == pages.array.size:
                break
    # What was stored under the key since is a new object of other bytes, which a test may write and a model does not.
    expected = pages.array.tobytes()
    same = next((at for at in range(0, len(got), 4096) if got[at : at + 4096] != expected[at : at + 4096]), len(got))
    assert same >= 4 << 20
    if act != "delete":
        assert bytes(got) == expected[: len(got)]
    assert "Traceback" not in service.log


def test_lmcache_clear_cache_a_clear_under_writers_leaves_what_was_acknowledged_after_it(
    client: Client, service: Service
) -> None:
    """Reports 21 and 39, in their short form: puts, gets, deletes and drops at once; then the totals are exact."""
    namespace = tiny("org/clear")
    pages = Pages(namespace, "clear", 6)
    client.register(namespace)
    statuses: set[int] = set()
    end = time.monotonic() + 1.5

    def work(number: int) -> None:
        mine = Client(service.url)
        rng = random.Random(number)
        while time.monotonic() < end:
            page, group = rng.randrange(6), rng.randrange(2)
            first, last = rng.choice([(0, 3), (3, 6), (0, 6), (2, 4)])
            key = pages.key(page, first, last, group)
            act = rng.random()
            if act < 0.5:
                statuses.add(mine.put(key, pages.body(page, first, last, group)).status_code)
            elif act < 0.85:
                answer = mine.get(key)
                statuses.add(answer.status_code)
                assert answer.status_code == 404 or answer.content == pages.body(page, first, last, group)
            elif act < 0.98:
                statuses.add(mine.http.delete(f"/v1/objects/{key}").status_code)
            else:
                statuses.add(mine.http.delete(f"/v1/namespaces/{namespace.digest}").status_code)
                mine.register(namespace)
        mine.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses <= {200, 201, 204, 404}
    stored = [path for path in service.files() if namespace.digest in path.name]
    info = client.http.get(f"/v1/namespaces/{namespace.digest}").json()
    assert info["objects"] == len(stored)
    layers = [int(b) - int(a) for path in stored for a, b in [path.name.split("_L")[1].split("_")[0].split("-")]]
    assert info["bytes"] == sum(layers) * namespace.cell_bytes
    assert client.http.delete(f"/v1/namespaces/{namespace.digest}").json()["objects"] == len(stored)
    assert [path for path in service.files() if namespace.digest in path.name] == []
    client.register(namespace)
    client.put_page(pages, 0, [(0, 6)])
    assert client.http.get(f"/v1/namespaces/{namespace.digest}").json()["objects"] == 2
    client.http.delete(f"/v1/namespaces/{namespace.digest}")
