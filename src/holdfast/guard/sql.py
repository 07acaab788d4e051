"""Guarded writes to the rows of a SQL table, through the caller's own DB-API or SQLAlchemy connection.

A row has two further columns, for the fence and the holder of its last write. The comparison is part of the statement
that writes, so the database makes it one step: under READ COMMITTED, a statement that had to wait for another
transaction reads the row again. The first write of a row is INSERT ... ON CONFLICT DO UPDATE for the same reason, as
two holders may both find no row.

The transaction is the caller's. Until it is committed the row stays locked, so its other writes are guarded by the same
fence. Nothing here deletes a row: its fence would be deleted too, and a stale holder could insert the row again.

This is written for, and tested on, SQLite and PostgreSQL. Names of tables and columns are quoted, so give them as the
database stores them; values are always parameters. In comparisons a column has its table in front: SQLite takes an
unknown quoted name for a string, and a mistaken key would then match every row. In front of a column the table has no
schema, and its alias is its own name, which databases show in their errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import iscoroutinefunction
from itertools import count
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig, StaleFence, Unsupported
from holdfast.guard.stamp import Stamp, stamp
from holdfast.lease import MAX_FENCE, BaseLease

__all__ = ["Statement", "Table"]

# Drivers with pyformat take positions, too. The DB-API has no name for asyncpg's style; numeric_dollar is SQLAlchemy's.
_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric_dollar": "${}"}


class Statement(NamedTuple):
    """A statement to execute. If its row count is 1, it has written; if 0, it was refused."""

    text: str
    values: tuple[Any, ...]


class Table:
    """A table whose rows are written under a lock, each with the fence and the holder of its last write.

    ``name`` may have a schema in front (``app.orders``). ``key``: the column or columns that identify a row, with a
    unique index. ``paramstyle``: the driver's, if the connection does not tell it (a wrapped one, for example).
    """

    def __init__(
        self,
        name: str,
        *,
        key: str | Iterable[str],
        fence: str = "fence",
        holder: str = "holder",
        paramstyle: str | None = None,
    ) -> None:
        self.name = name
        self._key = (key,) if isinstance(key, str) else tuple(key)
        self._fence = fence
        self._holder = holder
        self._paramstyle = paramstyle
        if not self._key:
            raise InvalidConfig("key=()", "name the column that identifies a row")
        if paramstyle is not None:
            _Dialect(paramstyle)

    def put(
        self, connection: Any, row: Mapping[str, Any], lease: BaseLease | Stamp, *, name: str | None = None
    ) -> None:
        """Insert the row, or update the one with its key; StaleFence if a later holder wrote it.

        A row with only its key guards the other writes of the same transaction.
        """
        ours = stamp(lease, name=name)
        connection, style = self._use(connection)
        if not self._written(connection, row, self.put_statement(row, ours, paramstyle=style)):
            stored = self._stored(connection, row, style)
            raise self._refusal(row, ours, stored[0] if stored else None)
        self._refuse_autocommit(connection, row)

    def update(
        self, connection: Any, row: Mapping[str, Any], lease: BaseLease | Stamp, *, name: str | None = None
    ) -> None:
        """Update the row with that key (KeyError if there is none); StaleFence if a later holder wrote it."""
        ours = stamp(lease, name=name)
        connection, style = self._use(connection)
        if not self._written(connection, row, self.update_statement(row, ours, paramstyle=style)):
            stored = self._stored(connection, row, style)
            if stored is None:
                raise KeyError(f"there is no {self._describe(row)}")
            raise self._refusal(row, ours, stored[0])
        self._refuse_autocommit(connection, row)

    def put_statement(self, row: Mapping[str, Any], stamp: Stamp, *, paramstyle: str) -> Statement:
        """What ``put`` executes, for callers that execute it themselves: under asyncio, or through an ORM."""
        dialect = _Dialect(paramstyle)
        quote, key, written = dialect.quote, *self._parts(row, stamp)
        fence, holder, kept = quote(self._fence), quote(self._holder), dialect.alias(self.name)
        inserted = {**key, **written}
        text = (
            f"INSERT INTO {dialect.table(self.name)} AS {kept} ({', '.join(map(quote, inserted))}) "
            f"VALUES ({', '.join(dialect.mark() for _ in inserted)}) "
            f"ON CONFLICT ({', '.join(map(quote, key))}) "
            f"DO UPDATE SET {', '.join(f'{quote(column)} = excluded.{quote(column)}' for column in written)} "
            f"WHERE {kept}.{fence} IS NULL OR {kept}.{fence} < excluded.{fence} "
            f"OR ({kept}.{fence} = excluded.{fence} AND {kept}.{holder} = excluded.{holder})"
        )
        return Statement(text, tuple(inserted.values()))

    def update_statement(self, row: Mapping[str, Any], stamp: Stamp, *, paramstyle: str) -> Statement:
        """What ``update`` executes, for callers that execute it themselves."""
        dialect = _Dialect(paramstyle)
        quote, mark, key, written = dialect.quote, dialect.mark, *self._parts(row, stamp)
        kept = dialect.alias(self.name)
        fence, holder = f"{kept}.{quote(self._fence)}", f"{kept}.{quote(self._holder)}"
        text = (
            f"UPDATE {dialect.table(self.name)} AS {kept} "
            f"SET {', '.join(f'{quote(column)} = {mark()}' for column in written)} "
            f"WHERE {dialect.match(kept, key)} AND "
            f"({fence} IS NULL OR {fence} < {mark()} OR ({fence} = {mark()} AND {holder} = {mark()}))"
        )
        return Statement(text, (*written.values(), *key.values(), stamp.fence, stamp.fence, stamp.holder))

    def _parts(self, row: Mapping[str, Any], ours: Stamp) -> tuple[dict[str, Any], dict[str, Any]]:
        """The key columns, and the other columns with fence and holder."""
        if not isinstance(row, Mapping):
            raise InvalidConfig(f"a row of type {type(row).__name__}", "give a dict of its values by column")
        for column in row:
            _check_name(column)
        if missing := [column for column in self._key if row.get(column) is None]:
            raise InvalidConfig(f"a row without {missing[0]!r}", f"it is a part of the key of {self.name!r}")
        guarded = {self._fence: ours.fence, self._holder: ours.holder}
        # SQLite ignores the case of column names, even quoted.
        if taken := [column for column in row if column.lower() in (self._fence.lower(), self._holder.lower())]:
            raise InvalidConfig(f"column {taken[0]!r}", "the guard writes it; leave it out of the row")
        key = {column: row[column] for column in self._key}
        return key, {column: value for column, value in row.items() if column not in key} | guarded

    def _written(self, connection: Any, row: Mapping[str, Any], statement: Statement) -> int:
        """How many rows were written. An error is the driver's own, with a note that names the table."""
        try:
            return _count(connection, statement)
        except Exception as error:
            columns = ", ".join([*row, self._fence, self._holder])
            error.add_note(
                f"It was a guarded write of {columns} to {self.name!r}, which must have these columns, and a unique "
                f"index on its key ({', '.join(self._key)})"
            )
            raise

    def _stored(self, connection: Any, row: Mapping[str, Any], paramstyle: str) -> Any:
        """The stored fence, in a tuple; None if there is no such row."""
        dialect = _Dialect(paramstyle)
        key = {column: row[column] for column in self._key}
        kept = dialect.alias(self.name)
        text = (
            f"SELECT {kept}.{dialect.quote(self._fence)} FROM {dialect.table(self.name)} AS {kept} "
            f"WHERE {dialect.match(kept, key)}"
        )
        with _executed(connection, Statement(text, tuple(key.values()))) as cursor:
            found = cursor.fetchone()
            return tuple(found.values()) if isinstance(found, Mapping) else found

    def _refusal(self, row: Mapping[str, Any], ours: Stamp, stored: Any) -> StaleFence | InvalidConfig:
        if stored is not None and not _is_fence(stored):
            return InvalidConfig(
                f"column {self._fence!r} of {self._describe(row):.60}",
                "it holds no fence; restore it, or set it to NULL if no holder is left",
            )
        return ours.refusal(self._describe(row), stored)

    def _refuse_autocommit(self, connection: Any, row: Mapping[str, Any]) -> None:
        if len(row) == len(self._key) and _autocommits(connection):
            raise InvalidConfig(
                f"a fence for {self._describe(row):.60} alone",
                "this connection commits each statement by itself, so your next write would not be guarded; "
                "begin a transaction first",
            )

    def _use(self, connection: Any) -> tuple[Any, str]:
        """The connection to write through (that of a Session, if it is SQLAlchemy's), and its paramstyle."""
        if any(iscoroutinefunction(getattr(connection, method, None)) for method in ("commit", "execute")):
            raise Unsupported("a guarded write by a connection of asyncio", "execute put_statement() yourself")
        if not hasattr(connection, "cursor") and callable(getattr(connection, "connection", None)):
            connection = connection.connection()
        if not (hasattr(connection, "cursor") or _is_sqlalchemy(connection)):
            given = type(connection).__name__
            raise InvalidConfig(
                f"{given} as a connection", "give a DB-API connection, or SQLAlchemy's Connection or Session"
            )
        return connection, self._paramstyle or _style_of(connection)

    def _describe(self, row: Mapping[str, Any]) -> str:
        return f"{self.name} {', '.join(f'{column}={row[column]!r}' for column in self._key)}"


class _Dialect:
    """Writes names and parameters for a driver of that paramstyle."""

    def __init__(self, paramstyle: str) -> None:
        if paramstyle not in _MARKS:
            raise Unsupported(f"paramstyle {paramstyle!r}", f"use a driver with one of {', '.join(_MARKS)}")
        self._mark = _MARKS[paramstyle]
        self._numbers = count(1)

    def mark(self) -> str:
        """The placeholder of the next value."""
        return self._mark.format(next(self._numbers))

    def quote(self, name: str) -> str:
        _check_name(name)
        quoted = '"' + name.replace('"', '""') + '"'
        return quoted.replace("%", "%%") if self._mark == "%s" else quoted

    def table(self, name: str) -> str:
        return ".".join(map(self.quote, name.split(".")))

    def alias(self, name: str) -> str:
        """The name of the table in front of a column."""
        own = name.rpartition(".")[2]
        return self.quote("kept" if own.lower() == "excluded" else own)  # ON CONFLICT calls the new row "excluded"

    def match(self, table: str, columns: Iterable[str]) -> str:
        return " AND ".join(f"{table}.{self.quote(column)} = {self.mark()}" for column in columns)


def _plain_row(_cursor: Any, row: Any = None) -> Any:
    """A row factory for plain tuples: sqlite3 calls it for each row, psycopg once to get a row maker."""
    return tuple if row is None else row


def _check_name(name: Any) -> None:
    try:
        usable = isinstance(name, str) and name and "\0" not in name and name.encode()
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise InvalidConfig(f"{name!r:.60} as the name of a table or column", "give it as the database stores it")


def _is_fence(stored: Any) -> bool:
    try:
        return bool(0 < stored <= MAX_FENCE)
    except TypeError:  # SQLite stores any value in any column
        return False


def _is_sqlalchemy(connection: Any) -> bool:
    return hasattr(connection, "exec_driver_sql")


@contextmanager
def _executed(connection: Any, statement: Statement) -> Iterator[Any]:
    """An object with rowcount and fetchone, after the statement was executed.

    Not a cursor below SQLAlchemy's connection: that would begin no transaction in SQLAlchemy, and nothing would be
    committed.
    """
    if _is_sqlalchemy(connection):
        keep_count = {"preserve_rowcount": True}
        cursor = connection.exec_driver_sql(statement.text, statement.values, execution_options=keep_count)
    else:
        cursor = connection.cursor()
    try:
        if not _is_sqlalchemy(connection):
            if hasattr(cursor, "row_factory"):
                cursor.row_factory = _plain_row  # the connection may make rows of another type
            cursor.execute(statement.text, statement.values)
        yield cursor
    finally:
        cursor.close()


def _count(connection: Any, statement: Statement) -> int:
    """Execute the statement; how many rows it has written."""
    with _executed(connection, statement) as cursor:
        count: int = cursor.rowcount
    if count < 0:
        raise Unsupported("a driver that does not count rows", "roll back: it is unknown whether this was written")
    return count


def _autocommits(connection: Any) -> bool:
    """Whether no transaction is open after a statement, as far as known drivers tell."""
    if _is_sqlalchemy(connection):
        connection = connection.connection.dbapi_connection
    if isinstance(open_now := getattr(connection, "in_transaction", None), bool):  # sqlite3
        return not open_now
    return getattr(getattr(connection, "info", None), "transaction_status", None) == 0  # psycopg: idle


def _style_of(connection: Any) -> str:
    """The paramstyle of the module that defines the connection's class or one of its base classes."""
    if _is_sqlalchemy(connection):
        return str(connection.dialect.dbapi.paramstyle)
    for kind in type(connection).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        style = getattr(module, "paramstyle", None)
        if isinstance(style, str):
            return style
    raise InvalidConfig(f"a connection of type {type(connection).__name__}", "give its driver's paramstyle=")
