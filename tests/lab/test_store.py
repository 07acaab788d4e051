"""What the lab's store promises beyond being like a server: copies, fingerprints, and a clock that others move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.lab.servers.commands.table import COMMANDS
from holdfast.lab.servers.replies import ReplyError, Status, format_number
from holdfast.lab.servers.store import START_US, Store


@pytest.fixture
def store() -> Store:
    return Store()


def test_replies_tell_a_status_from_a_string(store: Store) -> None:
    assert isinstance(store.execute("SET", "k", "OK"), Status)
    assert store.execute(b"get", b"k") == b"OK"


def test_an_error_is_a_value(store: Store) -> None:
    store.execute("RPUSH", "k", 1)
    reply = store.execute("GET", "k")
    assert isinstance(reply, ReplyError)
    assert reply.code == "WRONGTYPE"
    assert reply.__traceback__ is None


def test_the_owner_moves_the_clock(store: Store) -> None:
    store.execute("SET", "k", 1, "PX", 10)
    store.now_us += 10_999
    assert store.execute("PTTL", "k") == 0
    store.now_us += 1
    assert store.execute("PTTL", "k") == -2


def test_what_expired_stays_gone_when_the_clock_is_set_back(store: Store) -> None:
    store.execute("SET", "k", 1, "PX", 10)
    store.now_us += 11_000
    store.now_us -= 11_000
    assert store.execute("EXISTS", "k") == 0


def test_a_clock_that_is_set_back_stretches_a_ttl(store: Store) -> None:
    store.execute("SET", "k", 1, "PX", 10)
    store.now_us -= 5_000
    assert store.execute("PTTL", "k") == 15


FILL = ["SET s 1", "HSET h f 1", "RPUSH l a b", "ZADD z 1 a 2 b", "SET t 1 PX 500", "EVAL return(1) 0"]
CHANGE = ["APPEND s 2", "HSET h f 2", "RPUSH l c", "ZADD z 3 a", "PERSIST t", "SCRIPT FLUSH", "PUBLISH c x"]


@pytest.mark.parametrize("line", CHANGE)
def test_a_copy_shares_nothing_that_can_change(store: Store, line: str) -> None:
    for filling in FILL:
        store.execute(*filling.split())
    twin, before = store.copy(), store.fingerprint()
    assert twin.fingerprint() == before
    twin.execute(*line.split())
    assert store.fingerprint() == before
    assert twin.fingerprint() != before


def test_a_fingerprint_does_not_depend_on_how_the_store_came_to_be(store: Store) -> None:
    other = Store()
    for line in FILL:
        store.execute(*line.split())
    for line in ["SET s 0", "HSET h g 1", "ZADD z 2 b 7 a", *FILL[::-1], "HDEL h g", "ZADD z 1 a"]:
        other.execute(*line.split())
    assert store.fingerprint() == other.fingerprint()
    assert hash(store.fingerprint()) == hash(other.fingerprint())


def test_a_fingerprint_counts_time_from_now() -> None:
    early, late = Store(START_US), Store(START_US + 5_000_000)
    for store in (early, late):
        store.execute("SET", "k", 1, "PX", 100)
    assert early.fingerprint() == late.fingerprint()
    late.now_us += 1000
    assert early.fingerprint() != late.fingerprint()


def test_a_fingerprint_tells_kinds_apart(store: Store) -> None:
    other = Store()
    store.execute("HSET", "k", "a", "1")
    other.execute("ZADD", "k", 1, "a")
    assert store.fingerprint() != other.fingerprint()


def test_what_has_no_order_comes_sorted(store: Store) -> None:
    store.execute("HSET", "h", "z", 1, "y", 2)
    assert store.execute("HGETALL", "h") == [b"y", b"2", b"z", b"1"]


def test_messages_wait_in_the_outbox(store: Store) -> None:
    assert store.execute("PUBLISH", "bell", "ding") == 0
    assert store.execute("EVAL", "return redis.call('publish', KEYS[1], ARGV[1])", 1, "bell", "dong") == 0
    assert store.outbox == [(b"bell", b"ding"), (b"bell", b"dong")]


def test_a_connection_lives_in_the_store_and_its_copies(store: Store) -> None:
    one = store.session("one")
    for line in ("WATCH k", "MULTI", "SET k 1"):
        one.execute(*line.split())
    disturbed, quiet = store.copy(), store.copy()
    disturbed.execute("SET", "k", 2)
    assert disturbed.session("one").execute("EXEC") is None
    assert quiet.session("one").execute("EXEC") == ["OK"]
    assert store.session("other").execute("EXEC") == ReplyError("ERR EXEC without MULTI")


def test_a_lost_connection_forgets(store: Store) -> None:
    before = store.fingerprint()
    session = store.session("one")
    session.execute("WATCH", "k")
    session.execute("MULTI")
    assert store.fingerprint() != before
    session.close()
    assert store.fingerprint() == before


def test_unnamed_sessions_are_different_connections(store: Store) -> None:
    one, other = store.session(), store.session()
    one.execute("MULTI")
    assert other.execute("PING") == "PONG"


def test_a_transaction_needs_a_connection(store: Store) -> None:
    reply = store.execute("MULTI")
    assert isinstance(reply, ReplyError)
    assert "session" in reply.message


def test_each_store_knows_only_the_scripts_that_it_was_given(store: Store) -> None:
    digest = store.execute("SCRIPT", "LOAD", "return ARGV[1]")
    assert isinstance(digest, bytes)
    assert store.execute("EVALSHA", digest.upper(), 0, "x") == b"x"
    stranger = Store().execute("EVALSHA", digest, 0, "x")
    assert isinstance(stranger, ReplyError)
    assert stranger.code == "NOSCRIPT"
    store.execute("SCRIPT", "FLUSH")
    assert store.execute("SCRIPT", "EXISTS", digest) == [0]


def test_a_script_works_on_the_store_that_runs_it(store: Store) -> None:
    source = "return redis.call('incr', KEYS[1])"
    twin = store.copy()
    assert [each.execute("EVAL", source, 1, "k") for each in (store, twin, store)] == [1, 1, 2]


@pytest.mark.parametrize("name", ["io", "os", "require", "loadstring", "python", "debug", "getfenv", "rawset"])
def test_scripts_see_nothing_of_the_world_outside(store: Store, name: str) -> None:
    assert isinstance(store.execute("EVAL", f"return {name}", 0), ReplyError)


def test_scripts_cannot_leave_anything_to_one_another(store: Store) -> None:
    for source in ("x = 1", "string.x = 1", "redis.x = 1", "KEYS.x = 1 redis.call('x')"):
        assert isinstance(store.execute("EVAL", source, 0), ReplyError)
    assert store.execute("EVAL", "return {KEYS.x or 0, string.x or 0, redis.x or 0}", 0) == [0, 0, 0]


def test_no_script_hides_a_fault_of_the_lab(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Store, __: bytes) -> None:
        raise KeyError("a bug in a command")

    monkeypatch.setitem(COMMANDS, b"get", replace(COMMANDS[b"get"], run=broken))
    for source in ("redis.call('get', 'k')", "redis.pcall('get', 'k')", "pcall(redis.call, 'get', 'k') return 1"):
        with pytest.raises(KeyError, match="a bug in a command"):
            store.execute("EVAL", source, 0)
    assert store.execute("EVAL", "return 1", 0) == 1


def test_without_memory_what_grows_is_refused_and_what_frees_works(store: Store) -> None:
    store.execute("SET", "k", 1)
    store.oom = True
    reply = store.execute("SET", "k", 2)
    assert isinstance(reply, ReplyError)
    assert reply.code == "OOM"
    assert store.copy().oom
    assert store.execute("PEXPIRE", "k", 1000) == 1
    assert store.execute("DEL", "k") == 1


@pytest.mark.parametrize(
    ("number", "written"),
    [(1.79e15, b"1790000000000000"), (0.1, b"0.1"), (1e-7, b"1e-7"), (1e20, b"1e+20"), (3, b"3"), (-2.5, b"-2.5")],
)
def test_numbers_are_written_as_the_server_writes_them(number: float, written: bytes) -> None:
    assert format_number(number) == written
