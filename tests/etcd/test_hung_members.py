"""Members that accept connections and never answer: any minority of them costs a call some time, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.engines.etcd.conversation import Members, converse
from holdfast.engines.etcd.target import resolve_etcd
from holdfast.protocol.intents.requests import LeaseLife, Program, grant_lease
from holdfast.url import locate
from tests.etcd.faulty_server import Fault, FaultyServer, is_whole_http
from tests.fleet_etcd import EtcdFleet


def stay_silent(client: socket.socket, request: bytes) -> bool:
    return True


def break_off(client: socket.socket, request: bytes) -> bool:
    client.shutdown(socket.SHUT_RDWR)
    return True


def do_and_stay_silent(port: int) -> Fault:
    """The request takes effect at the member with this port, and its answer is lost."""

    def fault(client: socket.socket, request: bytes) -> bool:
        with socket.create_connection(("127.0.0.1", port)) as member:
            member.sendall(request)
            assert b" 200 OK" in member.recv(65536)
        return True

    return fault


@pytest.fixture
def members(fleet: EtcdFleet) -> Iterator[list[FaultyServer]]:
    """Five members, all in front of the same real one."""
    with ExitStack() as stack:
        port = fleet.members[0].client_port
        yield [stack.enter_context(FaultyServer(port, is_whole_http)) for _ in range(5)]


def url_of(members: list[FaultyServer]) -> str:
    return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in members)


@pytest.mark.parametrize("wait", [0, 2, None])
@pytest.mark.parametrize("listed", [3, 5])
def test_two_hung_members_are_passed_over(members: list[FaultyServer], connect: Any, listed: int, wait: Any) -> None:
    for member in members[:2]:
        member.fault = stay_silent
    client = connect(url_of(members[:listed]), timeout=10.0)
    with client.lock("x", wait=wait) as lease:
        assert lease.held
    assert members[0].answered
    assert members[1].answered


@pytest.mark.parametrize("wait", [0, None])
def test_if_all_members_hang_the_error_names_each(members: list[FaultyServer], connect: Any, wait: Any) -> None:
    for member in members:
        member.fault = stay_silent
    client = connect(url_of(members), timeout=1.0)
    with pytest.raises(holdfast.Unavailable, match="did not answer within") as caught:
        client.lock("x", wait=wait).acquire()
    assert set(caught.value.causes) == {f"etcd://127.0.0.1:{member.port}" for member in members}


def test_a_member_that_was_silent_is_not_the_next_choice(members: list[FaultyServer], connect: Any) -> None:
    silent, one, two = members[:3]
    silent.fault = stay_silent
    client = connect(url_of([silent, one, two]))
    client.lock("x").acquire(timeout=20).release()
    asked = len(silent.answered)
    for broken, other in ((one, two), (two, one)):
        broken.fault, other.fault = break_off, None
        client.lock("x").acquire(timeout=20).release()
    assert len(silent.answered) == asked


def test_if_all_other_members_fail_the_silent_one_is_asked_again(members: list[FaultyServer], connect: Any) -> None:
    silent, other = members[:2]
    silent.fault = stay_silent
    client = connect(url_of([silent, other]))
    client.lock("x").acquire(timeout=20).release()
    silent.fault, other.fault = None, stay_silent
    client.lock("x").acquire(timeout=20).release()


def test_a_release_whose_answer_was_lost_is_no_lost_lease(
    fleet: EtcdFleet, members: list[FaultyServer], connect: Any
) -> None:
    """The release is sent again, and finds no key: the first one has deleted it."""
    client = connect(url_of(members))
    lease = client.lock("x", ttl=30).acquire()
    members[0].fault = do_and_stay_silent(fleet.members[0].client_port)
    lease.release()
    assert members[0].answered


def test_a_look_goes_on_to_the_next_member(members: list[FaultyServer], connect: Any) -> None:
    client = connect(url_of(members))
    with client.lock("x"):
        for member in members[:2]:
            member.fault = stay_silent
        assert client.lock("x").locked()


def test_renewals_go_on_to_the_next_member(members: list[FaultyServer], connect: Any) -> None:
    client = connect(url_of(members))
    lease = client.lock("x", ttl=4).acquire()
    for member in members[:2]:
        member.fault = stay_silent
    assert not lease.lost.wait(6.0)
    lease.check()
    lease.release()


def test_after_a_silent_member_an_unreachable_one_is_passed_over_too() -> None:
    def program() -> Program:
        return (yield from grant_lease(5)).result

    members = Members(resolve_etcd(locate("etcd://h1,h2,h3")))
    conversation = converse(program(), members, 9.0, lambda: 0.0)
    calls: list[Any] = [
        next(conversation),
        conversation.throw(httpx.ReadTimeout("silent")),
        conversation.throw(httpx.ConnectError("refused")),
    ]
    assert [call.url.removesuffix("/v3/lease/grant") for call in calls] == [
        f"http://h{number}:2379" for number in (1, 2, 3)
    ]
    assert [call.timeout for call in calls] == [3.0, 4.5, 9.0], "each leaves time for the others"
    with pytest.raises(StopIteration) as done:
        conversation.send((200, LeaseLife(7, 5)))
    assert done.value.value == LeaseLife(7, 5)
    assert members.shown == "etcd://h3:2379"
