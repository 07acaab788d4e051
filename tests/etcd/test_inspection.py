"""Inspection and breaks on a real cluster of etcd, beyond what tests/inspection plays on every engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from tests.cli.shell import CLI, PATIENCE_S, environment
from tests.fleet_etcd import EtcdFleet, coded
from tests.support import Script, eventually


@pytest.fixture
def client(fleet: EtcdFleet) -> Iterator[holdfast.Client]:
    with holdfast.connect(fleet.url) as client:
        yield client


@pytest.fixture
def other(fleet: EtcdFleet) -> Iterator[holdfast.Client]:
    with holdfast.connect(fleet.url) as client:
        yield client


def put(fleet: EtcdFleet, key: str | bytes, value: str = "") -> None:
    raw = key.encode() if isinstance(key, str) else key
    fleet.ask("/v3/kv/put", {"key": b64encode(raw).decode(), "value": coded(value)})


def run(fleet: EtcdFleet, *words: str) -> subprocess.CompletedProcess[str]:
    env = environment(HOLDFAST_URL=fleet.url)
    return subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=PATIENCE_S, env=env)


def test_clients_write_their_own_times_and_etcd_says_how_much_is_left(client: holdfast.Client) -> None:
    began = time.time()
    with client.lock("k", ttl=20) as lease:
        info = client.inspect("k")
        assert info is not None
        (holder,) = info.holders
        assert holder.fence == lease.fence
        assert holder.since is not None
        assert began <= holder.since <= info.at <= time.time()
        assert holder.remaining is not None
        assert 15 <= holder.remaining <= 25  # a quarter longer than the ttl


@pytest.mark.parametrize("kind", ["lock", "semaphore", "write"])
def test_a_waiter_shows_how_long_it_waits_and_a_holder_since_when_it_holds(
    client: holdfast.Client, other: holdfast.Client, kind: str
) -> None:
    def make(client: holdfast.Client) -> Any:
        if kind == "write":
            return client.rwlock("k").write
        return client.semaphore("k", permits=1) if kind == "semaphore" else client.lock("k")

    def inspected() -> Any:
        return client.inspect("k")

    with ThreadPoolExecutor() as pool:
        first = make(client).acquire()
        began = time.time()
        second = pool.submit(make(other).acquire)
        (waiter,) = eventually(lambda: inspected().waiters)
        assert 0 <= waiter.waiting <= time.time() - began
        released = time.time()
        first.release()
        lease = second.result(20)
        assert inspected().holders[0].since >= released, "not since it began to wait"
        lease.release()


def test_the_fence_stays_the_same_when_the_key_is_written_again(client: holdfast.Client) -> None:
    with client.lock("k", ttl=3) as lease:
        lease.extend(60)  # binds the key to a longer lease of etcd
        info = client.inspect("k")
        assert info is not None
        assert info.holders[0].fence == lease.fence
        with pytest.raises(holdfast.NotHeld, match="nothing was changed"):
            client.break_lock("k", fence=lease.fence + 1, reason="too late")
        assert lease.held


def test_a_fence_floor_is_in_what_is_shown_and_broken(fleet: EtcdFleet) -> None:
    with holdfast.connect(fleet.url, fence_floor=10**12) as client:
        lease = client.lock("k").acquire()
        broken = client.break_lock("k", fence=lease.fence, reason="it is stuck")
        assert 10**12 < lease.fence < (broken.fence or 0)
        assert [entry.fence for entry in client.history("k")] == [broken.fence]
        with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
            lease.release()


def test_an_intent_of_another_kind_is_neither_a_holder_nor_a_waiter(fleet: EtcdFleet, client: holdfast.Client) -> None:
    """A client that takes the name for a lock of another kind writes an intent, and removes it when it is refused."""
    with client.semaphore("k", 2) as permit:
        put(fleet, "k:hf1:intent:lock:by-hand", "{}")
        info = client.inspect("k")
        assert info is not None
        assert [holder.fence for holder in info.holders] == [permit.fence]
        assert info.waiters == ()


def test_a_break_succeeds_although_etcd_has_lost_the_lease_of_its_tombstones(
    fleet: EtcdFleet, client: holdfast.Client, other: holdfast.Client
) -> None:
    first = client.lock("a", ttl=60).acquire()
    other.break_lock("a", fence=first.fence, reason="it is stuck")
    for found in fleet.ask("/v3/lease/leases", {}).get("leases", []):
        fleet.ask("/v3/lease/revoke", {"ID": found["ID"]})
    second = client.lock("b", ttl=60).acquire()
    other.break_lock("b", fence=second.fence, reason="it is stuck, too")
    assert other.inspect("b") is None
    for lease in (first, second):
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_names_are_listed_in_parts_among_keys_of_other_programs(fleet: EtcdFleet, client: holdfast.Client) -> None:
    for start in range(0, 2500, 100):
        puts = [
            {"request_put": {"key": coded(f"order:other{number:04}"), "value": ""}}
            for number in range(start, start + 100)
        ]
        fleet.ask("/v3/kv/txn", {"success": puts})
    put(fleet, b"order:\xff\xfe", "no text")
    put(fleet, "order:9:hf1:intent:lock:by hand", "no JSON")
    put(fleet, "or\nder:hf1:intent:lock:x", "a name that cannot be one")
    leases = [client.lock(f"order:{name}").acquire() for name in ("1", "2", "z", "é[x]")]
    found = client.locks()
    assert sorted(info.name for info in found) == ["order:1", "order:2", "order:9", "order:z", "order:é[x]"]
    assert found.scanned >= 3000
    for pattern, names in {
        "order:[12]": ["order:1", "order:2"],
        "order:[^1-2]": ["order:9", "order:z"],
        "order:?": ["order:1", "order:2", "order:9", "order:z"],
        "*\\[x\\]": ["order:é[x]"],
        "order:z": ["order:z"],
        "z": [],
    }.items():
        assert sorted(info.name for info in client.locks(pattern)) == names, pattern
    for lease in leases:
        lease.release()


def test_of_a_long_queue_the_first_are_shown_and_all_are_counted(fleet: EtcdFleet, client: holdfast.Client) -> None:
    with client.lock("k") as lease:
        for number in range(230):
            token = f"host-{number}.{number:032x}"
            put(fleet, f"k:hf1:intent:lock:{token}", json.dumps({"token": token}))
        info = client.inspect("k")
        assert info is not None
        assert info.waiter_count == 230
        assert [waiter.pid for waiter in info.waiters] == list(range(100))
        longer = client.inspect("k", limit=300)
        assert longer is not None
        assert [waiter.pid for waiter in longer.waiters] == list(range(230))
        assert [holder.fence for holder in longer.holders] == [lease.fence]


def test_a_break_leaves_no_key_of_the_hold_and_all_others(fleet: EtcdFleet, client: holdfast.Client) -> None:
    permits = [client.semaphore("s", 2).acquire() for _ in range(2)]
    client.break_lock("s", fence=permits[0].fence, reason="it is stuck")
    keys = fleet.client().range("s:hf1:")
    assert not [key for key in keys if permits[0].token in key and ":gone:" not in key]
    assert "s:hf1:slot:0" not in keys
    assert "s:hf1:slot:1" in keys
    assert all("lease" in item for item in keys.values()), "nothing stays for good"
    with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
        permits[0].release()
    permits[1].release()


def test_a_break_frees_all_names_of_a_hold(client: holdfast.Client, other: holdfast.Client) -> None:
    lease = other.lock("a", "b").acquire()
    client.break_lock("b", fence=lease.fence, reason="it is stuck")
    assert [client.inspect(name) for name in "ab"] == [None, None]
    eventually(lease.lost.is_set)
    assert lease.reason.endswith(": it is stuck")
    with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
        lease.release()
    assert len(client.history("b")) == 1


def test_a_stopped_holder_is_broken_and_told_when_it_goes_on(fleet: EtcdFleet, client: holdfast.Client) -> None:
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
        fleet.url,
    ) as holder:
        fence = int(holder.hear())
        time.sleep(0.5)  # from now on its key is watched
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            assert client.break_lock("k", fence=fence, reason="it is stuck").holder.label == "stuck"
            with client.lock("k", wait=0) as mine:
                assert mine.fence > fence
        finally:
            os.kill(holder.pid, signal.SIGCONT)
        assert holder.hear().endswith(": it is stuck")
        assert holder.hear() == "told"


def test_breaks_beside_busy_clients_end_only_what_was_inspected(fleet: EtcdFleet, client: holdfast.Client) -> None:
    lost: list[int] = []
    refused: list[str] = []  # broken before its caller knew that it had the lock
    stop = threading.Event()

    def work() -> None:
        with holdfast.connect(fleet.url) as own:
            while not stop.is_set():
                try:
                    lease = own.lock("k").acquire()
                except holdfast.NotAcquired as error:
                    refused.append(error.reason)
                    continue
                time.sleep(0.002)
                try:
                    lease.release()
                except holdfast.LeaseLost:
                    lost.append(lease.fence)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    broken: list[Any] = []
    try:
        while len(broken) < 20:
            info = client.inspect("k")
            if info is None or not info.holders or info.holders[0].fence is None:
                continue
            try:
                broken.append(client.break_lock("k", fence=info.holders[0].fence, reason="a race").holder.fence)
            except holdfast.NotHeld:
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(lost) <= set(broken), "no other hold was lost"
    assert len(lost) + len(refused) == len(broken), "each hold that was broken was told"
    assert all("a race" in reason for reason in refused)
    assert [entry.holder.fence for entry in client.history("k")] == broken[::-1]


def test_the_shell_finds_explains_and_frees_a_stuck_lock(fleet: EtcdFleet, client: holdfast.Client) -> None:
    lease = client.lock("nightly:report", label="report-builder").acquire()
    listed = run(fleet, "ls")
    assert "nightly:report" in listed.stdout
    assert "report-builder @" in listed.stdout
    shown = run(fleet, "who", "nightly:report")
    assert str(lease.fence) in shown.stdout
    assert "ends in" in shown.stdout
    freed = run(fleet, "break", "nightly:report", "--reason", "it hangs", "--yes")
    assert freed.returncode == 0, freed.stderr
    assert lease.lost.wait(PATIENCE_S)
    assert lease.reason.endswith(": it hangs")
    told = run(fleet, "history", "nightly:report")
    assert "it hangs" in told.stdout
    assert "1970" not in told.stdout
    (entry,) = json.loads(run(fleet, "history", "nightly:report", "--json").stdout)
    assert entry["holder"]["fence"] == lease.fence
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_the_shell_watches_each_break(fleet: EtcdFleet, client: holdfast.Client) -> None:
    command = [*CLI, "watch", "k", "--interval", "0.1", "--json"]
    env = environment(HOLDFAST_URL=fleet.url)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as watching:
        assert watching.stdout is not None
        try:
            assert json.loads(watching.stdout.readline())["event"] == "free"
            for reason in ("first", "second"):
                lease = client.lock("k").acquire()
                client.break_lock("k", fence=lease.fence, reason=reason)
                with pytest.raises(holdfast.LeaseLost):
                    lease.release()
                while (event := json.loads(watching.stdout.readline()))["event"] != "broken":
                    pass
                assert reason in json.dumps(event)
        finally:
            watching.terminate()
