"""A running service for every test that asks for one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import Client, Service, launch

# A shared machine has no deadlines; the nightly run looks at a hundred times as many examples.
settings.register_profile("ci", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the whole session. Tests keep out of each other's way by model ids of their own."""
    running = launch(tmp_path_factory.mktemp("service") / "data")
    yield running
    running.stop()


@pytest.fixture
def start_service() -> Iterator[Callable[..., Service]]:
    """``start_service(data_dir, *args)`` starts one more; it ends with the test."""
    started: list[Service] = []

    def start(data_dir: Path, *args: str, ready: bool = True, env: dict[str, str] | None = None) -> Service:
        started.append(launch(data_dir, *args, ready=ready, env=env))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def connect() -> Iterator[Callable[[Service], Client]]:
    """``connect(service)`` makes a client; it is closed with the test."""
    made: list[Client] = []

    def to(service: Service) -> Client:
        made.append(Client(service.url))
        return made[-1]

    yield to
    for client in made:
        client.close()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    """A client of `service`."""
    made = Client(service.url)
    yield made
    made.close()
