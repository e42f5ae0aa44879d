"""The error tree: what the service says in a problem document is what the client raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from l3store import errors
from l3store.errors import (
    L3Error,
    MissError,
    RefusedError,
    RetryError,
    ServiceError,
    TimeoutExpiredError,
    TooLargeError,
    TransportError,
    from_problem,
)


def kinds(of: type[L3Error]) -> Iterator[type[L3Error]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


SAID_BY_THE_SERVICE = sorted({k for k in kinds(L3Error) if not issubclass(k, TransportError)}, key=lambda k: k.code)


@pytest.mark.parametrize("kind", SAID_BY_THE_SERVICE, ids=lambda k: k.__name__)
def test_every_error_of_the_service_comes_back_as_itself(kind: type[L3Error]) -> None:
    problem = kind("what, where and what to do").to_problem()
    raised = from_problem(problem["status"], problem)
    assert type(raised) is kind
    assert (raised.detail, str(raised)) == ("what, where and what to do",) * 2


def test_codes_are_unique_and_every_class_is_exported_by_the_module() -> None:
    everything = list(kinds(L3Error))
    assert len({kind.code for kind in everything}) == len(everything) > 15
    assert all(getattr(errors, kind.__name__) is kind for kind in everything)


@pytest.mark.parametrize("kind", [k for k in kinds(L3Error) if issubclass(k, TransportError)], ids=lambda k: k.__name__)
def test_no_service_can_make_us_believe_that_it_could_not_be_asked(kind: type[TransportError]) -> None:
    problem = {"type": f"urn:l3store:problem:{kind.code}", "detail": "x", "phase": "read"}
    assert isinstance(from_problem(404, problem), MissError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError), (404, MissError), (413, TooLargeError), (503, RetryError), (500, ServiceError),
        (418, ServiceError), (599, ServiceError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("problem", [{}, {"type": "about:blank"}, {"type": 7, "detail": ["x"]}, {"detail": None}])
def test_a_document_that_says_nothing_leaves_the_status(
    status: int, kind: type[L3Error], problem: dict[str, object]
) -> None:
    raised = from_problem(status, problem)
    assert type(raised) is kind
    assert str(raised) == f"HTTP status {status}"


def test_an_unknown_failure_of_the_service_is_a_miss_to_whoever_reads() -> None:
    assert issubclass(ServiceError, TransportError)
    assert issubclass(TimeoutExpiredError, TimeoutError)
    assert TimeoutExpiredError("x", phase="pool").phase == "pool"
