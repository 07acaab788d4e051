"""The exact commands of every recipe, as the server hears them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import redis

import holdfast
from holdfast.lua import SCRIPTS
from tests.recipes.originals import Socket
from tests.servers import Server

FREE = r"EVALSHA [0-9a-f]{40} 1"
TOKEN = r"[\w.-]+\.[0-9a-f]{32}"
MICROS = r"\d{16}"


class Ear:
    """What the server does for one connection at a time, by MONITOR."""

    def __init__(self, server: Server) -> None:
        self._port = server.port
        self._socket = Socket(server.port)
        assert self._socket.ask("MONITOR") == b"OK"

    def hear(self) -> str:
        """The commands since the last time, one after the other; but not what a script does."""
        mark = Socket(self._port)
        mark.ask("ECHO", "that is all")
        mark.close()
        heard = []
        while b"that is all" not in (line := self._socket._file.readline()):
            origin, words = re.findall(rb"\[\d+ ([^]]+)\] (.*)", line)[0]
            if origin != b"lua":
                heard.append(b" ".join(re.findall(rb'"((?:[^"\\]|\\.)*)"', words)).decode())
        return "; ".join(word for word in heard if not word.startswith(("CLIENT", "HELLO", "SELECT")))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear(server: Server, admin: redis.Redis) -> Iterator[Ear]:
    admin.script_load(SCRIPTS["free"].source)
    ear = Ear(server)
    yield ear
    ear.close()


class Words(NamedTuple):
    """The commands of an acquire that wins, of one that finds it held, and of the release."""

    name: str
    options: dict[str, Any]
    taken: str
    refused: str
    released: str


WORDS = [
    Words("setnx", {}, "SETNX foo 1", "SETNX foo 1", "DEL foo"),
    Words("setnx_expire", {}, "SETNX foo 1; EXPIRE foo 10", "SETNX foo 1", "DEL foo"),
    Words("setnx_expire", {"ttl": 1.2}, "SETNX foo 1; EXPIRE foo 2", "SETNX foo 1", "DEL foo"),
    Words(
        "setnx_repair",
        {"ttl": 9.5},
        f"SETNX lock:foo {TOKEN}; EXPIRE lock:foo 10",
        f"SETNX lock:foo {TOKEN}; TTL lock:foo",
        "WATCH lock:foo; GET lock:foo; MULTI; DEL lock:foo; EXEC",
    ),
    Words(
        "multi",
        {"ttl": 0.1},
        "MULTI; SETNX foo 1; EXPIRE foo 1; EXEC",
        "MULTI; SETNX foo 1; EXPIRE foo 1; EXEC",
        "DEL foo",
    ),
    Words(
        "getset",
        {},
        rf"SETNX lock.foo {MICROS}",
        rf"SETNX lock.foo {MICROS}; GET lock.foo",
        "GET lock.foo; DEL lock.foo",
    ),
    Words(
        "getset",
        {"release": "del"},
        rf"SETNX lock.foo {MICROS}",
        rf"SETNX lock.foo {MICROS}; GET lock.foo",
        "DEL lock.foo",
    ),
    Words(
        "getset",
        {"release": "same_value", "unit": "s", "prefix": ""},
        r"SETNX foo \d{10}",
        r"SETNX foo \d{10}; GET foo",
        rf"{FREE} foo \d{{10}}",
    ),
    Words(
        "getset",
        {"unit": "ms", "owner_prefix": True},
        rf"SETNX lock.foo {TOKEN}\.\d{{13}}",
        rf"SETNX lock.foo {TOKEN}\.\d{{13}}; GET lock.foo",
        "GET lock.foo; DEL lock.foo",
    ),
    Words("getset_equal", {}, rf"SETNX foo {MICROS}", rf"SETNX foo {MICROS}; GET foo", "DEL foo"),
    Words("watch_blind", {}, "WATCH lock:foo; MULTI; SET lock:foo 1; EXEC", "", "DEL lock:foo"),
    Words(
        "watch",
        {},
        f"WATCH lock:foo; GET lock:foo; MULTI; SET lock:foo {TOKEN} EX 10; EXEC",
        "WATCH lock:foo; GET lock:foo; UNWATCH",
        "WATCH lock:foo; GET lock:foo; MULTI; DEL lock:foo; EXEC",
    ),
    Words("set_nx_plain", {"ttl": 30}, "SET foo 1 EX 30 NX", "SET foo 1 EX 30 NX", "DEL foo"),
    Words("set_nx", {"ttl": 2.5}, f"SET foo {TOKEN} NX PX 2500", f"SET foo {TOKEN} NX PX 2500", f"{FREE} foo {TOKEN}"),
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words.name)
def test_the_words(face: Any, ear: Ear, words: Words) -> None:
    first, second = (face.recipe(words.name, "foo", **words.options) for _ in range(2))
    assert first.acquire(blocking=False)
    assert re.fullmatch(words.taken, ear.hear())
    if words.refused:
        assert second.acquire(blocking=False) is None
        assert re.fullmatch(words.refused, ear.hear())
    first.release()
    assert re.fullmatch(words.released, ear.hear())


def test_an_expired_deadline_is_taken_over_by_getset(face: Any, ear: Ear, server: Server) -> None:
    for name in ("getset", "getset_equal"):
        socket = Socket(server.port)
        socket.ask("SET", "foo", 1)
        ear.hear()
        recipe = face.recipe(name, "foo", prefix="")
        assert recipe.acquire(blocking=False)
        assert re.fullmatch(r"SETNX foo (\d{16}); GET foo; GETSET foo \1", ear.hear()), "the clock is read once"
        recipe.release()
        socket.close()


@pytest.mark.parametrize(
    ("unit", "options", "added"),
    [
        ("us", {}, 1),
        ("us", {"plus_one": False}, 0),
        ("ms", {}, 0),
        ("ms", {"plus_one": True}, 1),
        ("s", {}, 1),
        ("s", {"plus_one": False}, 0),
    ],
)
def test_what_a_deadline_is_made_of(
    client: holdfast.Client, server: Server, unit: str, options: dict[str, Any], added: int
) -> None:
    count: Callable[[], int] = {
        "us": lambda: time.time_ns() // 1000,
        "ms": lambda: time.time_ns() // 1_000_000,
        "s": lambda: int(time.time()),
    }[unit]
    ttl = {"us": 7_000_000, "ms": 7_000, "s": 7}[unit]
    before = count()
    with client.recipe("getset", "foo", ttl=7, unit=unit, **options):
        after = count()
        with server.client() as admin:
            value = int(admin.get("lock.foo"))
            assert admin.pttl("lock.foo") == -1, "the server knows nothing of it"
    # A microsecond either way: a float is no more precise.
    assert before + ttl + added - 1 <= value <= after + ttl + added + (unit == "us")
    if unit != "us":
        assert (value - added - ttl) in range(before, after + 1)


def test_namespace_and_prefix_come_before_the_name(connect: Any, url: str, server: Server) -> None:
    face = connect(url, namespace="app:")
    with server.client() as admin:
        with face.recipe("watch", "foo") as lease:
            assert admin.keys("*") == [b"app:lock:foo"]
            assert lease.name == "foo"
        with face.recipe("watch", "foo", prefix="mutex/"):
            assert admin.keys("*") == [b"app:mutex/foo"]
