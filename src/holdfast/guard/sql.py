"""Guarded writes to the rows of a SQL table, through the caller's own connection: a DB-API one, or SQLAlchemy's.

A row has two columns more, for the fence and the holder of its last write. The comparison stands in the one statement
that writes, so the database makes it one step: under READ COMMITTED, a statement that had to wait for another
transaction looks at the row again. The first write of a row is INSERT ... ON CONFLICT DO UPDATE for the same reason, as
two holders may both find no row.

The transaction is the caller's. Until it is committed the row stays locked, so whatever else is written in it is behind
the same fence. Nothing here deletes a row: its fence would go with it, and a stale holder could insert it anew.

SQLite and PostgreSQL are what this is written for and tested on. Names of tables and columns are quoted, so give them
as the database stores them; values are always parameters. Where something is compared, a column has its table in front:
SQLite takes a quoted name that it does not know for a string, and a mistaken key would then be that of every row. In
front of a column the table has no schema; its own name is given to it once more, because databases show that name in
their errors.
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

# Drivers with pyformat take positions, too. What asyncpg takes has no name in the DB-API; SQLAlchemy calls it so.
_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric_dollar": "${}"}


class Statement(NamedTuple):
    """What to execute. It has written if it counts a row, and was refused if it counts none."""

    text: str
    values: tuple[Any, ...]


class Table:
    """A table whose rows are written under a lock, each with the fence and the holder of its last write.

    ``name`` may have a schema in front (``app.orders``). ``key`` is the column, or the columns, that tell rows apart,
    with a unique index. ``paramstyle`` is needed only where the connection does not tell it, as one that is wrapped.
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
            raise InvalidConfig("key=()", "name the column that tells the rows apart")
        if paramstyle is not None:
            _Words(paramstyle)

    def put(
        self, connection: Any, row: Mapping[str, Any], lease: BaseLease | Stamp, *, name: str | None = None
    ) -> None:
        """Insert the row, or update the one with its key; StaleFence if a later holder wrote that.

        A row of nothing but its key keeps the fence of what else is written in the same transaction.
        """
        claim = stamp(lease, name=name)
        connection, style = self._use(connection)
        if not self._written(connection, row, self.put_statement(row, claim, paramstyle=style)):
            stored = self._stored(connection, row, style)
            raise self._refusal(row, claim, stored[0] if stored else None)
        self._refuse_fence_alone(connection, row)

    def update(
        self, connection: Any, row: Mapping[str, Any], lease: BaseLease | Stamp, *, name: str | None = None
    ) -> None:
        """Update the row with that key (KeyError if there is none); StaleFence if a later holder wrote it."""
        claim = stamp(lease, name=name)
        connection, style = self._use(connection)
        if not self._written(connection, row, self.update_statement(row, claim, paramstyle=style)):
            stored = self._stored(connection, row, style)
            if stored is None:
                raise KeyError(f"there is no {self._describe(row)}")
            raise self._refusal(row, claim, stored[0])
        self._refuse_fence_alone(connection, row)

    def put_statement(self, row: Mapping[str, Any], claim: Stamp, *, paramstyle: str) -> Statement:
        """What ``put`` executes, for those who do that themselves: under asyncio, or through an ORM."""
        words = _Words(paramstyle)
        quote, key, written = words.quote, *self._parts(row, claim)
        fence, holder, kept = quote(self._fence), quote(self._holder), words.alias(self.name)
        inserted = {**key, **written}
        text = (
            f"INSERT INTO {words.table(self.name)} AS {kept} ({', '.join(map(quote, inserted))}) "
            f"VALUES ({', '.join(words.mark() for _ in inserted)}) "
            f"ON CONFLICT ({', '.join(map(quote, key))}) "
            f"DO UPDATE SET {', '.join(f'{quote(column)} = excluded.{quote(column)}' for column in written)} "
            f"WHERE {kept}.{fence} IS NULL OR {kept}.{fence} < excluded.{fence} "
            f"OR ({kept}.{fence} = excluded.{fence} AND {kept}.{holder} = excluded.{holder})"
        )
        return Statement(text, tuple(inserted.values()))

    def update_statement(self, row: Mapping[str, Any], claim: Stamp, *, paramstyle: str) -> Statement:
        """What ``update`` executes, for those who do that themselves."""
        words = _Words(paramstyle)
        quote, key, written = words.quote, *self._parts(row, claim)
        kept = words.alias(self.name)
        fence, holder = f"{kept}.{quote(self._fence)}", f"{kept}.{quote(self._holder)}"
        text = (
            f"UPDATE {words.table(self.name)} AS {kept} "
            f"SET {', '.join(f'{quote(column)} = {words.mark()}' for column in written)} "
            f"WHERE {words.match(kept, key)} AND "
            f"({fence} IS NULL OR {fence} < {words.mark()} OR ({fence} = {words.mark()} AND {holder} = {words.mark()}))"
        )
        return Statement(text, (*written.values(), *key.values(), claim.fence, claim.fence, claim.holder))

    def _parts(self, row: Mapping[str, Any], claim: Stamp) -> tuple[dict[str, Any], dict[str, Any]]:
        """The key, and what is written beside it."""
        if not isinstance(row, Mapping):
            raise InvalidConfig(f"a row of type {type(row).__name__}", "give a dict of its values by column")
        for column in row:
            _check_name(column)
        if missing := [column for column in self._key if row.get(column) is None]:
            raise InvalidConfig(f"a row without {missing[0]!r}", f"it is a part of the key of {self.name!r}")
        ours = {self._fence: claim.fence, self._holder: claim.holder}
        # In capitals it is the same column to SQLite, even quoted.
        if taken := [column for column in row if column.lower() in (self._fence.lower(), self._holder.lower())]:
            raise InvalidConfig(f"column {taken[0]!r}", "the guard writes it; leave it out of the row")
        key = {column: row[column] for column in self._key}
        return key, {column: value for column, value in row.items() if column not in key} | ours

    def _written(self, connection: Any, row: Mapping[str, Any], statement: Statement) -> int:
        """How many rows it has written. An error is the driver's own, which often names a column and not the table."""
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
        """The fence on record, in a tuple; None if there is no such row."""
        words = _Words(paramstyle)
        key = {column: row[column] for column in self._key}
        kept = words.alias(self.name)
        text = (
            f"SELECT {kept}.{words.quote(self._fence)} FROM {words.table(self.name)} AS {kept} "
            f"WHERE {words.match(kept, key)}"
        )
        with _executed(connection, Statement(text, tuple(key.values()))) as cursor:
            found = cursor.fetchone()
            return tuple(found.values()) if isinstance(found, Mapping) else found

    def _refusal(self, row: Mapping[str, Any], claim: Stamp, stored: Any) -> StaleFence | InvalidConfig:
        if stored is not None and not _is_fence(stored):
            return InvalidConfig(
                f"column {self._fence!r} of {self._describe(row):.60}",
                "it holds no fence; restore it, or set it to NULL if no holder is left",
            )
        return claim.refusal(self._describe(row), stored)

    def _refuse_fence_alone(self, connection: Any, row: Mapping[str, Any]) -> None:
        if len(row) == len(self._key) and _stands_alone(connection):
            raise InvalidConfig(
                f"a fence for {self._describe(row):.60} alone",
                "this connection commits each statement by itself, so what you write next would be behind no fence; "
                "begin a transaction first",
            )

    def _use(self, connection: Any) -> tuple[Any, str]:
        """The connection to write by (a Session's own, if it is one of SQLAlchemy's), and its paramstyle."""
        if any(iscoroutinefunction(getattr(connection, method, None)) for method in ("commit", "execute")):
            raise Unsupported("a guarded write by a connection of asyncio", "await what put_statement() gives you")
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


class _Words:
    """How names and parameters are written for a driver of that paramstyle."""

    def __init__(self, paramstyle: str) -> None:
        if paramstyle not in _MARKS:
            raise Unsupported(f"paramstyle {paramstyle!r}", f"use a driver with one of {', '.join(_MARKS)}")
        self._mark = _MARKS[paramstyle]
        self._numbers = count(1)

    def mark(self) -> str:
        """Where the next of the values goes."""
        return self._mark.format(next(self._numbers))

    def quote(self, name: str) -> str:
        _check_name(name)
        quoted = '"' + name.replace('"', '""') + '"'
        return quoted.replace("%", "%%") if self._mark == "%s" else quoted

    def table(self, name: str) -> str:
        return ".".join(map(self.quote, name.split(".")))

    def alias(self, name: str) -> str:
        """What the table is called in front of a column."""
        own = name.rpartition(".")[2]
        return self.quote("kept" if own.lower() == "excluded" else own)  # ON CONFLICT calls the new row so

    def match(self, table: str, columns: Iterable[str]) -> str:
        return " AND ".join(f"{table}.{self.quote(column)} = {self.mark()}" for column in columns)


def _plain(_cursor: Any, row: Any = None) -> Any:
    """A row as it is: sqlite3 asks for each row, psycopg asks once for what makes a row of values."""
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
    except TypeError:  # a column that is not one of numbers, in a database that takes any value
        return False


def _is_sqlalchemy(connection: Any) -> bool:
    return hasattr(connection, "exec_driver_sql")


@contextmanager
def _executed(connection: Any, statement: Statement) -> Iterator[Any]:
    """What has rowcount and fetchone after the statement was executed.

    Not by the cursor that is below SQLAlchemy's connection: that would begin no transaction above, and nothing would
    be committed.
    """
    if _is_sqlalchemy(connection):
        keep_count = {"preserve_rowcount": True}
        cursor = connection.exec_driver_sql(statement.text, statement.values, execution_options=keep_count)
    else:
        cursor = connection.cursor()
    try:
        if not _is_sqlalchemy(connection):
            if hasattr(cursor, "row_factory"):
                cursor.row_factory = _plain  # whatever kind of rows the connection makes
            cursor.execute(statement.text, statement.values)
        yield cursor
    finally:
        cursor.close()


def _count(connection: Any, statement: Statement) -> int:
    """Execute it; how many rows it has written."""
    with _executed(connection, statement) as cursor:
        count: int = cursor.rowcount
    if count < 0:
        raise Unsupported("a driver that does not count rows", "roll back: nobody can say whether this was written")
    return count


def _stands_alone(connection: Any) -> bool:
    """Whether no transaction is open after a statement, as far as the drivers that we know tell it."""
    if _is_sqlalchemy(connection):
        connection = connection.connection.dbapi_connection
    if isinstance(open_now := getattr(connection, "in_transaction", None), bool):  # sqlite3
        return not open_now
    return getattr(getattr(connection, "info", None), "transaction_status", None) == 0  # psycopg: idle


def _style_of(connection: Any) -> str:
    """The paramstyle of the module that the connection's class, or one that it is derived from, comes from."""
    if _is_sqlalchemy(connection):
        return str(connection.dialect.dbapi.paramstyle)
    for kind in type(connection).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        style = getattr(module, "paramstyle", None)
        if isinstance(style, str):
            return style
    raise InvalidConfig(f"a connection of type {type(connection).__name__}", "say what its driver takes (paramstyle=)")
