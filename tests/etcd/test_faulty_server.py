"""A server behind etcd:// that is broken or hostile: a call ends in time, and its error says what was sent."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.engines.redis.protocol import LONGEST_REPLY
from tests.etcd.faulty_server import Fault, FaultyServer, always, dribble, endless, is_whole_http
from tests.fleet_etcd import EtcdFleet, coded
from tests.support import eventually, took

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def faulty(fleet: EtcdFleet) -> Iterator[FaultyServer]:
    with FaultyServer(fleet.members[0].client_port, is_whole_http) as faulty:
        yield faulty


def url_of(faulty: FaultyServer, user: str = "") -> str:
    return f"etcd://{user}127.0.0.1:{faulty.port}"


def http(body: bytes, head: bytes = OK) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def path_of(request: bytes) -> str:
    return request.split(b" ", 2)[1].decode()


def only(path: str, fault: Fault) -> Fault:
    """This fault, for requests to that path only."""
    return lambda client, request: path_of(request).endswith(path) and fault(client, request)


def must_recover(client: Any, faulty: FaultyServer) -> None:
    faulty.heal()
    client.lock("x", wait=20).acquire().release()
    faulty.check_no_reuse()


DRIBBLES = {
    "in the body": dribble(CHUNKED, b"1\r\nx\r\n"),
    "in a header": dribble(OK + b"X-Slow: ", b"x"),
    "of interim replies": dribble(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("where", DRIBBLES)
def test_a_call_ends_in_time_although_bytes_keep_coming(faulty: FaultyServer, connect: Any, where: str) -> None:
    client = connect(url_of(faulty), timeout=1.0)
    faulty.fault = DRIBBLES[where]
    with took(less_than=6.0), pytest.raises(holdfast.Unavailable, match="it did not answer within"):
        client.lock("x").acquire(timeout=1.0)
    must_recover(client, faulty)


def test_a_reply_without_end_is_given_up_at_the_limit(faulty: FaultyServer, connect: Any) -> None:
    client = connect(url_of(faulty), timeout=30.0)
    part = b"%x\r\n%s\r\n" % (2**20, b"x" * 2**20)
    faulty.fault = endless(CHUNKED, part, 4 * LONGEST_REPLY)
    with pytest.raises(holdfast.Unavailable, match=r"it sent a reply of more than 65 MiB\. Check that an etcd server"):
        client.lock("x").acquire(blocking=False)
    must_recover(client, faulty)


BAD_REPLIES = {
    "nested deeply": b"[" * 200_000,
    "nested deeply in a number": b'{"header":{"revision":' + b"[" * 3000 + b"]" * 3000 + b"}}",
    "infinite": b'{"header":{"revision":Infinity},"succeeded":true,"ID":Infinity,"TTL":Infinity}',
    "too large for a double": b'{"ID":"1","TTL":1e400}',
    "too large for etcd": b'{"ID":"1","TTL":"1%s"}' % (b"0" * 400),
    "a lease without an ID": b'{"TTL":"10"}',
    "a list": b"[]",
    "empty": b"",
}


@pytest.mark.parametrize("what", BAD_REPLIES)
def test_a_body_that_etcd_would_not_send(faulty: FaultyServer, connect: Any, what: str) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    faulty.fault = only("/lease/grant", always(http(BAD_REPLIES[what])))
    with pytest.raises(holdfast.Unavailable, match="it sent something that is no reply of etcd"):
        client.lock("x").acquire(timeout=0.5)
    must_recover(client, faulty)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x15\x03\x01\x00\x02\x02\x46\r\n\r\n",
        OK + b"Content-Length: %s\r\n\r\n{}" % (b"9" * 5000),
        CHUNKED + b"zz\r\n",
        http(b"\x1f\x8b\x08" + b"x" * 40, OK + b"Content-Encoding: gzip\r\n"),
    ],
    ids=["TLS", "content-length", "chunks", "gzip"],
)
def test_bytes_that_are_no_answer_of_etcd(faulty: FaultyServer, connect: Any, answer: bytes) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    faulty.fault = always(answer)
    with pytest.raises(holdfast.Unavailable, match="it sent something that is no reply of etcd"):
        client.lock("x").acquire(timeout=0.5)
    must_recover(client, faulty)


def test_an_error_reply_that_is_nested_deeply(faulty: FaultyServer, connect: Any) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    faulty.fault = always(http(b"[" * 30_000, b"HTTP/1.1 503 Service Unavailable\r\n"))
    with pytest.raises(holdfast.Unavailable, match="it answered with HTTP status 503"):
        client.lock("x").acquire(timeout=0.5)
    faulty.heal()
    client.lock("x", wait=20).acquire().release()


@pytest.mark.parametrize("token", ["é", "a\r\nb: c", 5, "", "x" * 100_000], ids=repr)
def test_a_token_that_is_no_header(faulty: FaultyServer, connect: Any, token: object) -> None:
    client = connect(url_of(faulty, "app:secret@"), timeout=0.5)
    faulty.fault = always(http(json.dumps({"token": token}).encode()))
    with pytest.raises(holdfast.Unavailable, match="it sent something that is no reply of etcd"):
        client.lock("x").acquire(timeout=0.5)


def agree_without_effect(client: socket.socket, request: bytes) -> bool:
    """A well-formed answer that contradicts itself: the intent was written, and its queue is empty."""
    if not path_of(request).endswith("/kv/txn"):
        return False
    operations = json.loads(request.partition(b"\r\n\r\n")[2])["success"]
    answers: list[Any] = [{next(iter(each)).replace("request", "response"): {}} for each in operations]
    content = {"header": {"revision": "7"}, "succeeded": True, "responses": answers}
    client.sendall(http(json.dumps(content).encode()))
    return True


def test_answers_that_do_not_fit_together(faulty: FaultyServer, connect: Any) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    faulty.fault = agree_without_effect
    with pytest.raises(holdfast.Unavailable, match="it sent something that is no reply of etcd"):
        client.lock("x").acquire(timeout=0.5)
    faulty.heal()
    client.lock("x", wait=20).acquire().release()


def test_a_value_that_is_nested_deeply(fleet: EtcdFleet, connect: Any) -> None:
    """Another client of etcd has written it; the server is honest."""
    fleet.ask("/v3/kv/put", {"key": coded("x:hf1:intent:lock:other"), "value": coded("[" * 100_000)})
    with pytest.raises(holdfast.HoldfastError) as caught, connect(fleet.url, timeout=0.5).lock("x", wait=0.5):
        pass
    assert "closed" not in str(caught.value)


WATCHES = {
    "nested deeply": always(http(b"[" * 200_000 + b"\n")),
    "infinite": always(http(b'{"result":{"compact_revision":Infinity}}\n')),
    "a line without end": endless(CHUNKED, b"%x\r\n%s\r\n" % (2**16, b"x" * 2**16), 2 * LONGEST_REPLY),
}


@pytest.mark.parametrize("what", WATCHES)
def test_a_watch_that_sends_nonsense_costs_a_waiter_nothing(
    faulty: FaultyServer, connect: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.fault = only("/watch", WATCHES[what])
    holder, waiter = connect(url_of(faulty)), connect(url_of(faulty))
    acquired = threading.Event()

    def wait() -> None:
        with waiter.lock("x", wait=60):
            acquired.set()

    thread = threading.Thread(target=wait, daemon=True)
    with holder.lock("x"):
        thread.start()
        eventually(lambda: faulty.answered, 20.0, "a watch was answered, or given up")
    assert acquired.wait(20.0)
    thread.join()
    gc.collect()  # asyncio logs the error of a task when the task is collected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_line_of_a_watch_has_a_limit(faulty: FaultyServer, connect: Any) -> None:
    sent: list[int] = []

    def fault(client: socket.socket, request: bytes) -> bool:
        client.sendall(CHUNKED)
        for number in range(LONGEST_REPLY // 2**16):
            sent.append(number)
            client.sendall(b"%x\r\n%s\r\n" % (2**16, b"x" * 2**16))
        return True

    faulty.fault = only("/watch", fault)
    client = connect(url_of(faulty))
    with client.lock("x", ttl=60):
        eventually(lambda: faulty.answered, 20.0, "the client gives up the watch")
        assert max(sent) < LONGEST_REPLY // 2**16 - 1, "it has not read all of it"


def test_a_member_that_sends_nonsense_is_left_for_the_next(
    fleet: EtcdFleet, faulty: FaultyServer, connect: Any
) -> None:
    faulty.fault = always(http(b"{}"))
    client = connect(f"{url_of(faulty)},127.0.0.1:{fleet.members[1].client_port}")
    client.lock("x", wait=20).acquire().release()
    assert len(faulty.answered) == 1
