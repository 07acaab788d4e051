"""Each resource in turn, and the PostgreSQL behind one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guard.postgres import Postgres, why_not
from tests.guard.resources import KINDS, Resource, open_resource


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if reason := why_not():
        pytest.skip(reason)
    with Postgres() as postgres:
        yield postgres


@pytest.fixture
def make_resource(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Resource]]:
    """``make_resource(kind)``: a resource without a guarded write."""
    made: list[Resource] = []

    def make(kind: str) -> Resource:
        if kind == "redis":
            where = request.getfixturevalue("url")
        elif kind == "sqlite":
            where = str(tmp_path / "notes.db")
        elif kind == "postgres":
            where = request.getfixturevalue("postgres").dsn
        else:
            (tmp_path / "notes").mkdir()
            where = str(tmp_path / "notes" / "note.txt")
        made.append(open_resource(kind, where))
        made[-1].clear()
        return made[-1]

    yield make
    for resource in made:
        resource.close()


@pytest.fixture(params=list(KINDS))
def resource(request: pytest.FixtureRequest, make_resource: Callable[[str], Resource]) -> Resource:
    return make_resource(request.param)
