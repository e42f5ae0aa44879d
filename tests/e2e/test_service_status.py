"""Health, metrics, version, and the OpenAPI document that says all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from l3store import __version__
from l3store.cli.schemas import generate
from tests.support import Client, Pages, counters, tiny

SCHEMAS = Path(__file__).parents[2] / "schemas"
OPENAPI = json.loads(generate()["openapi.json"])


def test_alive_and_ready(client: Client) -> None:
    for path in ("/healthz", "/readyz"):
        answer = client.http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_version_has_the_limits(client: Client) -> None:
    assert client.http.get("/version").json() == {
        "name": "l3store",
        "version": __version__,
        "api": "v1",
        "object_layout": "page-unified-v1",
        "limits": {
            "max_pages": 32_768,
            "max_object_bytes": 256 << 20,
            "max_read_bytes": 4 << 30,
            "max_write_bytes": 4 << 30,
            "max_write_objects": 32_768,
            "max_json_bytes": 16 << 20,
        },
    }


def test_metrics_are_prometheus_and_move(client: Client) -> None:
    pages = Pages(tiny("org/metrics"), "metrics", 1)
    client.register(pages.namespace)
    before = counters(client)
    body = pages.body(0, 0, 6)
    client.put(pages.key(0, 0, 6), body)
    client.put(pages.key(0, 0, 6), body)
    client.write([(pages.key(0, 0, 6, 1), body, None), (pages.key(0, 0, 6), body, None)])
    client.get(pages.key(0, 0, 6))
    client.get(pages.key(0, 0, 6), Range="bytes=0-9")
    client.pages("read", pages.namespace, pages.hashes)
    after = counters(client)
    moved = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    size = len(body)
    assert moved["l3store_objects"] == 2
    assert moved["l3store_pages"] == 1
    assert moved["l3store_stored_bytes"] == 2 * size
    assert moved["l3store_disk_bytes"] == 2 * 4096
    assert moved["l3store_objects_created_total"] == 2
    assert moved["l3store_received_bytes_total"] == 2 * size
    assert moved["l3store_sent_bytes_total"] == size + 10 + 2 * size
    assert moved["l3store_requests_total"] == 7
    assert moved["l3store_request_seconds_count"] == 7


def test_requests_are_counted_by_route_and_status(client: Client) -> None:
    client.get("no-key")
    client.http.get("/no/such/path")
    labels = {
        (s.labels["method"], s.labels["route"], s.labels["status"])
        for family in text_string_to_metric_families(client.http.get("/metrics").text)
        for s in family.samples
        if s.name == "l3store_requests_total"
    }
    assert ("GET", "/v1/objects/{key:path}", "400") in labels
    assert ("GET", "none", "404") in labels
    assert not any("no-key" in route or "such" in route for _, route, _ in labels)
    assert all(status != "0" for _, _, status in labels)


def test_every_metric_has_help(client: Client) -> None:
    for family in text_string_to_metric_families(client.http.get("/metrics").text):
        assert family.documentation
        assert family.name.startswith("l3store_")


@pytest.mark.parametrize("name", ["openapi.json", "namespace.schema.json", "config.schema.json"])
def test_the_schemas_in_the_repository_are_fresh(name: str) -> None:
    assert json.loads((SCHEMAS / name).read_text()) == json.loads(generate()[name]), "run: l3store schemas schemas"


def test_the_service_serves_the_same_document(client: Client) -> None:
    assert client.http.get("/openapi.json").json() == OPENAPI
    assert client.http.get("/docs").status_code == 200


ROUTES = {
    ("get", "/healthz"): {"200"},
    ("get", "/readyz"): {"200"},
    ("get", "/metrics"): {"200"},
    ("get", "/version"): {"200"},
    ("get", "/v1/namespaces"): {"200"},
    ("put", "/v1/namespaces/{digest}"): {"200", "201"},
    ("get", "/v1/namespaces/{digest}"): {"200"},
    ("delete", "/v1/namespaces/{digest}"): {"200"},
    ("put", "/v1/objects/{key}"): {"200", "201"},
    ("get", "/v1/objects/{key}"): {"200", "206", "304"},
    ("head", "/v1/objects/{key}"): {"200"},
    ("delete", "/v1/objects/{key}"): {"204"},
    ("post", "/v1/objects/{key}/suspect"): {"200"},
    ("post", "/v1/pages/match"): {"200"},
    ("post", "/v1/pages/missing"): {"200"},
    ("post", "/v1/pages/read"): {"200"},
    ("post", "/v1/pages/write"): {"200"},
}
"""Every operation and its successes; all of these statuses occur in the tests beside this one."""


def test_openapi_describes_every_route_with_problems_as_the_default() -> None:
    described = {
        (method, path): set(operation["responses"]) - {"default"}
        for path, operations in OPENAPI["paths"].items()
        for method, operation in operations.items()
    }
    assert described == ROUTES
    for operations in OPENAPI["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert operation["description"]
            assert set(operation["responses"]["default"]["content"]) == {"application/problem+json"}
            problem = operation["responses"]["default"]["content"]["application/problem+json"]["schema"]
            assert problem == {"$ref": "#/components/schemas/Problem"}


def test_openapi_has_no_422_and_no_loose_ends() -> None:
    text = json.dumps(OPENAPI)
    assert "HTTPValidationError" not in text
    assert '"422"' not in text
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in OPENAPI["components"]["schemas"]


def test_bodies_of_bytes_are_described_as_bytes() -> None:
    octets = "application/octet-stream"
    objects = OPENAPI["paths"]["/v1/objects/{key}"]
    assert set(objects["put"]["requestBody"]["content"]) == {octets}
    assert octets in objects["get"]["responses"]["200"]["content"]
    assert set(OPENAPI["paths"]["/v1/pages/write"]["post"]["requestBody"]["content"]) == {
        "application/vnd.l3store.pages"
    }
    assert octets in OPENAPI["paths"]["/v1/pages/read"]["post"]["responses"]["200"]["content"]
