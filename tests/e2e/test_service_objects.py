"""Objects over HTTP: first writer wins, sums in and out, ranges, composition, delete, suspect."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from l3store.layout.sums import encode_sums
from tests.support import Client, Pages, Service, check_problem, counters, tiny


@pytest.fixture
def pages(client: Client, request: pytest.FixtureRequest) -> Iterator[Pages]:
    """Three pages of a namespace of this test's own, registered, not stored."""
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    made = Pages(tiny(f"org/objects-{name}"), name, 3)
    assert client.register(made.namespace).status_code == 201
    yield made
    client.http.delete(f"/v1/namespaces/{made.namespace.digest}")


def stored_file(service: Service, key: str) -> Path:
    [path] = [path for path in service.files() if path.name == key]
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_created_then_exists_and_the_first_writer_wins(client: Client, service: Service, pages: Pages) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    first = client.put(key, body, pages.sums(body))
    assert (first.status_code, first.json()) == (201, {"key": key, "status": "created"})
    other = bytes(len(body))
    second = client.put(key, other, pages.sums(other))
    assert (second.status_code, second.json()) == (200, {"key": key, "status": "exists"})
    third = client.put(key, other, pages.sums(other), once=True)
    check_problem(third, 412, "already stored")
    assert client.get(key).content == body
    assert stored_file(service, key).parent.name == key[:2]


def test_one_of_many_writers_at_once_creates_it_and_all_read_its_bytes(client: Client, pages: Pages) -> None:
    key = pages.key(0, 0, 6)
    bodies = [bytes([i]) * len(pages.body(0, 0, 6)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: client.put(key, body).status_code, bodies))
    assert sorted(statuses) == [200] * 7 + [201]
    assert client.get(key).content == bodies[statuses.index(201)]


def test_the_writers_sums_are_checked_and_given_back(client: Client, pages: Pages) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    assert client.put(key, body, pages.sums(body)).status_code == 201
    answer = client.get(key)
    assert answer.headers["L3-Sums"] == encode_sums(pages.sums(body))
    assert answer.headers["L3-Sums-By"] == "writer"
    assert answer.headers["Content-Type"] == "application/octet-stream"


def test_sums_that_were_not_given_are_made_and_marked(client: Client, pages: Pages) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    assert client.put(key, body).status_code == 201
    head = client.http.head(f"/v1/objects/{key}")
    assert head.headers["L3-Sums"] == encode_sums(pages.sums(body))
    assert head.headers["L3-Sums-By"] == "service"


@pytest.mark.parametrize("given", ["other cell", "too few", "too many", "not base64", "empty"])
def test_wrong_sums_store_nothing(client: Client, pages: Pages, given: str) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    right = pages.sums(body)
    header = {
        "other cell": encode_sums(right[:8] + bytes(8) + right[16:]),
        "too few": encode_sums(right[:16]),
        "too many": encode_sums(right + right[:8]),
        "not base64": "!!!!",
        "empty": "",
    }[given]
    answer = client.http.put(f"/v1/objects/{key}", content=body, headers={"L3-Sums": header})
    problem = check_problem(answer, 400, "sums")
    assert problem["type"].endswith(":wrong-sums")
    check_problem(client.get(key), 404)
    assert client.put(key, body, right).status_code == 201


def test_the_etag_is_strong_and_names_the_bytes(client: Client, pages: Pages) -> None:
    key, body = pages.key(0, 0, 6), pages.body(0, 0, 6)
    client.put(key, body)
    tag = client.get(key).headers["ETag"]
    assert tag.startswith('"')
    assert client.http.head(f"/v1/objects/{key}").headers["ETag"] == tag
    assert client.get(key, Range="bytes=5-9").headers["ETag"] == tag
    # The same bytes put together from elsewhere have the same tag, other bytes another.
    client.put(pages.key(1, 0, 2), body[: len(body) // 3])
    client.put(pages.key(1, 2, 6), body[len(body) // 3 :])
    assert client.get(pages.key(1, 0, 6)).headers["ETag"] == tag
    assert client.get(pages.key(0, 0, 3)).headers["ETag"] != tag


@pytest.mark.parametrize(
    ("template", "status"), [("{tag}", 304), ('"x", {tag}', 304), ("W/{tag}", 304), ("*", 304), ('"x"', 200)]
)
def test_if_none_match(client: Client, pages: Pages, template: str, status: int) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body)
    tag = client.get(key).headers["ETag"]
    answer = client.get(key, **{"If-None-Match": template.format(tag=tag)})
    assert answer.status_code == status
    assert answer.headers["ETag"] == tag
    assert answer.content == (b"" if status == 304 else body)


SIZE = 3 * 4 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-9", (5, 10)),
        ("BYTES=5-9", (5, 10)),
        (f"bytes=100-{SIZE - 1}", (100, SIZE)),
        ("bytes=100-", (100, SIZE)),
        ("bytes=-7", (SIZE - 7, SIZE)),
        (f"bytes=-{10 * SIZE}", (0, SIZE)),
        (f"bytes=700-{10 * SIZE}", (700, SIZE)),
        ("bytes=700-99999999999999999999999", (700, SIZE)),
        ("bytes=256-511", (256, 512)),
        ("bytes=0-", (0, SIZE)),
    ],
)
def test_one_range_is_206(client: Client, pages: Pages, header: str, span: tuple[int, int]) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    assert len(body) == SIZE
    client.put(key, body)
    answer = client.get(key, Range=header)
    first, end = span
    assert answer.status_code == 206
    assert answer.content == body[first:end]
    assert answer.headers["Content-Range"] == f"bytes {first}-{end - 1}/{SIZE}"
    assert answer.headers["Content-Length"] == str(end - first)
    # Sums are of whole cells, so a range that cuts one has none.
    whole = first % pages.cell_bytes == 0 and end % pages.cell_bytes == 0
    assert answer.headers.get("L3-Sums") == (encode_sums(pages.sums(body[first:end])) if whole else None)


@pytest.mark.parametrize(
    "header",
    ["bytes=0-1,5-9", "bytes=9-5", "bytes=", "bytes=-", "bytes=a-b", "lines=0-5", "0-5", "bytes=+1-2", "bytes=1.5-2"],
)
def test_a_range_header_that_is_no_single_range_is_ignored(client: Client, pages: Pages, header: str) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body)
    answer = client.get(key, Range=header)
    assert (answer.status_code, answer.content) == (200, body)


@pytest.mark.parametrize(
    "header", [f"bytes={SIZE}-", f"bytes={SIZE}-{SIZE + 5}", "bytes=-0", "bytes=99999999999999999999999-"]
)
def test_a_range_beyond_the_end_is_416_with_the_size(client: Client, pages: Pages, header: str) -> None:
    key = pages.key(0, 0, 3)
    client.put(key, pages.body(0, 0, 3))
    answer = client.get(key, Range=header)
    assert check_problem(answer, 416)["size"] == SIZE
    assert answer.headers["Content-Range"] == f"bytes */{SIZE}"


def test_a_range_of_what_is_not_stored_is_a_miss(client: Client, pages: Pages) -> None:
    key = pages.key(0, 0, 3)
    check_problem(client.get(key, Range="bytes=0-9"), 404)
    check_problem(client.get(key, Range=f"bytes={SIZE}-"), 404)
    check_problem(client.http.get(f"/v1/objects/{key}?offset=0&length=0"), 404)
    check_problem(client.get(key, **{"If-None-Match": "*"}), 404)


def test_if_range_takes_the_range_of_the_bytes_it_names_only(client: Client, pages: Pages) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body)
    tag = client.get(key).headers["ETag"]
    assert client.get(key, Range="bytes=5-9", **{"If-Range": tag}).content == body[5:10]
    for other in ('"x"', f"W/{tag}", "Mon, 30 Nov 2026 21:41:37 GMT"):
        answer = client.get(key, Range="bytes=5-9", **{"If-Range": other})
        assert (answer.status_code, answer.content) == (200, body)


@pytest.mark.parametrize(
    ("query", "span"),
    [
        ("offset=5&length=9", (5, 14)),
        ("length=9", (0, 9)),
        ("offset=700", (700, SIZE)),
        (f"offset=0&length={SIZE}", (0, SIZE)),
    ],
)
def test_offset_and_length(client: Client, pages: Pages, query: str, span: tuple[int, int]) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body)
    answer = client.http.get(f"/v1/objects/{key}?{query}")
    assert (answer.status_code, answer.content) == (206, body[slice(*span)])


@pytest.mark.parametrize(
    "query", ["offset=5&length=0", "length=0", f"offset={SIZE}", f"offset=1&length={SIZE}", f"offset={10**30}&length=1"]
)
def test_offset_and_length_are_strict(client: Client, pages: Pages, query: str) -> None:
    key = pages.key(0, 0, 3)
    client.put(key, pages.body(0, 0, 3))
    check_problem(client.http.get(f"/v1/objects/{key}?{query}"), 416, str(SIZE))


@pytest.mark.parametrize(
    "query", ["offset=-1", "length=-1", "offset=x", "offset=", "length=1e3", f"offset={'9' * 5000}"]
)
def test_offset_and_length_that_are_no_numbers_are_400(client: Client, pages: Pages, query: str) -> None:
    key = pages.key(0, 0, 3)
    client.put(key, pages.body(0, 0, 3))
    check_problem(client.http.get(f"/v1/objects/{key}?{query}"), 400, query.partition("=")[0])


def test_range_and_offset_together_are_400(client: Client, pages: Pages) -> None:
    key = pages.key(0, 0, 3)
    client.put(key, pages.body(0, 0, 3))
    check_problem(client.http.get(f"/v1/objects/{key}?offset=1", headers={"Range": "bytes=0-1"}), 400, "one of them")


def test_head_says_what_get_would(client: Client, pages: Pages) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    missing = client.http.head(f"/v1/objects/{key}")
    assert (missing.status_code, missing.content) == (404, b"")
    client.put(key, body)
    head, whole = client.http.head(f"/v1/objects/{key}"), client.get(key)
    assert head.content == b""
    for name in ("Content-Length", "Content-Type", "ETag", "L3-Sums", "L3-Sums-By", "Accept-Ranges"):
        assert head.headers[name] == whole.headers[name]


def test_delete_takes_every_object_that_holds_a_cell_of_it(client: Client, service: Service, pages: Pages) -> None:
    client.put_page(pages, 0, [(0, 3), (3, 6)])
    client.put(pages.key(0, 0, 6), pages.body(0, 0, 6))
    assert client.http.delete(f"/v1/objects/{pages.key(0, 2, 3)}").status_code == 204
    check_problem(client.get(pages.key(0, 2, 3)), 404)
    check_problem(client.http.delete(f"/v1/objects/{pages.key(0, 2, 3)}"), 404)
    assert client.get(pages.key(0, 3, 6)).status_code == 200
    assert client.get(pages.key(0, 0, 3, 1)).status_code == 200
    kept = sorted(path.name for path in service.files() if path.name.startswith(pages.hashes[0]))
    assert kept == sorted([pages.key(0, 3, 6), pages.key(0, 0, 3, 1), pages.key(0, 3, 6, 1)])


def test_any_run_is_served_however_what_is_stored_was_cut(client: Client, pages: Pages) -> None:
    for first, end in [(0, 2), (1, 4), (4, 5), (5, 6)]:
        body = pages.body(0, first, end)
        assert client.put(pages.key(0, first, end), body, pages.sums(body)).status_code == 201
    for first in range(6):
        for end in range(first + 1, 7):
            answer = client.get(pages.key(0, first, end))
            body = pages.body(0, first, end)
            assert answer.content == body
            assert answer.headers["L3-Sums"] == encode_sums(pages.sums(body))
            assert answer.headers["L3-Sums-By"] == "writer"


def test_ranges_of_a_run_that_is_put_together(client: Client, pages: Pages) -> None:
    for first, end in [(0, 2), (2, 5), (5, 6)]:
        client.put(pages.key(0, first, end), pages.body(0, first, end))
    body = pages.body(0, 0, 6)
    for first, end in [(0, 1), (255, 257), (511, 513), (300, 1400), (512, 1280), (1279, 1536), (1535, 1536)]:
        assert client.get(pages.key(0, 0, 6), Range=f"bytes={first}-{end - 1}").content == body[first:end]


def test_a_put_whose_cells_are_all_there_stores_nothing(client: Client, service: Service, pages: Pages) -> None:
    client.put_page(pages, 0, [(0, 4), (4, 6)])
    before = service.files()
    for first, end in [(0, 6), (1, 3), (3, 5)]:
        answer = client.put(pages.key(0, first, end), bytes(len(pages.body(0, first, end))))
        assert (answer.status_code, answer.json()["status"]) == (200, "exists")
    assert service.files() == before
    # One that adds a cell is stored, whole.
    client.http.delete(f"/v1/objects/{pages.key(0, 4, 6)}")
    assert client.put(pages.key(0, 3, 6), pages.body(0, 3, 6)).status_code == 201
    assert client.get(pages.key(0, 0, 6)).content == pages.body(0, 0, 6)


def test_a_run_with_a_missing_cell_is_a_miss(client: Client, pages: Pages) -> None:
    client.put(pages.key(0, 0, 2), pages.body(0, 0, 2))
    client.put(pages.key(0, 3, 6), pages.body(0, 3, 6))
    for first, end in [(0, 3), (2, 3), (0, 6), (1, 4)]:
        check_problem(client.get(pages.key(0, first, end)), 404, "not all")
    check_problem(client.get(pages.key(0, 0, 2, 1)), 404)
    check_problem(client.get(pages.key(1, 0, 2)), 404)


@pytest.mark.parametrize("offset", [0, 600, SIZE, SIZE + 20], ids=["first cell", "last cell", "sum", "last sum"])
def test_suspect_finds_its_own_rot_and_sets_it_aside(
    client: Client, service: Service, pages: Pages, offset: int
) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body, pages.sums(body))
    path = stored_file(service, key)
    flip(path, offset)
    before = counters(client)
    answer = client.http.post(f"/v1/objects/{key}/suspect")
    assert (answer.status_code, answer.json()) == (200, {"key": key, "corrupt": True})
    assert not path.exists()
    assert any(kept.name.startswith(key) for kept in service.files("quarantine"))
    check_problem(client.get(key), 404)
    check_problem(client.http.post(f"/v1/objects/{key}/suspect"), 404)
    after = counters(client)
    for name in ("l3store_corrupt_objects_total", "l3store_suspects_corrupt_total"):
        assert after[name] == before[name] + 1
    assert client.put(key, body).status_code == 201
    assert client.get(key).content == body


def test_suspect_of_sound_bytes_blames_the_wire(client: Client, pages: Pages) -> None:
    key = pages.key(0, 0, 3)
    client.put(key, pages.body(0, 0, 3))
    before = counters(client)["l3store_suspects_sound_total"]
    assert client.http.post(f"/v1/objects/{key}/suspect", content=b"").json() == {"key": key, "corrupt": False}
    assert client.get(key).status_code == 200
    assert counters(client)["l3store_suspects_sound_total"] == before + 1


def test_suspect_of_a_part_finds_the_object_that_holds_it(client: Client, service: Service, pages: Pages) -> None:
    client.put(pages.key(0, 0, 2), pages.body(0, 0, 2))
    client.put(pages.key(0, 2, 6), pages.body(0, 2, 6))
    flip(stored_file(service, pages.key(0, 2, 6)), 0)
    assert client.http.post(f"/v1/objects/{pages.key(0, 1, 3)}/suspect").json()["corrupt"] is True
    check_problem(client.get(pages.key(0, 2, 3)), 404)
    assert client.get(pages.key(0, 0, 2)).status_code == 200


@pytest.mark.parametrize("span", [(500, 520), (0, 1), (767, 768)])
def test_a_range_that_cuts_a_rotten_cell_is_a_miss_and_never_wrong_bytes(
    client: Client, service: Service, pages: Pages, span: tuple[int, int]
) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body)
    path = stored_file(service, key)
    # Not a byte that is asked for, but one of the same cell.
    cell = span[0] // pages.cell_bytes
    flip(path, cell * pages.cell_bytes + (span[0] + 100) % pages.cell_bytes)
    check_problem(client.get(key, Range=f"bytes={span[0]}-{span[1] - 1}"), 404)
    assert not path.exists()
    assert any(kept.name.startswith(key) for kept in service.files("quarantine"))


@pytest.mark.parametrize("damage", ["short", "no trailer", "empty", "foreign", "longer"])
def test_a_file_that_is_not_what_was_stored_is_a_miss(
    client: Client, service: Service, pages: Pages, damage: str
) -> None:
    key, body = pages.key(0, 0, 3), pages.body(0, 0, 3)
    client.put(key, body, pages.sums(body))
    path = stored_file(service, key)
    data = path.read_bytes()
    path.write_bytes(
        {
            "short": data[:-1],
            "no trailer": body,
            "empty": b"",
            "foreign": data[:-8] + b"FOREIGN!",
            "longer": bytes(8) + data,
        }[damage]
    )
    check_problem(client.get(key), 404)
    assert client.http.head(f"/v1/objects/{key}").status_code == 404
    assert client.pages("match", pages.namespace, [pages.hashes[0]], layers=[0, 3], heads=[0, 2]).json() == {"pages": 0}
    assert client.put(key, body).status_code == 201


def test_a_file_that_was_deleted_under_the_service_is_a_miss_and_leaves_the_index(
    client: Client, service: Service, pages: Pages
) -> None:
    client.put_page(pages, 0, [(0, 6)])
    stored_file(service, pages.key(0, 0, 6, 1)).unlink()
    check_problem(client.get(pages.key(0, 0, 6, 1)), 404)
    assert client.pages("match", pages.namespace, pages.hashes).json() == {"pages": 0}
    assert client.put(pages.key(0, 0, 6, 1), pages.body(0, 0, 6, 1)).status_code == 201
    assert client.pages("match", pages.namespace, pages.hashes).json() == {"pages": 1}


def test_what_is_on_disk_is_what_sglang_lays_out(client: Client, service: Service, pages: Pages) -> None:
    """(layer, K/V, token, head, head_dim) of one head group: the file's cells, then sums, then a footer."""
    key = pages.key(0, 3, 6, 1)
    body = b"".join(
        pages.array[0, 1, layer, kv, token, head].tobytes()
        for layer in (3, 4, 5)
        for kv in (0, 1)
        for token in range(4)
        for head in range(2)
    )
    client.put(key, body)
    data = stored_file(service, key).read_bytes()
    assert data[: len(body)] == body
    assert base64.b64encode(data[len(body) : -8]).decode() == client.get(key).headers["L3-Sums"]
    assert client.get(key).content == body
