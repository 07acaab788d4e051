"""Requests of real clients that etcd executes late, or executes and then refuses; on real members, on both faces."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import holdfast
from tests.etcd.faulty_server import Fault, FaultyServer, is_whole_http
from tests.fleet_etcd import EtcdFleet, Member, coded
from tests.peer_proxy import PeerProxy
from tests.support import eventually

FULL = b'{"error":"etcdserver: mvcc: database space exceeded","code":8}'


def writes(request: bytes) -> bool:
    return b"/v3/kv/txn" in request and b"request_put" in request


def once(does: Callable[[], object]) -> Fault:
    """Do that before the next request that writes reaches its member."""
    done: list[bool] = []

    def fault(client: socket.socket, request: bytes) -> bool:
        if not done and writes(request):
            done.append(True)
            does()
        return False

    return fault


def forward(port: int, request: bytes) -> bytes:
    """The answer of the member with this port."""
    with socket.create_connection(("127.0.0.1", port)) as member:
        member.sendall(request)
        answer = b""
        while not is_whole_http(answer):
            answer += member.recv(65536)
    return answer


class Linked:
    """Three members; what a member sends to the others can be held back."""

    def __init__(self) -> None:
        self.links: dict[str, PeerProxy] = {}  # by the name of the member that sends
        self.fleet = EtcdFleet(front=self._link)

    def _link(self, name: str, port: int) -> int:
        if name in self.links:
            self.links[name].close()  # the fleet is started once more, on other ports
        self.links[name] = PeerProxy(port)
        return self.links[name].port

    def close(self) -> None:
        self.fleet.stop()
        for link in self.links.values():
            link.close()


@pytest.fixture(scope="module")
def _linked() -> Iterator[Linked]:
    linked = Linked()
    yield linked
    linked.close()


@pytest.fixture
def linked(_linked: Linked) -> Iterator[Linked]:
    _linked.fleet.client().flushall()
    yield _linked
    for link in _linked.links.values():
        link.resume()


def url_of(*ports: int) -> str:
    return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def has_caught_up(fleet: EtcdFleet, member: Member) -> bool:
    """Whether what this member has sent to the leader so far was executed: it was, if a later request was."""
    fleet.ask("/v3/kv/put", {"key": coded("after"), "value": ""}, member)
    return True


@pytest.mark.parametrize("late", ["hand_over", "extend"])
def test_a_late_request_of_the_giver_does_not_undo_an_adoption(linked: Linked, connect: Any, late: str) -> None:
    """It goes through a member whose link stalls; the retry through another member succeeds, and B adopts."""
    fleet = linked.fleet
    leader = fleet.leader()
    follower, other = [member for member in fleet.members if member is not leader]
    link = linked.links[follower.name]
    with ExitStack() as stack:
        entry = stack.enter_context(FaultyServer(follower.client_port, is_whole_http))
        giver = connect(url_of(entry.port, leader.client_port, other.client_port))
        taker, third = (stack.enter_context(holdfast.connect(url_of(leader.client_port))) for _ in range(2))
        lease = giver.lock("a", ttl=10).acquire()
        entry.fault = once(link.stall)
        if late == "extend":
            lease.extend(40)
        ticket = lease.hand_over()
        adopted = taker.adopt(ticket, ttl=10)
        (before,) = fleet.client().range("a:hf1:intent:").values()
        link.resume()
        assert has_caught_up(fleet, follower)
        (after,) = fleet.client().range("a:hf1:intent:").values()
        assert after == before, "the late request has changed nothing"
        with pytest.raises(holdfast.NotAcquired):
            third.adopt(ticket)
        adopted.check()
        adopted.release()
        assert not fleet.client().range("a:hf1:intent:")


@pytest.fixture
def entry(fleet: EtcdFleet) -> Iterator[FaultyServer]:
    with FaultyServer(fleet.members[0].client_port, is_whole_http) as entry:
        yield entry


def test_after_a_hand_over_without_an_answer_the_lease_is_as_it_was(
    fleet: EtcdFleet, entry: FaultyServer, connect: Any
) -> None:
    """The hand_over is executed each time, and no answer arrives: the holder goes on, and nobody else gets in."""
    port = fleet.members[0].client_port

    def do_and_stay_silent(client: socket.socket, request: bytes) -> bool:
        if not writes(request):
            return False
        assert b" 200 OK" in forward(port, request)
        return True

    giver, other = connect(url_of(entry.port), timeout=1.0), connect(fleet.url)
    lease = giver.lock("a", ttl=2).acquire()
    entry.fault = do_and_stay_silent
    with pytest.raises(holdfast.Unavailable):
        lease.hand_over()
    entry.heal()
    lease.check()
    assert other.lock("a").acquire(timeout=6.0) is None, "longer than the ticket would have lasted"
    lease.check()
    lease.release()
    assert not fleet.client().range("a:hf1:intent:")


def test_a_reader_that_does_not_wait_leaves_nothing_behind(fleet: EtcdFleet, entry: FaultyServer) -> None:
    """Between its two requests beside a writer that has become a reader, another writer comes."""
    count: list[int] = []
    key = "a:hf1:intent:rwlock:all:z"

    def let_a_writer_in(client: socket.socket, request: bytes) -> bool:
        if writes(request):
            count.append(1)
            if len(count) == 2:
                fleet.ask("/v3/kv/put", {"key": coded(key), "value": coded(json.dumps({"token": "z"}))})
        return False

    with holdfast.connect(fleet.url) as writer, holdfast.connect(url_of(entry.port)) as reader:
        lease = writer.rwlock("a").write.acquire()
        assert lease is not None
        lease.downgrade()
        entry.fault = let_a_writer_in
        assert reader.rwlock("a").read.acquire(blocking=False) is None
        assert len(count) == 2
        assert not fleet.client().range("a:hf1:intent:rwlock:any:")
        fleet.client().delete(key)
        lease.release()


@pytest.fixture
def small() -> Iterator[EtcdFleet]:
    """One member with room for hardly anything."""
    with EtcdFleet(1, "--quota-backend-bytes=200000") as fleet:
        yield fleet


def fill(fleet: EtcdFleet) -> None:
    """Until etcd says that it is full."""
    member = fleet.members[0]
    for number in range(1000):
        body = {"key": coded(f"ballast{number}"), "value": coded("x" * 5000)}
        if fleet._http.post(f"{member.url}/v3/kv/put", json=body).status_code != 200:
            return
    raise AssertionError("it has room for everything")


def test_a_full_etcd_that_has_executed_a_request_keeps_no_orphan(small: EtcdFleet, connect: Any) -> None:
    """etcd creates the intent, and answers that it is full. From then on it refuses all writes; deletes still work."""
    port = small.members[0].client_port
    with FaultyServer(port, is_whole_http) as entry:
        client = connect(url_of(entry.port), timeout=2.0)
        client.lock("b").acquire().release()  # it has a lease

        def do_and_refuse(client: socket.socket, request: bytes) -> bool:
            if not writes(request):
                return False
            if b" 200 OK" in forward(port, request):
                fill(small)
            head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % len(FULL) + FULL)
            return True

        entry.fault = do_and_refuse
        with pytest.raises(holdfast.Unavailable, match="its database is full"):
            client.lock("a").acquire(blocking=False)
        entry.heal()
        eventually(lambda: not small.client().range("a:hf1:intent:"))
        assert small.ask("/v3/maintenance/alarm", {"action": "GET"})["alarms"], "it is still full"


def test_holders_and_releases_do_not_need_room(small: EtcdFleet) -> None:
    with holdfast.connect(small.url, timeout=2.0) as client:
        leases = [client.lock("a", ttl=2).acquire(), client.lock("b", "c", ttl=2).acquire()]
        leases.append(client.rwlock("d", ttl=2).read.acquire())
        fill(small)
        for lease in leases:
            assert lease is not None
            assert not lease.lost.wait(3.0), "renewals go on"
            lease.check()
            lease.release()
        assert [key for key in small.client().range("") if ":hf1:" in key] == []
