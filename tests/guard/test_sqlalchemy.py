"""Guarded rows by SQLAlchemy's connections and sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm, text

import holdfast
from holdfast.guard import Stamp, Table
from tests.guard.postgres import Postgres

OLD, NEW = Stamp("x", 7, "a"), Stamp("x", 8, "b")
NOTES = Table("notes", key="id")


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sqlalchemy.Engine]:
    if request.param == "sqlite":
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/notes.db")
    else:
        postgres: Postgres = request.getfixturevalue("postgres")
        engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(postgres.dsn))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS notes"))
        connection.execute(text("CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT, holder TEXT)"))
    yield engine
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE notes"))
    engine.dispose()


@pytest.fixture(params=["connection", "session", "scoped_session"])
def open_one(request: pytest.FixtureRequest, engine: sqlalchemy.Engine) -> Any:
    """What opens a connection or a session."""
    if request.param == "connection":
        return engine.connect
    if request.param == "session":
        return lambda: orm.Session(engine)
    return lambda: orm.scoped_session(orm.sessionmaker(engine))()


def rows(engine: sqlalchemy.Engine) -> list[Any]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text("SELECT id, body, fence FROM notes ORDER BY id"))]


def test_a_guarded_write_is_committed_by_its_connection(engine: sqlalchemy.Engine, open_one: Any) -> None:
    with open_one() as connection:
        NOTES.put(connection, {"id": 1, "body": "one"}, OLD)
        NOTES.update(connection, {"id": 1, "body": "two"}, NEW)
        connection.commit()
    assert rows(engine) == [(1, "two", 8)]
    with open_one() as connection:
        for write in (NOTES.put, NOTES.update):
            with pytest.raises(holdfast.StaleFence) as caught:
                write(connection, {"id": 1, "body": "stale"}, OLD)
            assert caught.value.stored == 8
        with pytest.raises(KeyError, match="notes id=2"):
            NOTES.update(connection, {"id": 2, "body": "none"}, NEW)
    assert rows(engine) == [(1, "two", 8)]


def test_it_is_rolled_back_with_the_rest_of_its_transaction(engine: sqlalchemy.Engine, open_one: Any) -> None:
    with open_one() as connection:
        NOTES.put(connection, {"id": 1}, OLD)
        connection.execute(text("INSERT INTO notes (id, body) VALUES (5, 'beside')"))
        connection.rollback()
    assert rows(engine) == []


def test_a_fence_alone_is_refused_where_each_statement_is_committed(engine: sqlalchemy.Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(holdfast.InvalidConfig, match="begin a transaction first"):
            NOTES.put(connection, {"id": 1}, OLD)
        NOTES.put(connection, {"id": 2, "body": "guards itself"}, OLD)


def test_an_engine_is_no_connection(engine: sqlalchemy.Engine) -> None:
    for given in (engine, object(), None):
        with pytest.raises(holdfast.InvalidConfig, match=r"as a connection: give a DB-API connection, or SQLAlchemy"):
            NOTES.put(given, {"id": 1, "body": "one"}, OLD)
    assert rows(engine) == []


def test_a_driver_error_says_which_table(engine: sqlalchemy.Engine) -> None:
    with engine.connect() as connection:
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="nope") as caught:
            NOTES.put(connection, {"id": 1, "nope": "x"}, OLD)
        connection.rollback()
    assert "'notes'" in caught.value.__notes__[0]
