"""Registration over HTTP: what is new, known, in conflict or close, and that it lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from l3store.layout import Namespace
from tests.support import Client, Pages, Service, check_problem, tiny


def with_fields(namespace: Namespace, **changed: Any) -> Namespace:
    return dataclasses.replace(namespace, fields=dataclasses.replace(namespace.fields, **changed))


def test_new_is_201_and_known_is_200(client: Client) -> None:
    namespace = tiny("org/new")
    first = client.register(namespace, {"hash": "plain", "tp": 4})
    assert first.status_code == 201
    assert first.json()["digest"] == namespace.digest
    assert first.json()["namespace"] == namespace.fields.to_dict()
    assert first.json()["geometry"] == namespace.geometry.to_dict()
    again = client.register(namespace, {"hash": "plain", "tp": 2})
    assert again.status_code == 200
    assert again.json()["labels"] == [{"hash": "plain", "tp": 4}, {"hash": "plain", "tp": 2}]
    assert client.register(namespace).status_code == 200


def test_another_geometry_under_one_digest_is_409_and_names_the_field(client: Client) -> None:
    namespace = tiny("org/geometry")
    assert client.register(namespace).status_code == 201
    other = tiny("org/geometry", head_dim=16, layers=12)
    assert other.digest == namespace.digest
    problem = check_problem(client.register(other), 409, "head_dim is 8, not 16", "num_layers is 6, not 12")
    assert problem["fields"] == ["num_layers", "head_dim"]
    assert client.http.get(f"/v1/namespaces/{namespace.digest}").json()["geometry"] == namespace.geometry.to_dict()


def test_fields_that_have_another_digest_are_400_and_say_which(client: Client) -> None:
    namespace, other = tiny("org/digest-a"), tiny("org/digest-b")
    answer = client.http.put(f"/v1/namespaces/{other.digest}", json=namespace.to_wire())
    assert check_problem(answer, 400, namespace.digest)["digest"] == namespace.digest
    check_problem(client.http.get(f"/v1/namespaces/{other.digest}"), 404, "not registered")


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"dtype": "float8_e4m3fn", "itemsize": 1}, {"dtype": ["float8_e4m3fn", "bfloat16"], "itemsize": [1, 2]}),
        ({"page_size": 8}, {"page_size": [8, 4]}),
        ({"head_group": 1}, {"head_group": [1, 2]}),
        ({"partition": 0}, {"layer_partition": [0, 3]}),
        ({"model_revision": "abc"}, {"model_revision": ["abc", None]}),
        ({"pool": "draft"}, {"pool": ["draft", None]}),
        ({"tenant": "acme", "v_head_dim": 4}, {"tenant": ["acme", None], "v_head_dim": [4, None]}),
    ],
)
def test_near_tells_what_keeps_a_fleet_apart(
    client: Client, changed: dict[str, Any], differs: dict[str, list[Any]]
) -> None:
    model = f"org/near-{'-'.join(map(str, changed))}"
    stored = Pages(tiny(model), "near", 1)
    client.register(stored.namespace)
    client.put_page(stored, 0, [(0, 3), (3, 6)])
    near = client.register(tiny(model, **changed)).json()["near"]
    assert near[0]["digest"] == stored.namespace.digest
    assert near[0]["model_id"] == model
    assert (near[0]["objects"], near[0]["bytes"]) == (4, stored.array.size)
    assert near[0]["differs"] == {name: {"yours": a, "stored": b} for name, (a, b) in differs.items()}


def test_near_finds_the_same_model_under_another_name(client: Client) -> None:
    stored = tiny("org/name-one", page_size=37)
    client.register(stored)
    near = client.register(tiny("org/name-two", page_size=37)).json()["near"]
    assert near[0]["digest"] == stored.digest
    assert near[0]["differs"] == {"model_id": {"yours": "org/name-two", "stored": "org/name-one"}}


def test_near_names_page_hashes_that_are_made_differently_within_one_namespace(client: Client) -> None:
    namespace = tiny("org/bigram")
    client.register(namespace, {"hash": "plain"})
    near = client.register(namespace, {"hash": "bigram"}).json()["near"]
    assert near[0]["digest"] == namespace.digest
    assert near[0]["differs"] == {"labels.hash": {"yours": "bigram", "stored": "plain"}}


def test_list_get_and_delete(client: Client) -> None:
    pages = Pages(tiny("org/listed"), "listed", 2)
    client.register(pages.namespace, {"engine": "sglang 0.5.23"})
    client.put_page(pages, 0, [(0, 6)])
    digest = pages.namespace.digest
    known = client.http.get(f"/v1/namespaces/{digest}").json()
    assert (known["objects"], known["bytes"]) == (2, pages.array[0].size)
    assert known in client.http.get("/v1/namespaces").json()["namespaces"]
    dropped = client.http.delete(f"/v1/namespaces/{digest}")
    assert (dropped.status_code, dropped.json()) == (200, {"digest": digest, "objects": 2})
    check_problem(client.http.get(f"/v1/namespaces/{digest}"), 404, "not registered")
    check_problem(client.http.delete(f"/v1/namespaces/{digest}"), 404, "not registered")
    check_problem(client.get(pages.key(0, 0, 6)), 404, "not registered")
    assert client.register(pages.namespace).status_code == 201
    check_problem(client.get(pages.key(0, 0, 6)), 404, "not stored")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("namespace", "page_size"), 0, "page_size"),
        (("namespace", "page_size"), "4", "page_size"),
        (("namespace", "page_size"), True, "page_size"),
        (("namespace", "head_group"), 3, "head_group"),
        (("namespace", "model_id"), "", "model_id"),
        (("namespace", "model_id"), "x" * 513, "model_id"),
        (("namespace", "model_id"), "a\nb", "model_id"),
        (("namespace", "dtype"), "torch.bfloat16", "dtype"),
        (("namespace", "object_layout"), "page-unified-v2", "object_layout"),
        (("namespace", "schema_version"), 2, "schema_version"),
        (("namespace", "color"), 1, "color"),
        (("geometry", "itemsize"), 4, "itemsize"),
        (("geometry", "head_dim"), -1, "head_dim"),
        (("geometry", "num_layers"), 4097, "num_layers"),
        (("extension", "row_bytes"), 0, "row_bytes"),
        (("labels", "x" * 65), "v", "labels"),
        (("labels", "x"), {"a": 1}, "labels"),
    ],
)
def test_a_field_that_cannot_be_right_is_400_and_named(
    client: Client, path: tuple[str, str], value: object, words: str
) -> None:
    namespace = tiny("org/bad-field")
    body: dict[str, Any] = {**namespace.to_wire(), "extension": {}, "labels": {}}
    body[path[0]] = {**body[path[0]], path[1]: value}
    check_problem(client.http.put(f"/v1/namespaces/{namespace.digest}", json=body), 400, words)
    check_problem(client.http.get(f"/v1/namespaces/{namespace.digest}"), 404)


@pytest.mark.parametrize("digest", ["ukv1-0", "UKV1-0d302113965d73a3", "..", "%2e%2e", "ukv1-0d302113965d73a3%00", "ü"])
def test_what_is_no_digest_is_refused(client: Client, digest: str) -> None:
    namespace = tiny("org/no-digest")
    answer = client.http.put(f"/v1/namespaces/{digest}", json=namespace.to_wire())
    assert answer.status_code in {400, 404, 405}
    check_problem(answer, answer.status_code)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "JSON"),
        (b"[" * 100_000, "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'{"namespace": {}}', "model_id"),
        (b"\xff\xfe", "body"),
    ],
)
def test_what_is_no_registration_is_400(client: Client, body: bytes, words: str) -> None:
    digest = tiny("org/no-registration").digest
    answer = client.http.put(f"/v1/namespaces/{digest}", content=body, headers={"Content-Type": "application/json"})
    check_problem(answer, 400, words)
    check_problem(client.http.get(f"/v1/namespaces/{digest}"), 404)


def test_json_under_another_content_type_is_refused_with_the_one_to_send(client: Client) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.http.post("/v1/pages/match", content=b"{}", headers=headers)
    check_problem(answer, 400, "Content-Type: application/json")


def test_registrations_and_objects_outlive_the_service(
    start_service: Callable[..., Service], connect: Callable[[Service], Client], tmp_path: Path
) -> None:
    pages = Pages(tiny("org/lasting", model_revision="r1"), "lasting", 2)
    first = start_service(tmp_path / "data")
    client = connect(first)
    client.register(pages.namespace, {"hash": "plain"})
    client.put_page(pages, 0, [(0, 3), (3, 6)])
    before = client.http.get("/v1/namespaces").json()
    assert first.stop() == 0
    client = connect(start_service(tmp_path / "data"))
    assert client.http.get("/v1/namespaces").json() == before
    assert client.register(pages.namespace, {"hash": "plain"}).status_code == 200
    assert client.pages("match", pages.namespace, pages.hashes).json() == {"pages": 1}
    assert client.get(pages.key(0, 0, 6, 1)).content == pages.body(0, 0, 6, 1)


@pytest.mark.parametrize("damage", ["gone", "rotten", "another's"])
def test_objects_whose_registration_was_lost_are_back_when_it_is(
    start_service: Callable[..., Service], connect: Callable[[Service], Client], tmp_path: Path, damage: str
) -> None:
    pages = Pages(tiny("org/orphan"), "orphan", 1)
    first = start_service(tmp_path / "data")
    client = connect(first)
    client.register(pages.namespace)
    client.put_page(pages, 0, [(0, 3), (3, 6)])
    first.stop()
    [registration] = first.files("namespaces")
    if damage == "gone":
        registration.unlink()
    elif damage == "rotten":
        registration.write_bytes(b"\x00" * 100)
    else:
        registration.write_text(registration.read_text().replace("org/orphan", "org/other"))
    second = start_service(tmp_path / "data")
    client = connect(second)
    check_problem(client.get(pages.key(0, 0, 3)), 404, "not registered")
    assert client.register(pages.namespace).status_code == 201
    assert client.pages("match", pages.namespace, pages.hashes).json() == {"pages": 1}
    assert client.get(pages.key(0, 1, 5, 1)).content == pages.body(0, 1, 5, 1)
