"""Requests that were given up for lost, and arrive all the same, when what they ask for has long been otherwise."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.world import Fate, Message
from tests.cache.test_simulated import CLAIM, KEY, Storm
from tests.proxy import LOSE_REPLY, LOSE_REQUEST, Proxy

GIVEN_UP = CLAIM / 3  # when a request without a reply is sent again


def is_look(message: Message) -> bool:
    return getattr(message.ops[0], "script", "") == "cache_look"


@pytest.mark.parametrize("arrives", [1.2, 1.9])
@pytest.mark.parametrize("fate", ["late", "lost"])
def test_a_late_request_does_not_bring_back_a_claim_that_was_invalidated(fate: str, arrives: float) -> None:
    """Its token claims by a second request, and computes; the first comes after the invalidation."""
    storm = Storm(0, (1, 0), cost=2.0)
    late = round(arrives * 1e6)
    first = Fate(late_us=late) if fate == "late" else Fate(reply_lost=True, again_us=late)
    storm.doom(lambda message: first if message.number == 0 else None)
    storm.run(1.0)
    assert storm.begun == 1
    invalidated = storm.start(storm.clients[1], storm.clients[1].invalidate(KEY))
    storm.run(arrives - 0.9)
    assert invalidated.done
    late_comer = storm.start(storm.clients[1], storm.want(storm.clients[1]))
    storm.run(3.0)
    assert storm.processes[0].outcome() == 1, "its own caller gets what it has computed"
    storm.run(3.0)
    assert late_comer.outcome() == 2, "but no other caller, because it was begun before"


def test_a_token_whose_claim_has_ended_unheard_is_exchanged_for_another() -> None:
    """Both replies of a look are lost, and the claim that it had made is invalidated before it asks a third time."""
    storm = Storm(0, (1, 0))
    looks = [0]

    def doom(message: Message) -> Fate | None:
        if message.machine is storm.machines[0] and is_look(message):
            looks[0] += 1
            return Fate(reply_lost=True) if looks[0] <= 2 else None
        return None

    storm.doom(doom)
    storm.run(GIVEN_UP + 0.3)
    assert looks[0] == 2
    storm.start(storm.clients[1], storm.clients[1].invalidate(KEY))
    storm.finish(3.0)
    assert storm.processes[0].outcome() == 1


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("options", [{"wait": 0}, {"wait": 0, "compute_ttl": 0.05}], ids=["hasty", "short"])
def test_a_broken_connection_is_forgiven_even_whoever_will_not_wait(
    proxy: Proxy, fault: Any, options: dict[str, Any]
) -> None:
    with holdfast.connect(proxy.url) as client:
        client.get_or_compute("warm", lambda: 1)
        proxy.on("cache_look", fault)
        assert client.get_or_compute("k", lambda: 1, **options) == 1
