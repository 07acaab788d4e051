"""Guarded rows, on SQLite and on PostgreSQL."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast import guard
from holdfast.guard import Stamp, Table
from tests.guard.postgres import Postgres
from tests.guard.resources import SqlResource

OLD, NEW = Stamp("x", 7, "a"), Stamp("x", 8, "b")

Make = Callable[[str], SqlResource]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, make_resource: Make) -> SqlResource:
    return make_resource(request.param)


@pytest.fixture
def notes() -> Table:
    return Table("notes", key="id")


def rows(database: SqlResource) -> list[Any]:
    return sorted(database.ask("SELECT id, body, fence FROM notes"))


def test_update_takes_greater_fences_only(database: SqlResource, notes: Table) -> None:
    connection = database.connection
    notes.put(connection, {"id": 1, "body": "one"}, OLD)
    notes.put(connection, {"id": 2, "body": "other"}, OLD)
    notes.update(connection, {"id": 1, "body": "two"}, NEW)
    with pytest.raises(holdfast.StaleFence) as caught:
        notes.update(connection, {"id": 1, "body": "stale"}, OLD)
    assert caught.value.stored == 8
    assert caught.value.resource == "notes id=1"
    with pytest.raises(holdfast.StaleFence):
        notes.update(connection, {"id": 1, "body": "stale"}, Stamp("x", 8, "c"))
    notes.update(connection, {"id": 1, "body": "three"}, NEW)
    connection.commit()
    assert rows(database) == [(1, "three", 8), (2, "other", 7)]


@pytest.mark.parametrize("stored", ["text", float("inf"), 1e308, 10**18, 2**53], ids=repr)
def test_a_fence_on_record_that_is_none_is_refused_as_such(make_resource: Make, notes: Table, stored: Any) -> None:
    database = make_resource("sqlite")  # which keeps whatever it is given
    notes.put(database.connection, {"id": 1, "body": "one"}, OLD)
    database.connection.execute("UPDATE notes SET fence = ?", (stored,))
    for write in (notes.put, notes.update):
        with pytest.raises(holdfast.InvalidConfig, match="column 'fence' of notes id=1: it holds no fence"):
            write(database.connection, {"id": 1, "body": "two"}, NEW)
    assert rows(database) == [(1, "one", stored)]


def test_update_of_a_row_that_is_not_there_is_a_key_error(database: SqlResource, notes: Table) -> None:
    with pytest.raises(KeyError, match="notes id=1"):
        notes.update(database.connection, {"id": 1, "body": "one"}, OLD)
    database.connection.rollback()
    assert rows(database) == []


def test_rows_from_before_there_were_fences_are_taken_over(database: SqlResource, notes: Table) -> None:
    database.ask("INSERT INTO notes (id, body) VALUES (1, 'old'), (2, 'old')")
    notes.update(database.connection, {"id": 1, "body": "new"}, NEW)
    notes.put(database.connection, {"id": 2, "body": "new"}, NEW)
    for write in (notes.update, notes.put):
        with pytest.raises(holdfast.StaleFence):
            write(database.connection, {"id": 1, "body": "stale"}, OLD)
    database.connection.commit()
    assert rows(database) == [(1, "new", 8), (2, "new", 8)]


def test_what_else_is_written_in_the_transaction_is_behind_the_same_fence(database: SqlResource, notes: Table) -> None:
    connection = database.connection
    database.ask("INSERT INTO notes (id, body) VALUES (5, 'kept')")
    notes.put(connection, {"id": 1}, NEW)
    connection.commit()
    with pytest.raises(holdfast.StaleFence):
        notes.put(connection, {"id": 1}, OLD)
        connection.cursor().execute("DELETE FROM notes WHERE id = 5")
    connection.rollback()
    assert rows(database) == [(1, None, 8), (5, "kept", None)]


def test_a_fence_alone_needs_a_transaction(postgres: Postgres, make_resource: Make, notes: Table) -> None:
    import psycopg

    path = make_resource("sqlite").where
    make_resource("postgres")
    for connection in (sqlite3.connect(path, isolation_level=None), psycopg.connect(postgres.dsn, autocommit=True)):
        with contextlib.closing(connection):
            for write in (notes.put, notes.update):
                with pytest.raises(holdfast.InvalidConfig, match="begin a transaction"):
                    write(connection, {"id": 1}, OLD)
            notes.put(connection, {"id": 1, "body": "one"}, OLD)
            connection.execute("BEGIN")
            notes.put(connection, {"id": 1}, OLD)
            connection.execute("COMMIT")


def test_names_are_quoted_and_values_are_parameters(database: SqlResource) -> None:
    table, column = 'odd "table; %s', "100% 'sure'?"
    quoted = {name: '"' + name.replace('"', '""') + '"' for name in (table, column, "Fence", "Holder")}
    database.ask(f"DROP TABLE IF EXISTS {quoted[table]}")
    columns = f'tenant TEXT, id INTEGER, {quoted[column]} TEXT, "Fence" BIGINT, "Holder" TEXT, PRIMARY KEY (tenant, id)'
    database.ask(f"CREATE TABLE {quoted[table]} ({columns})")
    guarded = Table(table, key=("tenant", "id"), fence="Fence", holder="Holder")
    evil = "'; DROP TABLE notes; -- %s ?"
    key = {"tenant": evil, "id": 1}
    guarded.put(database.connection, {**key, column: "one"}, OLD)
    guarded.put(database.connection, {**key, "id": 2, column: "other"}, OLD)
    guarded.update(database.connection, {**key, column: evil}, NEW)
    with pytest.raises(holdfast.StaleFence):
        guarded.put(database.connection, {**key, column: "stale"}, OLD)
    database.connection.commit()
    found = database.ask(f'SELECT tenant, id, {quoted[column]}, "Fence" FROM {quoted[table]} ORDER BY id')
    assert found == [(evil, 1, evil, 8), (evil, 2, "other", 7)]
    database.ask(f"DROP TABLE {quoted[table]}")


def test_a_schema_may_stand_in_front(database: SqlResource) -> None:
    schema = "main" if database.kind == "sqlite" else "public"
    guarded = Table(f"{schema}.notes", key="id")
    guarded.put(database.connection, {"id": 1, "body": "one"}, NEW)
    with pytest.raises(holdfast.StaleFence):
        guarded.put(database.connection, {"id": 1, "body": "stale"}, OLD)
    database.connection.rollback()


@pytest.mark.parametrize(
    "row", [{"body": "one"}, {"id": None, "body": "one"}, {"id": 1, "fence": 3}, {"id": 1, "holder": "me"}, {}]
)
def test_rows_that_make_no_sense_are_refused(row: dict[str, Any], notes: Table) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for write in (notes.put, notes.update):
            with pytest.raises(holdfast.InvalidConfig):
                write(connection, row, OLD)


def test_what_is_no_row_is_refused(database: SqlResource, notes: Table) -> None:
    for row in ([1, "one"], 5, None, [("id", 1)]):
        for write in (notes.put, notes.update):
            with pytest.raises(holdfast.InvalidConfig, match=f"a row of type {type(row).__name__}: give a dict"):
                write(database.connection, row, OLD)  # type: ignore[arg-type]
    assert rows(database) == []


@pytest.mark.parametrize("column", ["", "a\0b", "\ud800", 1, None, ("body",), b"body"], ids=repr)
def test_a_column_name_that_cannot_be_one_is_refused_before_anything_is_written(
    database: SqlResource, notes: Table, column: Any
) -> None:
    notes.put(database.connection, {"id": 1, "body": "kept"}, OLD)
    for write in (notes.put, notes.update):
        with pytest.raises(holdfast.InvalidConfig, match="as the name of a table or column"):
            write(database.connection, {"id": 1, column: "x"}, NEW)
    database.connection.commit()
    assert rows(database) == [(1, "kept", 7)]


def test_the_error_of_a_column_that_is_not_there_says_which_table(database: SqlResource, notes: Table) -> None:
    for write in (notes.put, notes.update):
        for table, row in ((notes, {"id": 1, "nope": "x"}), (Table("notes", key="id", fence="nope"), {"id": 1})):
            with pytest.raises(Exception, match="nope") as caught:
                getattr(table, write.__name__)(database.connection, row, OLD)
            database.connection.rollback()
            assert not isinstance(caught.value, holdfast.HoldfastError)
            assert "kept" not in str(caught.value)
            (note,) = caught.value.__notes__
            assert "'notes'" in note
            assert "nope" in note


def test_a_table_may_be_called_as_databases_call_the_new_row(database: SqlResource) -> None:
    database.ask("DROP TABLE IF EXISTS excluded")
    database.ask("CREATE TABLE excluded (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT, holder TEXT)")
    guarded = Table("excluded", key="id")
    guarded.put(database.connection, {"id": 1, "body": "one"}, OLD)
    guarded.put(database.connection, {"id": 1, "body": "two"}, NEW)
    for write in (guarded.put, guarded.update):
        with pytest.raises(holdfast.StaleFence):
            write(database.connection, {"id": 1, "body": "stale"}, OLD)
    database.connection.commit()
    assert database.ask("SELECT body, fence FROM excluded") == [("two", 8)]
    database.ask("DROP TABLE excluded")


def test_tables_that_make_no_sense_are_refused() -> None:
    with pytest.raises(holdfast.InvalidConfig):
        Table("notes", key=())
    with pytest.raises(holdfast.Unsupported, match="qmark, format, pyformat, numeric_dollar"):
        Table("notes", key="id", paramstyle="numeric")
    for name in ("", "a.", "a\0b"):
        with pytest.raises(holdfast.InvalidConfig):
            Table(name, key="id").put_statement({"id": 1}, OLD, paramstyle="qmark")


class Wrapped:
    """A connection of a pool, which does not say what driver is behind it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def cursor(self) -> Any:
        return self._connection.cursor()


def test_a_wrapped_connection_needs_a_paramstyle(database: SqlResource, notes: Table) -> None:
    wrapped = Wrapped(database.connection)
    with pytest.raises(holdfast.InvalidConfig, match="paramstyle="):
        notes.put(wrapped, {"id": 1}, OLD)
    style = "qmark" if database.kind == "sqlite" else "pyformat"
    Table("notes", key="id", paramstyle=style).put(wrapped, {"id": 1, "body": "one"}, OLD)
    database.connection.rollback()


def test_a_derived_connection_needs_none(notes: Table) -> None:
    class Mine(sqlite3.Connection):
        pass

    with contextlib.closing(sqlite3.connect(":memory:", factory=Mine)) as connection:
        connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT, holder TEXT)")
        notes.put(connection, {"id": 1, "body": "one"}, OLD)


def test_a_statement_can_be_executed_by_somebody_else(database: SqlResource, notes: Table) -> None:
    style = "qmark" if database.kind == "sqlite" else "format"
    cursor = database.connection.cursor()
    for make, ours, count in (
        (notes.put_statement, OLD, 1),
        (notes.update_statement, NEW, 1),
        (notes.put_statement, OLD, 0),
        (notes.update_statement, OLD, 0),
    ):
        statement = make({"id": 1, "body": "one"}, ours, paramstyle=style)
        cursor.execute(*statement)
        assert cursor.rowcount == count
    cursor.close()
    database.connection.rollback()


@pytest.fixture
def two(postgres: Postgres, make_resource: Make) -> Iterator[tuple[Any, Any, SqlResource]]:
    """Two connections to PostgreSQL, where a writer waits for another's transaction."""
    import psycopg

    database = make_resource("postgres")
    with psycopg.connect(postgres.dsn) as one, psycopg.connect(postgres.dsn) as other:
        yield one, other, database


@pytest.mark.parametrize("there", [True, False], ids=["row is there", "row is new"])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_writer_that_had_to_wait_looks_at_the_fence_again(
    two: tuple[Any, Any, SqlResource], notes: Table, there: bool, outcome: str
) -> None:
    """Both pass the comparison with what was there before; only one may write after the other has committed."""
    one, other, database = two
    if there:
        notes.put(one, {"id": 1, "body": "before"}, Stamp("x", 1, "z"))
        one.commit()
    notes.put(one, {"id": 1, "body": "new"}, NEW)
    came: list[object] = []

    def write_late() -> None:
        try:
            notes.put(other, {"id": 1, "body": "stale"}, OLD)
            other.commit()
            came.append("written")
        except holdfast.StaleFence as error:
            other.rollback()
            came.append(error.stored)

    late = threading.Thread(target=write_late)
    late.start()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    while not database.ask(waiting)[0][0]:
        assert late.is_alive(), "it did not wait"
    getattr(one, outcome)()
    late.join()
    if outcome == "commit":
        assert came == [8]
        assert rows(database) == [(1, "new", 8)]
    else:
        assert came == ["written"]
        assert rows(database) == [(1, "stale", 7)]


def test_transactions_that_race_leave_a_log_in_the_order_of_their_fences(database: SqlResource, notes: Table) -> None:
    """A fence first, then an ordinary INSERT in the same transaction: the order of the log is that of the commits."""
    number = "INTEGER PRIMARY KEY AUTOINCREMENT" if database.kind == "sqlite" else "SERIAL PRIMARY KEY"
    database.ask("DROP TABLE IF EXISTS log")
    database.ask(f"CREATE TABLE log (number {number}, fence BIGINT)")
    start = threading.Barrier(5)

    def write(fence: int) -> None:
        with contextlib.closing(database.again()) as mine:
            assert isinstance(mine, SqlResource)
            start.wait()
            for _ in range(20):
                try:
                    notes.put(mine.connection, {"id": 1}, Stamp("x", fence, f"holder{fence}"))
                except holdfast.StaleFence:
                    mine.connection.rollback()
                    return
                mine.ask(f"INSERT INTO log (fence) VALUES ({fence})")

    writers = [threading.Thread(target=write, args=(fence,)) for fence in range(1, 6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    log = [fence for (fence,) in database.ask("SELECT fence FROM log ORDER BY number")]
    database.ask("DROP TABLE log")
    assert log == sorted(log)
    assert log.count(5) == 20


def test_a_lease_on_several_names_says_which(notes: Table, make_resource: Make) -> None:
    class LeaseOnTwo:
        name, token, fence, fences = "a", "host-1.0", 9, {"a": 5, "b": 9}

        def check(self) -> None:
            pass

    database = make_resource("sqlite")
    lease: Any = LeaseOnTwo()
    with pytest.raises(holdfast.InvalidConfig, match="name="):
        notes.put(database.connection, {"id": 1, "body": "one"}, lease)
    notes.put(database.connection, {"id": 1, "body": "one"}, lease, name="a")
    notes.update(database.connection, {"id": 1, "body": "one"}, lease, name="a")
    database.connection.commit()
    assert rows(database) == [(1, "one", 5)]


def test_statements_are_what_the_docs_say(notes: Table) -> None:
    ours = guard.Stamp("x", 7, "a")
    statement = notes.update_statement({"id": 1, "body": "one"}, ours, paramstyle="qmark")
    assert statement.text == (
        'UPDATE "notes" AS "notes" SET "body" = ?, "fence" = ?, "holder" = ? WHERE "notes"."id" = ? '
        'AND ("notes"."fence" IS NULL OR "notes"."fence" < ? OR ("notes"."fence" = ? AND "notes"."holder" = ?))'
    )
    assert statement.values == ("one", 7, "a", 1, 7, 7, "a")
