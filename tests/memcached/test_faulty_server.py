"""A server behind memcached:// that is broken or hostile: a call ends in time, and its error says what was sent."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

import holdfast
import holdfast.blocking
from holdfast.engines.redis.protocol import LONGEST_REPLY
from tests.etcd.faulty_server import Fault, FaultyServer, always, dribble, endless
from tests.server_memcached import MemcachedServer
from tests.support import eventually, took


def url_of(faulty: FaultyServer) -> str:
    return f"memcached://127.0.0.1:{faulty.port}"


def only(command: bytes, fault: Fault) -> Fault:
    """This fault, for that command only."""
    return lambda client, request: request.startswith(command + b" ") and fault(client, request)


def must_recover(client: Any, faulty: FaultyServer) -> None:
    faulty.heal()
    client.lock("x", wait=20).acquire().release()
    faulty.check_no_reuse()


@pytest.mark.parametrize("start", [b"", b"VALUE x 0 1000 1\r\n"], ids=["in a line", "in a value"])
def test_a_call_ends_in_time_although_bytes_keep_coming(faulty: FaultyServer, connect: Any, start: bytes) -> None:
    client = connect(url_of(faulty), timeout=1.0)
    refuses, dribbles = only(b"add", always(b"NOT_STORED\r\n")), only(b"gets", dribble(start, b"x"))
    faulty.fault = lambda client, request: refuses(client, request) or dribbles(client, request)
    with took(less_than=6.0), pytest.raises(holdfast.Unavailable, match="it did not answer within"):
        client.lock("x").acquire(timeout=1.0)
    must_recover(client, faulty)


def test_a_reply_without_end_is_given_up_at_the_limit(faulty: FaultyServer, connect: Any) -> None:
    client = connect(url_of(faulty), timeout=30.0)
    faulty.fault = endless(b"", b"x" * 2**20, 4 * LONGEST_REPLY)
    with pytest.raises(holdfast.Unavailable, match=r"it sent a reply of more than 65 MiB\. Check that a memcached"):
        client.lock("x").acquire(blocking=False)
    must_recover(client, faulty)


BAD_VALUES = {
    "no number of bytes": b"VALUE x 0 abc 1\r\nfoo\r\nEND\r\n",
    "less than no bytes": b"VALUE x 0 -3 1\r\nfoo\r\nEND\r\n",
    "a short line": b"VALUE x\r\nEND\r\n",
    "another key": b"VALUE y 0 3 1\r\nfoo\r\nEND\r\n",
    "no number as cas": b"VALUE x 0 3 zz\r\nfoo\r\nEND\r\n",
    "no number as flags": b"VALUE x zz 3 1\r\nfoo\r\nEND\r\n",
    "a wrong number of bytes": b"VALUE x 0 1 1\r\nfoo and more\r\nEND\r\n",
    "an error that is none": b"ERROR\r\n",
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_a_value_that_memcached_would_not_send(faulty: FaultyServer, connect: Any, what: str) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    refuses, answers = only(b"add", always(b"NOT_STORED\r\n")), only(b"gets", always(BAD_VALUES[what]))
    faulty.fault = lambda client, request: refuses(client, request) or answers(client, request)
    with pytest.raises(holdfast.Unavailable, match="it sent something that is no reply of memcached"):
        client.lock("x").acquire(timeout=0.5)
    must_recover(client, faulty)


@pytest.mark.parametrize("line", [b"\xff\xfe", b"", b"STORED later", b"HTTP/1.1 400 Bad Request"], ids=repr)
def test_a_line_that_memcached_would_not_send(faulty: FaultyServer, connect: Any, line: bytes) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    faulty.fault = always(line + b"\r\n")
    with pytest.raises(holdfast.Unavailable, match="it sent something that is no reply of memcached"):
        client.lock("x").acquire(timeout=0.5)
    must_recover(client, faulty)


def test_a_release_that_gets_nonsense_does_not_say_that_the_lease_was_lost(faulty: FaultyServer, connect: Any) -> None:
    lease = connect(url_of(faulty), timeout=0.5).lock("x", ttl=30).acquire()
    faulty.fault = only(b"md", always(b"\xff\xfe\r\n"))
    with pytest.raises(holdfast.OutcomeUnknown):
        lease.release()


def test_a_reply_that_comes_in_two_parts_is_put_together(faulty: FaultyServer, connect: Any) -> None:
    def slowly(client: socket.socket, request: bytes) -> bool:
        for part in (b"H", b"D\r", b"\n"):
            client.sendall(part)
            time.sleep(0.1)
        return True

    lease = connect(url_of(faulty)).lock("x", ttl=30).acquire()
    faulty.fault = only(b"md", slowly)
    lease.release()  # else LeaseLost


def test_a_surplus_reply_is_not_taken_for_that_of_the_next_command(
    faulty: FaultyServer, connect: Any, memcached: MemcachedServer
) -> None:
    client = connect(url_of(faulty))

    def twice(near: socket.socket, request: bytes) -> bool:
        near.sendall(b"END\r\n")
        time.sleep(0.1)
        near.sendall(b"STORED\r\n")
        return True

    faulty.fault = only(b"gets", twice)
    assert not client.lock("other").locked()
    faulty.heal()
    memcached.client().call("set", "x", "another holder", 30, noreply=False)
    assert client.lock("x").acquire(blocking=False) is None


def test_a_connection_that_ends_without_a_reply_is_called_lost(faulty: FaultyServer, connect: Any) -> None:
    def hang_up(client: socket.socket, request: bytes) -> bool:
        client.shutdown(socket.SHUT_RDWR)
        return True

    client = connect(url_of(faulty), timeout=0.5)
    faulty.fault = hang_up
    with pytest.raises(holdfast.Unavailable, match="the connection was lost"):
        client.lock("x").acquire(timeout=0.5)
    must_recover(client, faulty)


def test_what_an_error_reply_says_is_shown(faulty: FaultyServer, connect: Any) -> None:
    faulty.fault = always(b"SERVER_ERROR temporary failure\r\n")
    with pytest.raises(holdfast.Unavailable, match=r"it answered: temporary failure\. See its log"):
        connect(url_of(faulty), timeout=0.5).lock("x").acquire(timeout=0.5)


def fill(server: MemcachedServer) -> None:
    """Fill a memcached that evicts nothing, for items of each size that a lock may have."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as replies:
        number = 0
        for size in (20, 40, 60, 100, 130, 220):
            reply = b"STORED"
            while b"out of memory" not in reply:
                connection.sendall(b"set fill%d 0 0 %d\r\n%s\r\n" % (number, size, b"x" * size))
                reply = replies.readline()
                number += 1


def test_a_full_memcached_is_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    with (
        MemcachedServer("-M", "-m", "2", "-I", "1m", "-o", "slab_automove=0,no_lru_maintainer") as full,
        holdfast.connect(full.url) as client,
    ):
        with client.lock("warm"):
            pass
        fill(full)
        until = time.monotonic() + 6.0  # the clean-ups of the first calls are over by then
        while time.monotonic() < until:
            with pytest.raises(holdfast.Unavailable, match="out of memory"):
                client.lock("a", ttl=0.5, wait=5).acquire(timeout=5)
            time.sleep(0.2)
        assert not [record for record in caplog.records if "is back" in record.getMessage()]
        full.client().flushall()
        eventually(lambda: acquired(client), 10.0, "locks are taken again")
        assert [record for record in caplog.records if "is back" in record.getMessage()]


def acquired(client: holdfast.blocking.Client) -> bool:
    try:
        with client.lock("a", wait=5):
            return True
    except holdfast.Unavailable:
        return False
