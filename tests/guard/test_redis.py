"""Guarded writes to Redis, on both faces."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path

import pytest
import redis
import redis.asyncio

import holdfast
from holdfast import guard
from holdfast.guard import Stamp
from holdfast.guard.redis import COMMANDS
from holdfast.names import keys_of
from tests.servers import Server, free_port
from tests.support import as_bytes, asyncio_test, eventually

OLD, NEW = Stamp("x", 7, "a"), Stamp("x", 8, "b")


@pytest.fixture
def guarded(admin: redis.Redis) -> guard.RedisGuard:
    return guard.RedisGuard(admin)


def test_the_usual_writes(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    guarded.set("text", "one", OLD)
    assert admin.get("text") == b"one"
    assert admin.ttl("text") == -1
    guarded.set("text", b"\xff two", OLD, ttl=60)
    assert admin.get("text") == b"\xff two"
    assert 0 < admin.ttl("text") <= 60
    assert guarded.execute("hset", "hash", "a", 1, "b", 2.5, lease=OLD) == 2
    assert admin.hgetall("hash") == {b"a": b"1", b"b": b"2.5"}
    assert guarded.execute("INCR", "count", lease=OLD) == 1
    assert guarded.execute("RPUSH", "list", *range(4000), lease=OLD) == 4000
    assert guarded.execute("SET", "text", "three", "NX", lease=OLD) is None
    assert guarded.delete("text", OLD) is True
    assert guarded.delete("text", OLD) is False


def test_what_was_deleted_is_still_guarded(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    guarded.set("text", "one", NEW)
    guarded.delete("text", NEW)
    for write in (lambda: guarded.set("text", "stale", OLD), lambda: guarded.delete("text", OLD)):
        with pytest.raises(holdfast.StaleFence):
            write()
    assert not admin.exists("text")


def test_each_key_has_a_fence_of_its_own(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    guarded.set("a", "new", NEW)
    guarded.set("b", "old", OLD)
    assert admin.get("b") == b"old"


def test_a_command_that_fails_raises_the_fence_and_writes_nothing(
    guarded: guard.RedisGuard, admin: redis.Redis
) -> None:
    admin.rpush("list", "x")
    with pytest.raises(redis.ResponseError):
        guarded.execute("INCR", "list", lease=NEW)
    with pytest.raises(holdfast.StaleFence):
        guarded.execute("RPUSH", "list", "stale", lease=OLD)
    assert admin.lrange("list", 0, -1) == [b"x"]


def test_a_full_server_takes_neither_fence_nor_data(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    guarded.set("a", "old", OLD)
    admin.config_set("maxmemory", 1)
    with pytest.raises(redis.ResponseError):
        guarded.set("a", "new", NEW)
    admin.config_set("maxmemory", 0)
    assert admin.get("a") == b"old"
    guarded.set("a", "again", OLD)


def test_a_lock_is_not_overwritten(client: holdfast.Client, guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    with client.lock("order:42") as lease:
        with pytest.raises(holdfast.InvalidConfig, match="it is a lock"):
            guarded.set("order:42", "paid", lease)
        assert admin.get("order:42") == lease.token.encode()
        guarded.set("state:42", "paid", lease)


def test_only_writes_of_one_key_can_be_guarded(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    for command in ("RENAME", "EVAL", "FLUSHALL", "GET", "MSET", "SUNIONSTORE", "BLPOP"):
        with pytest.raises(holdfast.Unsupported, match="a write of one key"):
            guarded.execute(command, "a", "b", lease=OLD)
    with pytest.raises(holdfast.InvalidConfig):
        guarded.execute("DEL", "a", "b", lease=OLD)
    with pytest.raises(holdfast.InvalidConfig):
        guarded.execute("RPUSH", "a", *range(4001), lease=OLD)
    assert admin.dbsize() == 0


def test_the_commands_are_writes_whose_first_argument_is_their_only_key(admin: redis.Redis) -> None:
    """As the server itself sees them. DEL and UNLINK may have more keys, but not here."""
    for name, _, flags, first, last, *_ in admin.execute_command("COMMAND INFO", *COMMANDS):
        assert b"write" in flags, name
        assert first == 1, name
        assert last == (-1 if name in (b"del", b"unlink") else 1), name


@pytest.mark.parametrize("key", ["", "a{}b", "a\nb", "x:hf1:guard:{x}", "a" * 513])
def test_keys_that_can_have_no_side_key_are_refused(guarded: guard.RedisGuard, key: str) -> None:
    with pytest.raises(holdfast.InvalidConfig):
        guarded.set(key, "one", OLD)


@pytest.mark.parametrize("key", ["plain", "with {tag} in it"])
def test_the_record_is_in_the_slot_of_what_it_guards(guarded: guard.RedisGuard, admin: redis.Redis, key: str) -> None:
    guarded.set(key, "one", OLD)
    (record,) = {as_bytes(name).decode() for name in admin.keys("*")} - {key}
    assert record.startswith(f"{key}:hf1:guard")
    assert redis.crc.key_slot(record.encode()) == redis.crc.key_slot(key.encode())
    assert keys_of("plain").shared[1] != record


def test_retention_is_for_how_long_a_fence_is_remembered(admin: redis.Redis) -> None:
    guarded = guard.RedisGuard(admin, retention=50)
    guarded.set("a", "one", NEW)
    assert 0 < admin.pttl("a:hf1:guard:{a}") <= 50_000
    admin.delete("a:hf1:guard:{a}")  # as if that time had passed
    guarded.set("a", "stale", OLD)
    guard.RedisGuard(admin).set("a", "two", NEW)
    assert admin.ttl("a:hf1:guard:{a}") == -1
    for bad in (0, -1, float("nan"), float("inf"), 1e30, True, "5"):
        with pytest.raises(holdfast.InvalidConfig):
            guard.RedisGuard(admin, retention=bad)  # type: ignore[arg-type]
        with pytest.raises(holdfast.InvalidConfig):
            guarded.set("a", "one", NEW, ttl=bad)  # type: ignore[arg-type]


def test_a_record_that_cannot_be_read_is_not_taken_for_none(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    for record in ("", "8", "eight b", "8 ", "0 b", "-5 b", "inf b", "1e18 b", f"{2**53} b", f"{10**18} b"):
        admin.set("a:hf1:guard:{a}", record)
        with pytest.raises(holdfast.InvalidConfig, match="no fence and holder"):
            guarded.set("a", "one", NEW)
        with pytest.raises(holdfast.InvalidConfig, match="no fence and holder"):
            guarded.enter("a", NEW)
    admin.delete("a:hf1:guard:{a}")
    admin.rpush("a:hf1:guard:{a}", "8 b")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        guarded.set("a", "one", NEW)
    assert not admin.exists("a")


def test_a_client_that_decodes_replies_will_do(server: Server) -> None:
    with server.client(decode_responses=True) as client:
        guarded = guard.RedisGuard(client)
        guarded.set("a", "new", NEW)
        with pytest.raises(holdfast.StaleFence) as caught:
            guarded.set("a", "old", OLD)
        assert caught.value.stored == 8


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_versions_of_the_wire_will_do(server: Server, protocol: int) -> None:
    with server.client(protocol=protocol) as client:
        guarded = guard.RedisGuard(client)
        guarded.set("a", "new", NEW)
        with pytest.raises(holdfast.StaleFence):
            guarded.set("a", "old", OLD)


def test_a_server_that_forgot_its_scripts_is_told_again(guarded: guard.RedisGuard, admin: redis.Redis) -> None:
    guarded.set("a", "one", OLD)
    admin.script_flush()
    guarded.set("a", "two", OLD)
    assert admin.get("a") == b"two"


def test_the_docs_say_what_a_user_must_be_allowed(server: Server, admin: redis.Redis) -> None:
    needed = "+evalsha +script|load +get +set +exists"
    assert f"`{needed}`" in (Path(__file__).parent.parent.parent / "docs" / "guard.md").read_text()
    rules = f"on >secret resetkeys ~app:* -@all {needed} +hset".split()
    admin.execute_command("ACL SETUSER", "writer", "reset", *rules)
    admin.script_flush()
    try:
        with server.client(username="writer", password="secret") as client:
            guarded = guard.RedisGuard(client)
            guarded.enter("app:a", NEW)
            assert guarded.execute("HSET", "app:a", "field", "new", lease=NEW) == 1
            with pytest.raises(holdfast.StaleFence):
                guarded.execute("HSET", "app:a", "field", "old", lease=OLD)
    finally:
        admin.execute_command("ACL DELUSER", "writer")


def test_a_pipeline_is_refused(admin: redis.Redis) -> None:
    with admin.pipeline() as pipeline, pytest.raises(holdfast.Unsupported, match="pipeline"):
        guard.RedisGuard(pipeline)


def test_what_is_no_client_of_redis_is_refused(url: str, client: holdfast.Client) -> None:
    for wrong in (url, client, None):
        with pytest.raises(
            holdfast.InvalidConfig, match=rf"of type {type(wrong).__name__}: give a redis\.Redis "
        ) as caught:
            guard.RedisGuard(wrong)  # type: ignore[arg-type]
        assert url not in str(caught.value), "it may have a password"
    with pytest.raises(holdfast.InvalidConfig, match=r"give a redis\.asyncio\.Redis "):
        guard.AioRedisGuard(url)  # type: ignore[arg-type]


def test_writers_that_race_leave_a_list_in_the_order_of_their_fences(server: Server) -> None:
    """Each write that was taken left its fence, so this is the whole history as the server saw it."""
    start = threading.Barrier(8)

    def write(fence: int) -> None:
        with server.client() as client:
            guarded = guard.RedisGuard(client)
            start.wait()
            for _ in range(50):
                try:
                    guarded.execute("RPUSH", "log", fence, lease=Stamp("x", fence, f"holder{fence}"))
                except holdfast.StaleFence:
                    return

    writers = [threading.Thread(target=write, args=(fence,)) for fence in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with server.client() as client:
        log = [int(fence) for fence in client.lrange("log", 0, -1)]
    assert log == sorted(log)
    assert log.count(8) == 50


@asyncio_test
async def test_the_same_under_asyncio(url: str) -> None:
    async with redis.asyncio.Redis.from_url(url) as client, holdfast.aio.connect(url) as locks:
        guarded = guard.AioRedisGuard(client)
        async with locks.lock("x") as lease:
            stale = guard.stamp(lease)
            await guarded.enter("a", lease)
            await guarded.set("a", "one", lease, ttl=60)
        async with locks.lock("x") as lease:
            assert await guarded.execute("APPEND", "a", " two", lease=lease) == 7
            assert await guarded.delete("a", lease) is True
        with pytest.raises(holdfast.StaleFence):
            await guarded.set("a", "stale", stale)
        assert await client.get("a") is None


@asyncio_test
async def test_a_cluster_will_do() -> None:
    with Server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        with server.client() as node:
            node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            eventually(lambda: node.cluster("INFO")["cluster_state"] == "ok")
        with redis.RedisCluster(host="127.0.0.1", port=server.port) as cluster:
            guarded = guard.RedisGuard(cluster)
            for key in ("a", "b", "with {tag} in it"):
                guarded.set(key, "new", NEW)
                with pytest.raises(holdfast.StaleFence):
                    guarded.execute("APPEND", key, "old", lease=OLD)
                assert cluster.get(key) == b"new"
            with pytest.raises(holdfast.Unsupported, match="pipeline"):
                guard.RedisGuard(cluster.pipeline())
        async with redis.asyncio.RedisCluster(host="127.0.0.1", port=server.port) as aio_cluster:
            with pytest.raises(holdfast.StaleFence):
                await guard.AioRedisGuard(aio_cluster).set("a", "old", OLD)
            assert await aio_cluster.get("a") == b"new"


@asyncio_test
async def test_tasks_that_race_are_taken_in_the_order_of_their_fences(url: str) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        guarded = guard.AioRedisGuard(client)
        stamps = [Stamp("x", fence, f"holder{fence}") for fence in (3, 9, 1, 7, 5) * 20]
        await asyncio.gather(
            *(guarded.execute("RPUSH", "log", ours.fence, lease=ours) for ours in stamps), return_exceptions=True
        )
        log = [int(fence) for fence in await client.lrange("log", 0, -1)]
        assert log == sorted(log)
        assert log.count(9) == 20


@asyncio_test
async def test_a_client_of_the_other_face_is_refused(url: str, admin: redis.Redis) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        with pytest.raises(holdfast.InvalidConfig, match=r"guard\.AioRedisGuard"):
            guard.RedisGuard(client)
    with pytest.raises(holdfast.InvalidConfig, match=r"guard\.RedisGuard"):
        guard.AioRedisGuard(admin)


def test_the_two_faces_are_the_same() -> None:
    for name in ("__init__", "enter", "execute", "set", "delete"):
        blocking, aio = getattr(guard.RedisGuard, name), getattr(guard.AioRedisGuard, name)
        assert inspect.signature(blocking) == inspect.signature(aio)
        assert inspect.iscoroutinefunction(aio) == (name != "__init__")
