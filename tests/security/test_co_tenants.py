"""What another user of the same server can and cannot do to a lock, as SECURITY.md says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import eventually

LOCKS = (
    *(
        "+evalsha",
        "+eval",
        "+get",
        "+set",
        "+del",
        "+exists",
        "+pexpire",
        "+pttl",
        "+time",
        "+zadd",
        "+zrange",
        "+zrem",
    ),
    *("+zscore", "+hget", "+hset", "+hdel", "+zcard", "+zcount", "+subscribe", "+publish", "+pubsub|numsub"),
    *("+client|tracking", "+client|caching"),
)
QUEUE, WAITERS = "job:hf1:queue:{job}", "job:hf1:waiters:{job}"
FORGED = f"forged.{'a' * 32}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.client().flushall()
    return shared


def tenant(server: Server, *rules: str, name: str = "tenant") -> Any:
    server.client().execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rules)
    return server.client(username=name, password="pw")


def only_waiter(server: Server) -> tuple[str, str]:
    """Its token and its channel."""
    admin: Any = server.client()
    return admin.zrange(QUEUE, 0, -1)[0].decode(), admin.pubsub_channels()[0].decode()


def now_us(server: Server) -> int:
    seconds, micros = server.client().time()
    return int(seconds) * 1_000_000 + int(micros)


class Waiter:
    """A client that waits for the lock in a thread."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client = holdfast.connect(url, **options)
        self.lease: holdfast.Lease | None = None
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()

    def _wait(self) -> None:
        self.lease = self.client.lock("job").acquire(timeout=20)

    def __enter__(self) -> Waiter:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join()
        self.client.close()


def test_a_user_per_namespace_keeps_tenants_apart(server: Server) -> None:
    for name in "ab":
        tenant(server, f"~{name}:*", "resetchannels", f"&{name}:holdfast:bell:*", *LOCKS, name=name)
    other = server.client(username="b", password="pw")
    url = server.url.replace("//", "//a:pw@")
    with holdfast.connect(url, namespace="a:") as client, client.lock("job") as lease:
        with Waiter(url, namespace="a:") as waiter:
            eventually(lambda: server.client().zcard("a:job:hf1:queue:{a:job}"))
            attempts: list[Callable[[], object]] = [
                lambda: other.get("a:job"),
                lambda: other.set("a:job", "x"),
                lambda: other.delete("a:job"),
                lambda: other.zadd("a:job:hf1:queue:{a:job}", {FORGED: 1}),
                lambda: other.zrange("a:job:hf1:queue:{a:job}", 0, -1),
                lambda: other.eval("return redis.call('GET', 'a:job')", 0),
                lambda: other.publish("a:holdfast:bell:0", "x"),
                lambda: other.execute_command("PUBSUB", "CHANNELS"),
                lambda: other.execute_command("MONITOR"),
                lambda: other.execute_command("SCAN", "0"),
                other.flushall,
            ]
            for attempt in attempts:
                with pytest.raises(redis.ResponseError, match="(?i)no permissions"):
                    attempt()
            assert lease.held
            lease.release()
        assert waiter.lease is not None


def test_a_token_is_a_capability(server: Server) -> None:
    """Any client that knows it can release the lock; the holder is told."""
    with holdfast.connect(server.url) as client:
        lease = client.lock("job").acquire()
        thief = server.client().lock("job")
        thief.local.token = server.client().get("job")
        thief.release()
        assert lease.lost.wait(10)
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_forged_queue_entries_delay_a_mutex_and_let_no_second_holder_in(server: Server) -> None:
    writer = tenant(server, "~*", "resetchannels", "+zadd", "+hset")
    with pytest.raises(redis.ResponseError):
        writer.set("job", "x")
    with holdfast.connect(server.url) as client:
        lease = client.lock("job").acquire()
        for key in ("job", "job:hf1:fence:{job}"):
            with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                writer.zadd(key, {"x": 1})
        with Waiter(server.url) as waiter:
            eventually(lambda: server.client().zcard(QUEUE))
            _, channel = only_waiter(server)
            writer.zadd(QUEUE, {FORGED: 1})
            writer.hset(WAITERS, FORGED, f"{now_us(server)} 2000 3600000 1 0 {channel}")
            assert lease.held
            assert waiter.lease is None
            lease.release()
            # The forged waiter may get it now, for the ttl that the entry names; no client believes to hold it.
        assert waiter.lease is not None


def test_publishing_without_a_token_does_nothing(server: Server) -> None:
    publisher = tenant(server, "allchannels", "+publish")
    with holdfast.connect(server.url) as client, client.lock("job") as lease, Waiter(server.url) as waiter:
        eventually(lambda: server.client().zcard(QUEUE))
        channel = server.client().pubsub_channels()[0]
        for message in (
            "",
            "x",
            f"{FORGED} 9 {now_us(server)} -1",
            f"{lease.token} 9 {now_us(server)} -1",
            "* ask 1 0",
        ):
            assert publisher.publish(channel, message) == 1
        waiter.thread.join(0.5)
        assert waiter.lease is None
        assert lease.held
        lease.release()


def test_publishing_with_a_waiters_token_is_found_out_by_its_keeper(server: Server) -> None:
    """Until then two believe to hold the lock: so keep channels and tokens from other tenants."""
    publisher = tenant(server, "allchannels", "+publish")
    with holdfast.connect(server.url) as client, client.lock("job") as lease, Waiter(server.url) as waiter:
        eventually(lambda: server.client().zcard(QUEUE))

        def forge() -> bool:
            """A notification that comes before the waiter has subscribed, or late, is not accepted."""
            token, channel = only_waiter(server)
            publisher.publish(channel, f"{token} {lease.fence + 1} {now_us(server)} -1")
            waiter.thread.join(1.0)
            return waiter.lease is not None

        eventually(forge, timeout=15.0)
        assert waiter.lease is not None
        assert waiter.lease.lost.wait(10)
        with pytest.raises(holdfast.LeaseLost):
            waiter.lease.release()
        assert lease.held
