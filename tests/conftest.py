"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest
from ranks import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """Runs jobs of several ranks with the CPU backend in force."""
    server = RankServer()
    yield server
    server.close()
