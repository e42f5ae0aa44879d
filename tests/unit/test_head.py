"""Heads of answers: what is read of them, and what is refused."""

from __future__ import annotations

import pytest

from l3client.transport.head import Head, parse_head


def head(*lines: str) -> bytes:
    return "\r\n".join(lines).encode("latin-1")


def test_what_matters_is_read_whatever_its_case_and_spaces() -> None:
    read = parse_head(
        head(
            "HTTP/1.1 200 OK", "CONTENT-length:  12 ", "l3-Sums:AAAAAAAAAAA=", "L3-Pages: 3", "Server: x: y", "ETag: z"
        )
    )
    assert read == Head(status=200, length=12, kept=True, sums="AAAAAAAAAAA=", pages="3")


@pytest.mark.parametrize("line", ["HTTP/1.1 201", "HTTP/1.1 201 ", "HTTP/1.1 201 Made it, \xfc"])
def test_the_reason_is_free(line: str) -> None:
    assert parse_head(head(line, "Content-Length: 0")).status == 201


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (["Content-Length: 0"], True),
        ([], False),
        (["Content-Length: 0", "Connection: keep-alive"], True),
        (["Content-Length: 0", "Connection: keep-alive, Close"], False),
        (["Content-Length: 0", "connection:close", "Connection: keep-alive"], False),
        (["Content-Length: 0", "Connection: enclosed"], True),
    ],
)
def test_a_connection_is_kept_where_the_answer_ends_and_nobody_closes(lines: list[str], kept: bool) -> None:
    assert parse_head(head("HTTP/1.1 200 OK", *lines)).kept is kept


def test_the_same_length_twice_is_a_length() -> None:
    assert parse_head(head("HTTP/1.1 200 OK", "Content-Length: 7", "content-length: 7")).length == 7


@pytest.mark.parametrize(
    "line",
    [
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: 4, 4",
        "Content-Length:",
        "Content-Length: +4",
        "Content-Length: 0x4",
        "Content-Length: \xb2",
        f"Content-Length: {'1' * 19}",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding:",
        "Content-Length: 4\r\nTransfer-Encoding : identity",
    ],
)
def test_a_body_whose_end_is_not_clear_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not known from a Content-Length"):
        parse_head(head("HTTP/1.1 200 OK", line))


@pytest.mark.parametrize(
    "line",
    ["", "HTTP/1.0 200 OK", "HTTP/1.1 200OK", "HTTP/1.1 099 x", "HTTP/1.1  200 OK", "http/1.1 200 OK", "HTTP/1.1 2000"],
)
def test_what_is_no_status_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a status line"):
        parse_head(head(line, "Content-Length: 0"))


def test_two_counts_of_pages_are_none() -> None:
    read = parse_head(head("HTTP/1.1 200 OK", "Content-Length: 0", "L3-Pages: 3", "L3-Pages: 4"))
    assert not read.pages.isdigit()
