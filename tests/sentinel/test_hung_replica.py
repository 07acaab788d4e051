"""A failover in which a replica hangs: the Sentinel that leads it lists the old primary until all replicas follow the
new one, with the number of the new decision. With the default timeouts that takes up to half a minute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis

import holdfast
from holdfast.cli.doctor.permissions import rules_on_sentinels
from tests.fleets import SERVICE, SentinelFleet, find_redis
from tests.sentinel.test_failover import key_on, ports_of
from tests.servers import Server
from tests.support import eventually


@pytest.fixture(params=["valkey", "redis7"])
def fleet(request: pytest.FixtureRequest) -> Iterator[SentinelFleet]:
    """With the default timeouts of Sentinel."""
    binary = find_redis() if request.param == "redis7" else ""
    with SentinelFleet(binary=binary, patience_ms=30_000, failover_timeout_ms=180_000, in_order=True) as fleet:
        yield fleet
        fleet.resume()


def ask(fleet: SentinelFleet, sentinel: int, *words: str) -> Any:
    with contextlib.closing(redis.Redis(port=fleet.sentinels[sentinel].port, decode_responses=True)) as admin:
        return admin.execute_command("SENTINEL", *words, SERVICE)


def listed(fleet: SentinelFleet, sentinel: int) -> tuple[int, int]:
    """The port and the epoch of the primary, as SENTINEL MASTERS has them."""
    state = fleet._state(fleet.sentinels[sentinel])
    return int(state["port"]), int(state["config-epoch"])


def begin_failover(fleet: SentinelFleet) -> tuple[Server, Server]:
    """Let the first Sentinel lead a failover that a hung replica keeps from ending. Returns the old and new primary."""
    old, new, hung = fleet.servers
    hung.pause()
    assert ask(fleet, 0, "FAILOVER")
    eventually(lambda: listed(fleet, 1)[0] == listed(fleet, 2)[0] == new.port, timeout=30.0)
    assert int(ask(fleet, 0, "GET-MASTER-ADDR-BY-NAME")[1]) == new.port
    assert listed(fleet, 0) == (old.port, listed(fleet, 1)[1]), "the failover has not ended"
    return old, new


@pytest.mark.parametrize("old_primary", ["runs on", "resumes"])
def test_clients_that_ask_different_sentinels_use_the_same_primary(
    fleet: SentinelFleet, connect: Any, old_primary: str
) -> None:
    if old_primary == "resumes":
        fleet.servers[0].pause()
    old, new = begin_failover(fleet)
    old.resume()
    asks_leader, asks_other = connect(fleet.url), connect(fleet.url_from(1))
    first = asks_leader.lock("x", ttl=30).acquire(timeout=10)
    assert first is not None
    assert asks_other.lock("x", ttl=30).acquire(blocking=False) is None
    assert ports_of(asks_leader) == ports_of(asks_other) == {new.port}
    assert key_on(new, fleet, "x") == first.token.encode()
    assert listed(fleet, 0)[0] == old.port, "all this was while the failover had not ended"
    first.release()


def test_a_client_that_was_there_before_follows_the_leader_too(fleet: SentinelFleet, connect: Any) -> None:
    faces = [connect(fleet.url), connect(fleet.url_from(1))]
    for face in faces:
        with face.lock("warm"):
            pass
    _, new = begin_failover(fleet)

    def uses_new(face: Any) -> bool:
        with face.lock("y", wait=10):
            return ports_of(face) == {new.port}

    for face in faces:  # each asks again within a second
        eventually(partial(uses_new, face))
    lease = faces[0].lock("x", ttl=30).acquire(timeout=10)
    assert lease is not None
    assert faces[1].lock("x", ttl=30).acquire(blocking=False) is None
    lease.release()


def test_a_holder_that_no_sentinel_tells_loses_its_lease_before_another_has_it(
    fleet: SentinelFleet, connect: Any
) -> None:
    """It is cut off together with the old primary, where no replica confirms its renewals any more."""
    _, new, hung = fleet.servers
    apart = fleet.url.replace(",".join(f"{host}:{port}" for host, port in fleet.hosts), "{}:{}".format(*fleet.hosts[2]))
    lease = connect(apart, replicas=1).lock("x", ttl=4.0).acquire()
    fleet.sentinels[2].pause()
    hung.pause()
    try:
        assert ask(fleet, 0, "FAILOVER")
        eventually(lambda: listed(fleet, 1)[0] == new.port, timeout=30.0)
        second = connect(fleet.url_from(1)).lock("x", ttl=30.0).acquire(timeout=30)
        assert second is not None
        assert not lease.held
        assert key_on(new, fleet, "x") == second.token.encode()
        second.release()
    finally:
        fleet.sentinels[2].resume()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


@pytest.mark.parametrize(
    "rules", [rules_on_sentinels(), ["+sentinel|masters"]], ids=["as printed", "of an earlier version"]
)
@pytest.mark.parametrize("fleet", ["redis7"], indirect=True)
def test_a_user_of_the_sentinels_with_few_permissions_is_enough(
    fleet: SentinelFleet, connect: Any, rules: list[str]
) -> None:
    """A user that may not ask for the address is sent on to another Sentinel: MASTERS alone says that the server which
    it lists was replaced, but not by which."""
    for sentinel in fleet.sentinels:
        with contextlib.closing(redis.Redis(port=sentinel.port)) as admin:
            admin.execute_command("ACL", "SETUSER", "app", "on", ">secret", *rules)
    _, new = begin_failover(fleet)
    face = connect(f"{fleet.url}?sentinel_username=app&sentinel_password=secret")
    with face.lock("x", ttl=30, wait=10) as lease:
        assert key_on(new, fleet, "x") == lease.token.encode()
