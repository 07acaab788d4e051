"""The resources that guards protect, with one face, so that one test can be about all of them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, TypeAlias

import redis

from holdfast import guard
from holdfast.lease import BaseLease
from tests.support import as_bytes

__all__ = ["KINDS", "Resource", "open_resource"]

LeaseOrStamp: TypeAlias = BaseLease | guard.Stamp

notes = guard.Table("notes", key="id")


class Resource:
    """One text, and its last writer."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self.where = where

    def write(self, text: str, lease: LeaseOrStamp) -> None:
        raise NotImplementedError

    def enter(self, lease: LeaseOrStamp) -> None:
        """Raise the fence, and write nothing."""
        raise NotImplementedError

    def text(self) -> str | None:
        raise NotImplementedError

    def record(self) -> tuple[int, str] | None:
        raise NotImplementedError

    def clear(self) -> None:
        """As before the first write."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    def again(self) -> Resource:
        """The same one, through a connection of its own."""
        return open_resource(self.kind, self.where)


class RedisResource(Resource):
    def __init__(self, kind: str, where: str) -> None:
        super().__init__(kind, where)
        self.client = redis.Redis.from_url(where)
        self._guard = guard.RedisGuard(self.client)

    def write(self, text: str, lease: LeaseOrStamp) -> None:
        self._guard.set("note", text, lease)

    def enter(self, lease: LeaseOrStamp) -> None:
        self._guard.enter("note", lease)

    def text(self) -> str | None:
        found = self.client.get("note")
        return None if found is None else as_bytes(found).decode()

    def record(self) -> tuple[int, str] | None:
        found = self.client.get("note:hf1:guard:{note}")
        return None if found is None else _parse(as_bytes(found).decode())

    def clear(self) -> None:
        self.client.flushall()

    def close(self) -> None:
        self.client.close()


class SqlResource(Resource):
    def __init__(self, kind: str, where: str) -> None:
        super().__init__(kind, where)
        self.connection = _connect(kind, where)

    def write(self, text: str, lease: LeaseOrStamp) -> None:
        self._put({"id": 1, "body": text}, lease)

    def enter(self, lease: LeaseOrStamp) -> None:
        self._put({"id": 1}, lease)

    def _put(self, row: dict[str, Any], lease: LeaseOrStamp) -> None:
        try:
            notes.put(self.connection, row, lease)
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()

    def text(self) -> str | None:
        found = self.ask("SELECT body FROM notes WHERE id = 1")
        return found[0][0] if found else None

    def record(self) -> tuple[int, str] | None:
        found = self.ask("SELECT fence, holder FROM notes WHERE id = 1")
        return found[0] if found else None

    def clear(self) -> None:
        self.ask("DROP TABLE IF EXISTS notes")
        self.ask("CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT, holder TEXT)")

    def close(self) -> None:
        self.connection.close()

    def ask(self, statement: str) -> list[Any]:
        """Run one statement in a transaction of its own."""
        cursor = self.connection.cursor()
        cursor.execute(statement)
        found = cursor.fetchall() if cursor.description else []
        cursor.close()
        self.connection.commit()
        return found


class FileResource(Resource):
    def write(self, text: str, lease: LeaseOrStamp) -> None:
        guard.replace_file(self.where, text, lease)

    def enter(self, lease: LeaseOrStamp) -> None:
        guard.enter_file(self.where, lease)

    def text(self) -> str | None:
        path = Path(self.where)
        return path.read_text() if path.exists() else None

    def record(self) -> tuple[int, str] | None:
        path = Path(f"{self.where}.fence")
        return _parse(path.read_text().rstrip("\n")) if path.exists() else None

    def clear(self) -> None:
        for file in Path(self.where).parent.iterdir():
            file.unlink()


def _parse(record: str) -> tuple[int, str]:
    fence, holder = record.split(" ")
    return int(fence), holder


def _connect(kind: str, where: str) -> Any:
    if kind == "sqlite":
        return sqlite3.connect(where, timeout=30)
    import psycopg

    return psycopg.connect(where)


KINDS: dict[str, type[Resource]] = {
    "redis": RedisResource,
    "sqlite": SqlResource,
    "postgres": SqlResource,
    "file": FileResource,
}


def open_resource(kind: str, where: str) -> Resource:
    return KINDS[kind](kind, where)
