"""Holds that pass between real processes."""

from __future__ import annotations

import signal
import threading

import pytest
import redis

import holdfast
from tests.drivers.test_fork import in_child
from tests.servers import Server
from tests.support import Script, eventually, lock_keys

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what a test here is about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ADOPTER = """
client = holdfast.connect(url)
ticket = sys.stdin.readline().strip()
lease = client.adopt(ticket, ttl=1)
say(lease.fence)
sys.stdin.readline()
say(lease.held)
lease.release()
client.close()
"""


def test_another_process_goes_on_where_this_one_ends(server: Server, admin: redis.Redis) -> None:
    with Script(ADOPTER, server.url) as script:
        with holdfast.connect(server.url) as client:
            lease = client.lock("x", ttl=10).acquire()
            assert lease
            script.write(lease.hand_over() + "\n")
            fence = int(script.hear())
        assert fence > lease.fence
        assert admin.exists("x"), "that the giver's client was closed changes nothing"
        script.write("\n")
        script.hear("True")
        script.finish()
    assert lock_keys(admin) == []


def test_an_adopter_that_is_killed_leaves_the_lock_to_its_own_ttl(server: Server, client: holdfast.Client) -> None:
    with Script(ADOPTER, server.url) as script:
        lease = client.lock("x", ttl=600).acquire()
        assert lease
        script.write(lease.hand_over() + "\n")
        script.hear()
        script.send(signal.SIGKILL)
        with client.lock("x", wait=30):
            pass


def test_of_many_who_adopt_one_ticket_one_has_it(server: Server, client: holdfast.Client) -> None:
    for _ in range(10):
        lease = client.lock("x").acquire()
        assert lease
        ticket = lease.hand_over()
        with holdfast.connect(server.url) as other:
            won: list[holdfast.Lease] = []
            refused: list[holdfast.NotAcquired] = []
            ready = threading.Barrier(8)

            def take(
                taker: holdfast.Client, ticket: str = ticket, won: list = won, refused: list = refused, ready=ready
            ) -> None:
                ready.wait(10)
                try:
                    won.append(taker.adopt(ticket))
                except holdfast.NotAcquired as error:
                    refused.append(error)

            threads = [threading.Thread(target=take, args=((client, other)[number % 2],)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert (len(won), len(refused)) == (1, 7)
            won[0].release()


def test_threads_that_hand_over_and_release_at_once_do_only_one_of_it(client: holdfast.Client) -> None:
    for _ in range(30):
        lease = client.lock("x").acquire()
        assert lease
        tickets: list[str] = []
        ready = threading.Barrier(2)

        def give(lease: holdfast.Lease = lease, tickets: list[str] = tickets, ready=ready) -> None:
            ready.wait(10)
            try:
                tickets.append(lease.hand_over())
            except (holdfast.NotHeld, holdfast.LeaseLost):
                pass

        thread = threading.Thread(target=give)
        thread.start()
        ready.wait(10)
        released = True
        try:
            lease.release()
        except holdfast.NotHeld:
            released = False
        thread.join()
        assert released == (not tickets)
        if tickets:
            client.adopt(tickets[0]).release()
        with client.lock("x", wait=0):
            pass


def test_local_waiters_of_the_giver_do_not_inherit_what_was_handed_over(client: holdfast.Client, url: str) -> None:
    lease = client.lock("x").acquire()
    assert lease
    entered = threading.Event()

    def wait() -> None:
        with client.lock("x", wait=30):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: client._driver.cohorts.lines, what="it stands in line")
    ticket = lease.hand_over()
    with holdfast.connect(url) as other:
        taken = other.adopt(ticket)
        assert not entered.wait(0.2)
        assert taken.held
        taken.release()
    thread.join(10)
    assert entered.is_set()


def test_a_forked_child_adopts_what_the_parent_hands_over(client: holdfast.Client, admin: redis.Redis) -> None:
    lease = client.lock("x").acquire()
    assert lease
    ticket = lease.hand_over()

    def work() -> None:
        taken = client.adopt(ticket)
        assert taken.fence > lease.fence
        taken.release()

    in_child(work)
    assert lock_keys(admin) == []


def test_a_forked_child_cannot_hand_over_what_the_parent_holds(client: holdfast.Client) -> None:
    def work() -> None:
        with pytest.raises(holdfast.LeaseLost, match="forked"):
            lease.hand_over()

    with client.lock("x") as lease:
        in_child(work)
        lease.check()


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_a_lock_of_history_cannot_be_handed_over(client: holdfast.Client) -> None:
    with client.recipe("set_nx", "x") as lease, pytest.raises(holdfast.Unsupported, match="hand_over"):
        lease.hand_over()


def test_no_ticket_without_a_server(server: Server) -> None:
    with holdfast.connect(server.url, timeout=0.3) as client:
        lease = client.lock("x", ttl=20).acquire()
        assert lease
        server.pause()
        with pytest.raises(holdfast.Unavailable):
            lease.hand_over()
        assert lease.held, "it is as it was"
        server.resume()
        lease.release()
