"""Guarded rows through connections as people set them up: rows of their own kind, any isolation level, asyncio."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast
from holdfast.guard import Stamp, Table
from tests.guard.postgres import Postgres
from tests.guard.resources import SqlResource
from tests.support import asyncio_test

OLD, NEW, NEWEST = Stamp("x", 7, "a"), Stamp("x", 8, "b"), Stamp("x", 9, "c")
NOTES = "CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT, holder TEXT)"

Make = Callable[[str], SqlResource]


@pytest.fixture
def notes() -> Table:
    return Table("notes", key="id")


@pytest.fixture
def memory() -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(NOTES)
        yield connection


@dataclass
class Note:
    id: int
    body: str


def check_refused(notes: Table, connection: Any) -> None:
    notes.put(connection, {"id": 1, "body": "one"}, NEW)
    for write in (notes.put, notes.update):
        with pytest.raises(holdfast.StaleFence) as caught:
            write(connection, {"id": 1, "body": "stale"}, OLD)
        assert caught.value.stored == 8
    with pytest.raises(KeyError, match="there is no notes id=2"):
        notes.update(connection, {"id": 2, "body": "one"}, NEW)
    connection.rollback()


@pytest.mark.parametrize("kind", ["dict_row", "scalar_row", "namedtuple_row", "class_row"])
def test_rows_of_whatever_kind_postgres_gives(postgres: Postgres, make_resource: Make, notes: Table, kind: str) -> None:
    import psycopg

    make_resource("postgres")
    factory: Any = getattr(psycopg.rows, kind)
    with psycopg.connect(postgres.dsn, row_factory=factory(Note) if kind == "class_row" else factory) as connection:
        check_refused(notes, connection)


def test_rows_of_whatever_kind_sqlite_gives(memory: sqlite3.Connection, notes: Table) -> None:
    def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
        return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}

    factories: list[Any] = [as_dict, sqlite3.Row, lambda _, row: row[0]]
    for factory in factories:
        memory.row_factory = factory
        check_refused(notes, memory)


def test_rows_that_only_a_cursor_knows_of_may_be_mappings(memory: sqlite3.Connection) -> None:
    """As with psycopg2's RealDictCursor, which has nothing that could be set."""

    class Cursor:
        def __init__(self) -> None:
            self._cursor = memory.cursor()
            self.execute, self.close = self._cursor.execute, self._cursor.close

        @property
        def rowcount(self) -> int:
            return self._cursor.rowcount

        def fetchone(self) -> dict[str, Any] | None:
            row = self._cursor.fetchone()
            return None if row is None else {"fence": row[0]}

    class Connection:
        cursor, rollback = Cursor, memory.rollback

    check_refused(Table("notes", key="id", paramstyle="qmark"), Connection())


def test_a_column_that_is_not_there_is_no_text(memory: sqlite3.Connection, notes: Table) -> None:
    """SQLite takes a quoted name that it does not know for a string, and every row would be the one with that key."""
    notes.put(memory, {"id": 1, "body": "one"}, OLD)
    mistaken = Table("notes", key="title")
    for write in (mistaken.put, mistaken.update):
        with pytest.raises(sqlite3.OperationalError, match="title"):
            write(memory, {"title": "title", "body": "everywhere"}, NEW)
    assert memory.execute("SELECT body FROM notes").fetchall() == [("one",)]


def test_a_column_is_the_same_in_capitals(memory: sqlite3.Connection, notes: Table) -> None:
    for write in (notes.put, notes.update):
        with pytest.raises(holdfast.InvalidConfig, match="leave it out"):
            write(memory, {"id": 1, "FENCE": 0}, OLD)


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("way", ["put", "update"])
def test_at_every_isolation_level_the_stale_one_is_refused(
    postgres: Postgres, make_resource: Make, notes: Table, level: str, way: str
) -> None:
    """Its transaction has begun, and has looked, before the next holder writes."""
    import psycopg

    database = make_resource("postgres")
    notes.put(database.connection, {"id": 1, "body": "before"}, Stamp("x", 1, "z"))
    database.connection.commit()
    with psycopg.connect(postgres.dsn) as stale:
        stale.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
        stale.commit()
        assert stale.execute("SELECT body FROM notes").fetchall() == [("before",)]
        database.write("new", NEW)
        refusal = holdfast.StaleFence if "COMMITTED" in level else psycopg.errors.SerializationFailure
        with pytest.raises(refusal):
            getattr(notes, way)(stale, {"id": 1, "body": "stale"}, OLD)
        stale.rollback()
        with pytest.raises(holdfast.StaleFence):
            getattr(notes, way)(stale, {"id": 1, "body": "stale"}, OLD)
        stale.rollback()
    assert database.text() == "new"


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_deferred_transaction_of_sqlite_that_has_read_is_refused(
    make_resource: Make, notes: Table, journal: str
) -> None:
    database = make_resource("sqlite")
    database.connection.execute(f"PRAGMA journal_mode={journal}")
    database.write("before", Stamp("x", 1, "z"))
    with contextlib.closing(sqlite3.connect(database.where, timeout=0.1, isolation_level=None)) as stale:
        stale.execute("BEGIN DEFERRED")
        assert stale.execute("SELECT body FROM notes").fetchone() == ("before",)
        if journal == "wal":  # else the reader keeps the writer from committing
            database.write("new", NEW)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                notes.put(stale, {"id": 1, "body": "stale"}, OLD)
        stale.execute("ROLLBACK")
        database.write("newest", NEWEST)
        with pytest.raises(holdfast.StaleFence):
            notes.put(stale, {"id": 1, "body": "stale"}, OLD)
    assert database.text() == "newest"


@asyncio_test
async def test_an_asyncio_connection_is_refused_and_told_what_to_do(
    postgres: Postgres, make_resource: Make, notes: Table
) -> None:
    import psycopg

    database = make_resource("postgres")
    async with await psycopg.AsyncConnection.connect(postgres.dsn) as connection:
        for write in (notes.put, notes.update):
            with pytest.raises(holdfast.Unsupported, match="put_statement"):
                write(connection, {"id": 1, "body": "one"}, OLD)
        for ours, count in ((NEW, 1), (OLD, 0)):
            statement = notes.put_statement({"id": 1, "body": "one"}, ours, paramstyle="pyformat")
            assert (await connection.execute(*statement)).rowcount == count
        await connection.commit()
    assert database.record() == (8, "b")


def test_a_connection_without_commit_is_one_of_asyncio_too(notes: Table) -> None:
    """As that of asyncpg."""

    class Connection:
        async def execute(self, query: str, *values: Any) -> str:
            raise AssertionError("not like this")

    with pytest.raises(holdfast.Unsupported, match="put_statement"):
        notes.put(Connection(), {"id": 1, "body": "one"}, OLD)


def test_parameters_may_be_numbered(postgres: Postgres, make_resource: Make) -> None:
    """As asyncpg wants them; psycopg's raw cursors do, too."""
    import psycopg

    database = make_resource("postgres")
    numbered = Table("notes", key="id", paramstyle="numeric_dollar")
    with psycopg.connect(postgres.dsn, cursor_factory=psycopg.RawCursor) as connection:
        check_refused(numbered, connection)
        numbered.put(connection, {"id": 1, "body": "one"}, NEW)
        numbered.update(connection, {"id": 1, "body": "two"}, NEW)
    assert database.text() == "two"
    text, values = numbered.put_statement({"id": 1, "body": "100%"}, NEW, paramstyle="numeric_dollar")
    assert "VALUES ($1, $2, $3, $4)" in text
    assert values == (1, "100%", 8, "b")
