"""The model of memcached, beside what its protocol.txt says."""

from __future__ import annotations

import pytest

from holdfast.lab.servers.memcached import Memcached
from holdfast.lab.servers.replies import ReplyError, Status
from holdfast.lab.servers.store import START_US
from holdfast.lab.subjects.memcached import Resumed

SECOND = 1_000_000
DAY = 86_400


@pytest.fixture
def server() -> Memcached:
    return Memcached()


def test_add_stores_only_what_is_not_there(server: Memcached) -> None:
    assert server.execute("add", "k", 0, 0, "a") == Status("STORED")
    assert server.execute("add", "k", 0, 0, "b") == Status("NOT_STORED")
    data, _ = server.execute("gets", "k")  # type: ignore[misc]
    assert data == b"a"


def test_gets_of_nothing_is_nothing(server: Memcached) -> None:
    assert server.execute("gets", "k") is None


def test_every_write_has_a_cas_of_its_own(server: Memcached) -> None:
    seen = []
    for _ in range(3):
        server.execute("add", "k", 0, 0, "same")
        _, cas = server.execute("gets", "k")  # type: ignore[misc]
        seen.append(cas)
        server.execute("md", "k")
    assert len(set(seen)) == 3


def test_delete_by_cas_takes_what_was_seen_and_nothing_else(server: Memcached) -> None:
    server.execute("add", "k", 0, 0, "mine")
    _, mine = server.execute("gets", "k")  # type: ignore[misc]
    assert isinstance(mine, int)
    server.execute("md", "k")
    server.execute("add", "k", 0, 0, "another's")
    assert server.execute("md", "k", f"C{mine}") == Status("EX")
    _, theirs = server.execute("gets", "k")  # type: ignore[misc]
    assert isinstance(theirs, int)
    assert server.execute("md", "k", f"C{theirs}") == Status("HD")
    assert server.execute("md", "k", f"C{theirs}") == Status("NF")
    assert server.execute("gets", "k") is None


def test_cas_replaces_what_was_seen_and_nothing_else(server: Memcached) -> None:
    assert server.execute("cas", "k", 0, 0, 1, "a") == Status("NOT_FOUND")
    server.execute("add", "k", 0, 2, "a")
    assert server.execute("cas", "k", 0, 9, 1, "b") == Status("STORED")
    assert server.execute("cas", "k", 0, 9, 1, "c") == Status("EXISTS")
    assert server.execute("gets", "k") == [b"b", 2]
    server.now_us += 5 * SECOND
    assert server.execute("gets", "k") == [b"b", 2], "it has the end of the second write"


def test_an_item_that_is_stored_before_the_clock_is_read_again_lasts_too_short(server: Memcached) -> None:
    server.stop_clock()
    server.now_us += 5 * SECOND
    server.execute("add", "by_duration", 0, 4, "a")
    server.execute("add", "by_time", 0, START_US // SECOND + 9, "a")
    assert server.execute("stats") == START_US // SECOND
    assert server.execute("gets", "by_duration") is not None
    assert server.execute("clock") == START_US // SECOND + 5, "the second of two new connections finds it read"
    assert server.execute("gets", "by_duration") is None
    assert server.execute("gets", "by_time") is not None
    server.now_us += 4 * SECOND
    assert server.execute("gets", "by_time") is None


def test_a_server_that_was_stopped_answers_before_it_reads_its_clock() -> None:
    server = Resumed()
    late = server.execute("stats")
    assert server.copy().fingerprint() == server.fingerprint()
    assert server.execute("stats") == late
    assert server.execute("stats") == START_US // SECOND
    assert late == START_US // SECOND - 5


def test_an_item_is_gone_at_its_tick(server: Memcached) -> None:
    server.execute("add", "k", 0, 2, "a")
    server.now_us += 2 * SECOND - 1
    assert server.execute("gets", "k") is not None
    server.now_us += 1
    assert server.execute("gets", "k") is None
    assert server.execute("add", "k", 0, 2, "b") == Status("STORED")


def test_a_second_may_be_almost_none(server: Memcached) -> None:
    server.now_us += SECOND - 1
    server.execute("add", "k", 0, 1, "a")
    server.now_us += 1
    assert server.execute("gets", "k") is None


def test_exptime_has_four_meanings(server: Memcached) -> None:
    now = START_US // SECOND
    server.execute("add", "for_ever", 0, 0, "a")
    server.execute("add", "thirty_days", 0, 30 * DAY, "a")
    server.execute("add", "a_date", 0, now + 100, "a")
    assert server.execute("add", "over", 0, -1, "a") == Status("STORED")
    assert server.execute("add", "long_ago", 0, 30 * DAY + 1, "a") == Status("STORED"), "in January 1970"
    assert sorted(server.values) == [b"a_date", b"for_ever", b"thirty_days"]
    server.now_us += 100 * SECOND
    assert sorted(server.values) == [b"for_ever", b"thirty_days"]
    server.now_us += 30 * DAY * SECOND
    assert sorted(server.values) == [b"for_ever"]


def test_eviction_frees_what_is_held(server: Memcached) -> None:
    server.execute("add", "k", 0, 0, "a")
    assert server.remove(b"k")
    assert not server.remove(b"k")
    assert server.execute("add", "k", 0, 0, "b") == Status("STORED")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("set", "k", 0, 0, "a"), "ERROR"),
        (("add", "k"), "ERROR"),
        (("add", "two words", 0, 0, "a"), "CLIENT_ERROR"),
        (("add", "k" * 251, 0, 0, "a"), "CLIENT_ERROR"),
        (("add", "", 0, 0, "a"), "CLIENT_ERROR"),
        (("add", "k", 0, "soon", "a"), "CLIENT_ERROR"),
        (("add", "k", -1, 0, "a"), "CLIENT_ERROR"),
        (("gets", "new\nline"), "CLIENT_ERROR"),
        (("md", "k", "Cx"), "CLIENT_ERROR"),
        (("md", "k", "Z"), "CLIENT_ERROR"),
    ],
)
def test_what_cannot_be_read_is_refused(server: Memcached, words: tuple[str | int, ...], code: str) -> None:
    answer = server.execute(*words)
    assert isinstance(answer, ReplyError)
    assert answer.code == code
    assert not server.values


def test_it_says_who_it_is(server: Memcached) -> None:
    assert str(server.execute("version")).startswith("VERSION 1.6.")


def test_a_copy_goes_its_own_way(server: Memcached) -> None:
    server.execute("add", "k", 0, 5, "a")
    twin = server.copy()
    assert twin.fingerprint() == server.fingerprint()
    twin.execute("md", "k")
    twin.execute("add", "k", 0, 5, "a")
    assert twin.fingerprint() != server.fingerprint(), "its cas is another"
    assert server.execute("gets", "k") == [b"a", 1]


def test_fingerprints_tell_apart_what_behaves_differently() -> None:
    early, late = Memcached(START_US), Memcached(START_US + SECOND - 1)
    assert early.fingerprint() != late.fingerprint(), "the next tick is nearer"
    assert early.fingerprint() == Memcached(START_US + 7 * SECOND).fingerprint()
    for server in (early, late):
        server.execute("add", "k", 0, 1, "a")
    late.now_us = early.now_us = START_US + SECOND - 1
    assert early.fingerprint() == late.fingerprint(), "both end at the same tick"


def test_it_says_what_was_written(server: Memcached) -> None:
    server.execute("add", "k", 0, 1, "a")
    assert server.written == {b"k"}
    server.written.clear()
    server.now_us += SECOND
    assert server.written == {b"k"}
