"""What goes wrong with etcd: leaders, leases, watches, tokens, members; on a real cluster, on both faces."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.protocol.intents.queue import _SHORT_QUEUE
from holdfast.protocol.intents.requests import Watch
from tests.etcd.watching import all_ended, watches_at
from tests.fleet_etcd import EtcdFleet, coded


def eventually(condition: Callable[[], object], within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Waiter:
    """A thread that waits for a lock; on either face, it is a client of its own."""

    def __init__(self, client: Any, name: str, **options: Any) -> None:
        self.fence = 0
        self.error: BaseException | None = None
        self._lock = client.lock(name, wait=60, **options)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            with self._lock as lease:
                self.fence = lease.fence
        except BaseException as error:
            self.error = error

    def join(self) -> int:
        self._thread.join(60)
        assert not self._thread.is_alive(), "it waits for ever"
        if self.error is not None:
            raise self.error
        return self.fence


@pytest.fixture
def clients(fleet: EtcdFleet, connect: Any) -> Callable[..., Any]:
    """Makes clients of the cluster, on either face."""
    return partial(connect, fleet.url)


def is_queued(fleet: EtcdFleet, name: str, waiters: int = 1) -> bool:
    return len(fleet.client().queue(name)[1]) >= waiters


def test_a_holder_and_its_waiters_survive_the_death_of_the_leader(fleet: EtcdFleet, clients: Any) -> None:
    one, two = clients(), clients()
    lease = one.lock("a", ttl=20).acquire()
    waiter = Waiter(two, "a")
    eventually(lambda: is_queued(fleet, "a"))
    fleet.leader().kill()
    assert lease.held
    with one.lock("b", wait=30):
        pass  # there is a leader again
    lease.check()
    lease.release()
    assert waiter.join() > lease.fence


def test_a_holder_is_told_soon_that_its_etcd_lease_is_gone(fleet: EtcdFleet, clients: Any) -> None:
    lease = clients().lock("a", ttl=60).acquire()
    time.sleep(0.5)  # from then on its key is watched
    for found in fleet.ask("/v3/lease/leases", {}).get("leases", []):
        fleet.ask("/v3/lease/revoke", {"ID": found["ID"]})
    assert lease.lost.wait(10), "long before its next renewal"
    with pytest.raises(holdfast.LeaseLost, match="expired or was deleted"):
        lease.release()


def test_a_waiter_whose_etcd_lease_is_gone_takes_a_new_place(fleet: EtcdFleet, clients: Any) -> None:
    one, two = clients(), clients()
    lease = one.lock("a", ttl=7).acquire()
    waiter = Waiter(two, "a", ttl=30)
    eventually(lambda: is_queued(fleet, "a"))
    (mine,) = [item for key, item in fleet.client().range("a:hf1:intent:").items() if lease.token not in key]
    fleet.ask("/v3/lease/revoke", {"ID": mine["lease"]})
    eventually(lambda: is_queued(fleet, "a"))
    assert lease.held
    lease.release()
    assert waiter.join() > lease.fence


def compact(fleet: EtcdFleet) -> None:
    for _ in range(20):
        revision = fleet.ask("/v3/kv/put", {"key": coded("other"), "value": ""})["header"]["revision"]
    fleet.ask("/v3/kv/compaction", {"revision": revision, "physical": True})


def test_a_compaction_during_a_wait_costs_the_waiter_nothing(fleet: EtcdFleet, clients: Any) -> None:
    one, two = clients(), clients()
    lease = one.lock("a").acquire()
    waiter = Waiter(two, "a")
    eventually(lambda: is_queued(fleet, "a"))
    compact(fleet)
    lease.release()
    assert waiter.join() > lease.fence


def test_watches_from_a_compacted_revision_wake_their_waiters(fleet: EtcdFleet) -> None:
    """Each of them, and at once. Watches that merely failed would wake one waiter a second."""
    compact(fleet)
    tokens = [f"token{number}" for number in range(5)]

    async def main() -> None:
        watches, told = watches_at(fleet.url)
        for token in tokens:
            watches.begin(Watch(token, f"key of {token}", 1))
        assert await all_ended(watches)
        assert sorted(told) == tokens
        await watches.close()

    asyncio.run(main())


def test_a_watch_that_breaks_is_made_good(fleet: EtcdFleet, clients: Any) -> None:
    one, two = clients(), clients()
    lease = one.lock("a").acquire()
    waiter = Waiter(two, "a")
    eventually(lambda: is_queued(fleet, "a"))
    eventually(lambda: two.client.statistics().connections > 1)
    fleet.restart(fleet.members[0])  # to which both clients are connected
    fleet.await_ready()
    lease.check()
    lease.release()
    assert waiter.join() > lease.fence


def test_without_a_majority_a_call_ends_with_unavailable_and_the_holder_with_its_ttl(
    fleet: EtcdFleet, clients: Any
) -> None:
    client = clients(timeout=2.0)
    lease = client.lock("a", ttl=3).acquire()
    for member in fleet.members[:2]:
        member.kill()
    started = time.monotonic()
    with pytest.raises(holdfast.Unavailable, match="lock 'b'"):
        client.lock("b").acquire(blocking=False)
    assert time.monotonic() - started < 10
    assert lease.lost.wait(20)
    with pytest.raises(holdfast.LeaseLost, match="ran out before it could be renewed"):
        lease.release()


def test_a_queue_that_is_longer_than_one_read_is_served_in_order(fleet: EtcdFleet, clients: Any) -> None:
    """Of a long queue, the transaction that joins it reads only the beginning: the predecessor needs another read."""
    waiters: list[Waiter] = []
    with clients().lock("a") as first:
        for number in range(_SHORT_QUEUE + 4):
            waiters.append(Waiter(clients(), "a"))
            eventually(partial(is_queued, fleet, "a", number + 1))
    fences = [first.fence, *(waiter.join() for waiter in waiters)]
    assert fences == sorted(set(fences))


def test_a_paused_leader_does_not_stop_the_others(fleet: EtcdFleet, clients: Any) -> None:
    client = clients()
    with client.lock("a"):
        pass
    fleet.leader().pause()
    with client.lock("a", wait=40) as lease:
        assert lease.held


def test_a_killed_holder_is_replaced_when_its_lease_ends(fleet: EtcdFleet, clients: Any) -> None:
    script = textwrap.dedent("""
        import sys, time, holdfast
        lease = holdfast.connect(sys.argv[1]).lock("a", ttl=3).acquire()
        print(flush=True)
        time.sleep(60)
    """)
    holder = subprocess.Popen([sys.executable, "-c", script, fleet.url], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    client = clients()
    assert client.lock("a").acquire(blocking=False) is None
    holder.kill()
    holder.communicate()
    with client.lock("a", wait=30) as lease:
        assert lease.held


def test_a_forked_child_holds_nothing_and_can_lock(fleet: EtcdFleet) -> None:
    client = holdfast.connect(fleet.url)
    lease = client.lock("a").acquire()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            assert not lease.held
            assert client.lock("a").acquire(blocking=False) is None
            with client.lock("b") as own:
                assert own.held
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    lease.check()
    lease.release()
    client.close()


def test_many_waiters_of_one_client_are_all_served(fleet: EtcdFleet, clients: Any) -> None:
    """More than there are streams: the keeper asks for them."""
    one, two = clients(), clients()
    leases = [one.lock(f"a{number}").acquire() for number in range(230)]
    waiters = [Waiter(two, f"a{number}") for number in range(230)]
    eventually(lambda: two.client.statistics().waiters == 230)
    time.sleep(1.0)
    assert two.client.statistics().connections < 300
    for lease in leases:
        lease.release()
    assert all(waiter.join() for waiter in waiters)


def test_a_lease_that_was_dropped_is_given_back_although_others_are_renewed(fleet: EtcdFleet, clients: Any) -> None:
    client = clients()
    kept = client.lock("kept", ttl=2).acquire()
    dropped = client.lock("dropped", ttl=2).acquire()
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del dropped
    with clients().lock("dropped", wait=10):
        kept.check()
    kept.release()


def test_fences_go_on_from_a_floor(fleet: EtcdFleet, clients: Any) -> None:
    with clients().lock("a") as low, clients(fence_floor=10**15).lock("b") as high:
        assert low.fence < 10**15 < high.fence


def test_what_etcd_does_not_offer_says_which_engine_does(fleet: EtcdFleet) -> None:
    client = holdfast.connect(fleet.url)
    asks: list[Callable[[], object]] = [
        lambda: client.get_or_compute("k", lambda: 1),
        lambda: client.cached("k:{x}"),
        lambda: client.invalidate("k"),
    ]
    for ask in asks:
        with pytest.raises(holdfast.Unsupported, match=r"get_or_compute is not supported by etcd://.*redis://"):
            ask()
    with pytest.raises(holdfast.Unsupported, match="recipe for redis is not supported by etcd"):
        client.recipe("set_nx", "k")
    with pytest.raises(holdfast.Unsupported, match="replicas"):
        holdfast.connect(fleet.url, replicas=1)
    client.close()


def test_the_command_line_runs_under_a_lock_on_etcd(fleet: EtcdFleet) -> None:
    run = [sys.executable, "-m", "holdfast", "run", "nightly", "--", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(
        run, env={**os.environ, "HOLDFAST_URL": fleet.url}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"
    assert not fleet.client().range("nightly")
