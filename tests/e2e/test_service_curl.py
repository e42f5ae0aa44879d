"""curl alone can register, write a run of cells, read a range of it, and see why something is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import Pages, Service, check_document, tiny

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@dataclass
class Curl:
    url: str
    folder: Path

    def __call__(self, *args: str | Path) -> tuple[int, bytes, dict[str, str]]:
        """Status, body, headers."""
        body, head = self.folder / "answer", self.folder / "head"
        command: list[str | Path] = [
            "curl",
            "-sS",
            "--noproxy",
            "*",
            "--max-time",
            "20",
            "-o",
            body,
            "-D",
            head,
            "-w",
            "%{http_code}",
        ]
        done = subprocess.run([*command, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        headers = dict(line.lower().split(": ", 1) for line in head.read_text().splitlines() if ": " in line)
        return int(done.stdout), body.read_bytes() if body.exists() else b"", headers

    def problem(self, status: int, words: str, *args: str | Path) -> None:
        got, body, headers = self(*args)
        assert got == status, body
        assert headers["content-type"] == "application/problem+json"
        check_document(json.loads(body), status, words)


@pytest.fixture
def curl(service: Service, tmp_path: Path) -> Curl:
    return Curl(service.url, tmp_path)


def test_register_write_read_a_range_and_delete(curl: Curl, tmp_path: Path) -> None:
    pages = Pages(tiny("org/curl"), "curl", 1)
    (tmp_path / "namespace.json").write_text(json.dumps(pages.namespace.to_wire()))
    (tmp_path / "run").write_bytes(pages.body(0, 0, 3))
    register = f"{curl.url}/v1/namespaces/{pages.namespace.digest}"
    as_json = ("-H", "Content-Type: application/json", "--data-binary", f"@{tmp_path / 'namespace.json'}")
    assert curl("-X", "PUT", *as_json, register)[0] == 201
    url = f"{curl.url}/v1/objects/{pages.key(0, 0, 3)}"
    assert curl("-T", tmp_path / "run", url)[0] == 201
    assert curl("-T", tmp_path / "run", url)[0] == 200
    curl.problem(412, "already", "-T", tmp_path / "run", "-H", "If-None-Match: *", url)
    assert curl(url)[1] == pages.body(0, 0, 3)
    status, body, headers = curl("-r", "100-199", url)
    assert (status, body) == (206, pages.body(0, 0, 3)[100:200])
    assert headers["content-range"] == "bytes 100-199/768"
    assert curl(f"{url}?offset=256&length=256")[1] == pages.body(0, 0, 3)[256:512]
    status, _, headers = curl("-I", url)
    assert (status, headers["content-length"]) == (200, "768")
    match = json.dumps(
        {"namespace": pages.namespace.digest, "page_hashes": pages.hashes, "layers": [0, 3], "heads": [0, 2]}
    )
    assert json.loads(curl("--json", match, f"{curl.url}/v1/pages/match")[1]) == {"pages": 1}
    assert json.loads(curl("-X", "POST", f"{url}/suspect")[1])["corrupt"] is False
    assert curl("-X", "DELETE", url)[0] == 204
    curl.problem(404, "not stored", url)


def test_every_bad_input_has_a_clear_error(curl: Curl, tmp_path: Path) -> None:
    pages = Pages(tiny("org/curl-bad"), "curl-bad", 1)
    digest = pages.namespace.digest
    register = f"{curl.url}/v1/namespaces/{digest}"
    curl("-X", "PUT", "--json", json.dumps(pages.namespace.to_wire()), register)
    right, short, empty = tmp_path / "right", tmp_path / "short", tmp_path / "empty"
    right.write_bytes(pages.body(0, 0, 3))
    short.write_bytes(pages.body(0, 0, 3)[:-1])
    empty.write_bytes(b"")
    objects = f"{curl.url}/v1/objects"
    url = f"{objects}/{pages.key(0, 0, 3)}"
    curl.problem(400, "not a key", "-T", right, f"{objects}/no-key")
    curl.problem(400, "not a key", "--path-as-is", "-T", right, f"{objects}/../../../x")
    curl.problem(400, "not a key", "--path-as-is", f"{objects}/..")
    curl.problem(400, "not a key", f"{objects}/..%2F..%2Fx")
    curl.problem(400, "control characters", f"{objects}/x%00")
    curl.problem(400, "not a key", f"{objects}/{'x' * 5000}")
    curl.problem(404, "not registered", "-T", right, url.replace(digest, "ukv1-0000000000000000"))
    curl.problem(400, "has 768", "-T", short, url)
    curl.problem(400, "has 768", "-T", empty, url)
    curl.problem(400, "sums", "-T", right, "-H", "L3-Sums: AAAAAAAAAAA=", url)
    curl.problem(400, "cell 0", "-T", right, "-H", f"L3-Sums: {'A' * 32}", url)
    curl.problem(411, "Content-Length", "-X", "PUT", url)
    curl.problem(411, "Transfer-Encoding", "-T", right, "-H", "Transfer-Encoding: chunked", url)
    curl.problem(413, "at most", "-X", "PUT", "-H", f"Content-Length: {10**12}", url)
    curl.problem(400, "6 layers", "-T", right, f"{objects}/{pages.hashes[0]}_{digest}_L4-7_H0")
    assert curl("-T", right, url)[0] == 201
    curl.problem(416, "768", "-r", "768-", url)
    curl.problem(416, "768", f"{url}?offset=700&length=100")
    curl.problem(416, "768", f"{url}?offset=0&length=0")
    query = {"namespace": digest, "page_hashes": pages.hashes}
    bad: list[tuple[dict[str, object], str]] = [
        ({"heads": [1, 2]}, "ask for heads [0, 2)"),
        ({"layers": [0, 7]}, "6 layers"),
        ({"page_hashes": []}, "empty"),
        ({"page_hashes": pages.hashes * 2}, "the same"),
    ]
    for what, words in bad:
        curl.problem(400, words, "--json", json.dumps({**query, **what}), f"{curl.url}/v1/pages/read")


def test_a_file_beyond_the_limit_is_refused_in_words(curl: Curl, tmp_path: Path) -> None:
    """curl sends on while it is being refused."""
    pages = Pages(tiny("org/curl-huge"), "curl-huge", 1)
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate((256 << 20) + 1)
    for expect in ("Expect: 100-continue", "Expect:"):
        curl.problem(413, "at most", "-T", huge, "-H", expect, f"{curl.url}/v1/objects/{pages.key(0, 0, 3)}")
