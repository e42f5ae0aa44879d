"""The RAM tier from outside: what is hot needs no disk, what is suspect is looked up on it, memory is bounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.support import Client, Pages, Service, tiny

Start = Callable[..., Service]


@pytest.fixture
def hot(start_service: Start, tmp_path: Path) -> Service:
    return start_service(tmp_path / "data", "--hot", "64Mi", "--ram", "128Mi")


def gauge(service: Service, name: str) -> float:
    found = re.search(rf"^{name} ([0-9.e+]+)$", httpx.get(f"{service.url}/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def damage(service: Service) -> None:
    for path in service.files():
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)


def test_hot_cells_come_from_memory_and_a_suspect_one_is_looked_up_at_rest(hot: Service, tmp_path: Path) -> None:
    pages = Pages(tiny("org/hot"), "org/hot", 2)
    with closing(Client(hot.url)) as client:
        client.register(pages.namespace)
        key = pages.key(0, 0, 3)
        body = pages.body(0, 0, 3)
        assert client.put(key, body).status_code == 201
        assert gauge(hot, "l3store_ram_resident_bytes") == 0
        assert client.get(key).content == body
        damage(hot)
        assert client.get(key).content == body
        assert gauge(hot, "l3store_ram_hit_bytes_total") == len(body)
        assert gauge(hot, "l3store_ram_resident_bytes") == len(body)
        assert client.http.post(f"/v1/objects/{key}/suspect").json()["corrupt"] is True
        assert client.get(key).status_code == 404


def test_what_was_answered_from_memory_is_on_the_disk_after_a_stop(start_service: Start, tmp_path: Path) -> None:
    service = start_service(tmp_path / "data", "--ack", "ram", "--hot", "64Mi")
    pages = Pages(tiny("org/behind"), "org/behind", 40)
    with closing(Client(service.url)) as client:
        client.register(pages.namespace)
        for page in range(40):
            assert client.put(pages.key(page, 0, 3), pages.body(page, 0, 3)).status_code == 201
            assert client.get(pages.key(page, 0, 3)).content == pages.body(page, 0, 3)
    service.stop()
    again = start_service(tmp_path / "data")
    with closing(Client(again.url)) as client:
        for page in range(40):
            assert client.get(pages.key(page, 0, 3)).content == pages.body(page, 0, 3)


def test_memory_stays_within_its_bound(start_service: Start, tmp_path: Path) -> None:
    service = start_service(tmp_path / "data", "--ram", "1Mi", "--hot", "1Mi")
    pages = Pages(tiny("org/bounded"), "org/bounded", 400)
    with closing(Client(service.url)) as client:
        client.register(pages.namespace)
        for page in range(400):
            assert client.put(pages.key(page, 0, 3), pages.body(page, 0, 3)).status_code == 201
        assert gauge(service, "l3store_ram_used_bytes") <= 1 << 20
        for page in range(400):
            assert client.get(pages.key(page, 0, 3)).content == pages.body(page, 0, 3)
        assert 0 < gauge(service, "l3store_ram_used_bytes") <= 1 << 20
