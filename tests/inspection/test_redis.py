"""Inspection and breaks on a real server: long queues, stopped processes, full servers, restricted users."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import redis

import holdfast
from holdfast.engines.capabilities import ENGINES
from holdfast.lua import SCRIPTS
from holdfast.names import keys_of
from holdfast.protocol.inspection.reading import keys_read
from tests.contention.support import OldServer
from tests.servers import Server
from tests.support import Script, eventually

QUEUE, WAITERS = keys_of("k").shared[2:]


def fill_queue(admin: redis.Redis, count: int) -> None:
    """That many waiters, of processes that have just asked."""
    seconds, micros = admin.time()
    now_us = int(seconds) * 10**6 + int(micros) + 900_000  # they stay present for nearly two seconds
    for start in range(0, count, 10_000):
        tokens = [f"host-{number}.{number:032x}" for number in range(start, min(count, start + 10_000))]
        pipe = admin.pipeline()
        pipe.zadd(QUEUE, {token: now_us - 10**6 + start + place for place, token in enumerate(tokens)})
        pipe.hset(WAITERS, mapping=dict.fromkeys(tokens, f"{now_us} 30000 3600000 64 0 -"))
        pipe.execute()


def test_of_a_long_queue_the_first_are_shown_and_all_are_counted(admin: redis.Redis, client: holdfast.Client) -> None:
    with client.lock("k"):
        fill_queue(admin, 2000)
        info = client.inspect("k", limit=250)
        assert info is not None
        assert info.waiter_count == 2000
        assert [waiter.pid for waiter in info.waiters] == list(range(300))  # whole pages
        first = client.inspect("k")
        assert first is not None
        assert len(first.waiters) == 100


def test_one_step_reads_a_page_at_most(admin: redis.Redis, client: holdfast.Client) -> None:
    fill_queue(admin, 2000)
    keys = keys_read(keys_of("k"))
    reply: Any = admin.eval(SCRIPTS["inspect_lock"].source.decode(), len(keys), *keys, "0", "100000")
    assert len(reply[4]) == 1 + 3 * 100


def test_locks_are_found_by_scans_and_never_by_keys(admin: redis.Redis, client: holdfast.Client) -> None:
    pipe = admin.pipeline()
    for number in range(20_000):
        pipe.set(f"other:{number}", "x")
    pipe.execute()
    before = admin.info("commandstats")
    leases = [client.lock(f"order:{number}").acquire() for number in range(30)]
    found = client.locks()
    assert {info.name for info in found} == {f"order:{number}" for number in range(30)}
    assert found.scanned >= 20_000
    after = admin.info("commandstats")
    assert after.get("cmdstat_keys") == before.get("cmdstat_keys")
    scans = after["cmdstat_scan"]["calls"] - before.get("cmdstat_scan", {"calls": 0})["calls"]
    assert scans >= 20, "a scan in few parts is one that blocks the server"
    for lease in leases:
        assert lease is not None
        lease.release()


def test_a_stopped_holder_is_broken_and_told_when_it_goes_on(url: str, client: holdfast.Client) -> None:
    with Script(
        """
        client = holdfast.connect(url)
        lease = client.lock("k", ttl=30, label="stuck").acquire()
        say(lease.fence)
        lease.lost.wait()
        say(lease.reason)
        try:
            lease.release()
        except holdfast.LeaseLost:
            say("told")
        client.close()
        """,
        url,
    ) as holder:
        fence = int(holder.hear())
        time.sleep(0.3)  # from now on the server reports writes to the key
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            info = client.inspect("k")
            assert info is not None
            assert (info.holders[0].fence, info.holders[0].pid) == (fence, holder.pid)
            client.break_lock("k", fence=fence, reason="the job is stuck")
            with client.lock("k", wait=0) as lease:
                assert lease.fence > fence
        finally:
            os.kill(holder.pid, signal.SIGCONT)
        assert holder.hear().endswith(": the job is stuck")
        assert holder.hear() == "told"


def test_a_holder_is_told_by_its_next_renewal_where_the_server_reports_no_writes() -> None:
    with OldServer() as server, holdfast.connect(server.url) as client, holdfast.connect(server.url) as operator:
        lease = client.lock("k", ttl=3).acquire()
        assert lease is not None
        operator.break_lock("k", fence=lease.fence, reason="it is stuck")
        assert lease.lost.wait(5)
        assert lease.reason.endswith(": it is stuck")
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_full_server_can_be_told_to_break(admin: redis.Redis, client: holdfast.Client, kind: str) -> None:
    lock = client.lock("k") if kind == "lock" else client.semaphore("k", 1)
    lease = lock.acquire()
    assert lease is not None
    for script in ("inspect_lock", "break_lock", "break_permit"):
        admin.script_load(SCRIPTS[script].source)
    admin.config_set("maxmemory", "1")
    admin.config_set("maxmemory-policy", "noeviction")
    try:
        client.break_lock("k", fence=lease.fence, reason="it is stuck")
        assert client.inspect("k") is None
    finally:
        admin.config_set("maxmemory", "0")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_an_inspector_that_may_not_read_is_told_so(server: Server, admin: redis.Redis) -> None:
    admin.acl_setuser(
        "inspector", enabled=True, passwords=["+x"], keys=["*"], commands=["+eval", "+evalsha", "+time", "+scan"]
    )
    try:
        with holdfast.connect(f"redis://inspector:x@127.0.0.1:{server.port}/0") as client:
            with pytest.raises(holdfast.HoldfastError, match=r"(?i)perm|allow|acl"):
                client.inspect("k")
    finally:
        admin.acl_deluser("inspector")


def test_a_break_races_with_a_release_and_ends_no_later_hold(url: str) -> None:
    """The operator has seen one hold; by the time of its break, another client may have the lock."""
    with holdfast.connect(url) as client, holdfast.connect(url) as operator:
        lost: list[int] = []
        seen: list[int] = []
        refused: list[str] = []  # broken before its caller knew that it had the lock
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    lease = client.lock("k", cohort=0).acquire()
                except holdfast.NotAcquired as error:
                    refused.append(error.reason)
                    continue
                seen.append(lease.fence)
                try:
                    lease.release()
                except holdfast.LeaseLost:
                    lost.append(lease.fence)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        broken: list[int] = []
        try:
            while len(broken) < 20:
                info = operator.inspect("k")
                if info is None or not info.holders or info.holders[0].fence is None:
                    continue
                try:
                    operator.break_lock("k", fence=info.holders[0].fence, reason="a race")
                    broken.append(info.holders[0].fence)
                except holdfast.NotHeld:
                    pass
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert set(lost) <= set(broken), "no other hold was lost"
        assert len(lost) + len(refused) == len(broken), "each hold that was broken was told"
        assert all("a race" in reason for reason in refused)
        assert len(seen) == len(set(seen))


def test_only_the_broken_name_of_several_is_free_until_the_holder_notices(client: holdfast.Client, url: str) -> None:
    with holdfast.connect(url) as other:
        lease = other.lock("a", "b").acquire()
        assert lease is not None
        client.break_lock("a", fence=lease.fences["a"], reason="it is stuck")
        assert client.inspect("a") is None
        eventually(lease.lost.is_set)
        with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
            lease.release()
        assert client.inspect("b") is None


def test_an_engine_that_does_not_offer_it_says_which_does(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(ENGINES["redis"], features=ENGINES["redis"].features - {"inspect", "locks", "break_lock"})
    monkeypatch.setitem(ENGINES, "redis", lacking)
    with holdfast.connect(url) as client:
        for act in (
            lambda: client.inspect("k"),
            client.locks,
            lambda: client.break_lock("k", fence=1, reason="why"),
            lambda: client.history("k"),
        ):
            with pytest.raises(holdfast.Unsupported, match=r"use .*redis\+cluster://"):
                act()
