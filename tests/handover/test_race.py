"""Many callers adopt one ticket at the same time, on real servers of every engine."""

from __future__ import annotations

import threading

import pytest

import holdfast
from tests.handover.kinds import KINDS, Kind
from tests.servers import Server

pytestmark = pytest.mark.needs("hand_over")


@pytest.mark.parametrize("kind", [KINDS["lock"], KINDS["permit"], KINDS["read"]], ids=["lock", "permit", "read"])
def test_of_many_who_adopt_one_ticket_one_has_it(kind: Kind, server: Server, client: holdfast.Client) -> None:
    for _ in range(10):
        lease = kind.ask(client).acquire()
        assert lease
        ticket = lease.hand_over()
        with holdfast.connect(server.url) as other:
            won: list[holdfast.Lease] = []
            refused: list[holdfast.NotAcquired] = []
            ready = threading.Barrier(8)

            def take(
                taker: holdfast.Client,
                ticket: str = ticket,
                won: list[holdfast.Lease] = won,
                refused: list[holdfast.NotAcquired] = refused,
                ready: threading.Barrier = ready,
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
