"""Ranges of headers, and neighbours of a namespace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.errors import L3Error, UnsatisfiableError, from_problem
from l3store.index.registry import Registration, nearest
from l3store.layout import Span
from l3store.service.ranges import wanted_span
from tests.support import tiny


@given(st.integers(1, 300), st.integers(0, 320), st.integers(0, 320))
def test_a_range_is_what_a_slice_is(size: int, first: int, last: int) -> None:
    data = bytes(i % 256 for i in range(size))
    for header, expected in [
        (f"bytes={first}-{last}", data[first : last + 1] if first <= last else None),
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[-last:] if last else b""),
    ]:
        if expected == b"":
            with pytest.raises(UnsatisfiableError):
                wanted_span(size=size, header=header, offset=None, length=None)
            continue
        span = wanted_span(size=size, header=header, offset=None, length=None)
        if expected is None:
            assert span is None
        else:
            assert span is not None
            assert data[span.offset : span.end] == expected


@given(st.integers(1, 300), st.integers(0, 320), st.integers(0, 320))
def test_offset_and_length_are_inside_or_refused(size: int, offset: int, length: int) -> None:
    if length >= 1 and offset + length <= size:
        assert wanted_span(size=size, header=None, offset=offset, length=length) == Span(offset, length)
    else:
        with pytest.raises(UnsatisfiableError):
            wanted_span(size=size, header=None, offset=offset, length=length)


def test_the_same_model_comes_before_others_and_the_fewest_differences_first() -> None:
    asked = tiny("org/a")
    others = [tiny(f"org/{i:02}") for i in range(20)]
    same = [tiny("org/a", page_size=8, head_group=4, layers=12), tiny("org/a", page_size=8)]
    near = nearest(asked, None, [Registration(n) for n in [*others, *same, asked]])
    assert len(near) == 8
    assert [n.digest for n in near[:2]] == [same[1].digest, same[0].digest]
    assert {tuple(n.differs) for n in near[2:]} == {("model_id",)}


def test_what_shares_neither_model_nor_fields_is_no_neighbour() -> None:
    other = tiny("org/b", page_size=8, head_group=4)
    assert nearest(tiny("org/a"), None, [Registration(other)]) == []


def test_labels_are_remembered_once_and_the_newest_kept() -> None:
    registration = Registration(tiny("org/a"))
    assert registration.note({"tp": 0})
    assert not registration.note({"tp": 0})
    assert not registration.note(None)
    for tp in range(1, 20):
        assert registration.note({"tp": tp})
    assert registration.labels == [{"tp": tp} for tp in range(4, 20)]
    assert Registration.from_dict(registration.to_dict()) == registration


def leaves(kind: type[L3Error]) -> list[type[L3Error]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize("kind", [k for k in leaves(L3Error) if k.status != 500], ids=lambda k: k.__name__)
def test_an_error_of_the_service_is_the_same_error_at_the_client(kind: type[L3Error]) -> None:
    error = kind("why", size=1)
    problem = error.to_problem()
    assert problem["status"] == kind.status
    back = from_problem(kind.status, problem)
    assert type(back) is kind
    assert back.detail == "why"


@pytest.mark.parametrize("problem", [{}, {"type": 7}, {"type": "about:blank", "detail": 5}, {"type": "x:y:nope"}])
def test_a_document_of_no_kind_of_ours_is_judged_by_its_status(problem: dict[str, object]) -> None:
    assert from_problem(404, problem).status == 404
    assert from_problem(507, problem).status == 507
    assert from_problem(599, problem).status == 500
