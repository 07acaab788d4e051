"""Contact with each node of a cluster by itself. The simulated world has one node, so these play a cluster's engine."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.simulation.world import Fate, World, failed
from holdfast.protocol.effects import Step, StepFailed, Wait
from holdfast.protocol.wait.contact import Contacts, Probe
from tests.outages.test_contact_simulated import OPTIONS, Woken, admitted
from tests.outages.test_outage_wait_simulated import Timed, acquire, acquire_and_hold, warm_client
from tests.protocol.harness import Play


def node_of(key: str) -> str:
    return "A" if key.startswith("a") else "B"


def key_of(op: Any) -> str:
    return str(op.keys[0] if isinstance(op, Step) else op.args[1])


def divide(client: holdfast.aio.Client) -> None:
    """Names with an a are on node A, others on node B."""
    client._driver.registry.contacts.node_of = node_of
    client._driver.registry.crowd.slot_of = lambda key: int(node_of(key) == "A")


def refused() -> StepFailed:
    return StepFailed(holdfast.Unavailable({"s": "x"}, "y"), sent=False, retry=True)


def test_a_call_that_awaits_a_verdict_goes_on_if_the_lock_moves_to_another_node() -> None:
    owner = {"k": "A"}
    contacts = Contacts()
    contacts.node_of = owner.__getitem__
    step = Step("acquire", ("k",), ())
    contacts.note_failure(step, 1.0, refused(), 1.0)
    lost = contacts.of("k")
    probe = admitted(lost, 10.0)
    assert isinstance(probe, Probe)
    new_wakeup: Any = Woken
    waiter = lost.admit(OPTIONS, new_wakeup)
    next(waiter)
    effect = waiter.send(10.01)
    assert isinstance(effect, Wait)
    owner["k"] = "B"
    contacts.keep_only(["B"])
    contacts.note_reply(step, 7, 10.1, 10.1)
    probe.end()
    assert isinstance(effect.wakeup, Woken)
    assert effect.wakeup.woken
    with pytest.raises(StopIteration) as done:
        waiter.send(10.11)
    assert done.value.value is None


def test_nothing_is_logged_of_an_unknown_node_when_the_map_is_there() -> None:
    contacts = Contacts()
    lines: list[str] = []
    contacts.tell(lines.append, lambda now: "")
    node = ""
    contacts.node_of = lambda key: node
    step = Step("acquire", ("k",), ())
    contacts.note_failure(step, 1.0, refused(), 2.7)  # first contact: the first node that is asked is silent
    assert len(lines) == 1
    node = "A"
    contacts.keep_only(["A"])
    contacts.note_reply(step, 7, 2.8, 2.9)
    assert len(lines) == 1, lines


def test_a_step_in_parts_is_about_the_nodes_of_its_parts() -> None:
    contacts = Contacts()
    contacts.node_of = node_of
    whole = Step("multi_acquire", ("a", "b"), ())
    part = whole._replace(keys=("b",))
    for key in "ab":
        contacts.note_reply(Step("acquire", (key,), ()), 7, 0.5, 0.5)
    failed = refused()
    failed.part = part
    contacts.note_failure(whole, 1.0, failed, 1.1)
    assert contacts.of("a").lost_at is None
    assert contacts.of("b").lost_at == 1.0
    assert contacts.of("a", "b") is contacts.of("b")
    contacts.note_reply(whole, [0], 2.0, 2.1)  # refused by node A, so node B was not asked
    assert contacts.of("b").lost_at == 1.0
    contacts.note_reply(part, 7, 3.0, 3.1)
    assert contacts.of("b").lost_at is None


def test_clean_ups_on_another_node_do_not_keep_the_keeper_from_asking() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    divide(client)
    Timed(play, client, acquire_and_hold(play, "b"))
    play.run(0.2)
    play.doom(lambda message: Fate(lost=True) if all(node_of(key_of(op)) == "A" for op in message.ops) else None)
    Timed(play, client, acquire("a", wait=1))
    play.run(2.0)
    assert client._driver.registry.pending_cleanups()
    play.world.store.oom = True
    refused = Timed(play, client, lambda client: client.lock("bb").acquire(blocking=False))
    play.run(0.1)
    play.world.store.oom = False
    assert isinstance(refused.result, holdfast.Unavailable)
    play.run(3.0)
    call = Timed(play, client, acquire("b", wait=0.5))
    play.run(1.0)
    assert isinstance(call.result, holdfast.AcquireTimeout), call.result


def silence_node_a(world: World) -> None:
    """Steps on node A have no answer, also those of a call whose others have one."""
    send = world.send

    def divided(machine: Any, ops: Any, answer: Any, link: Any = None) -> Any:
        silent = [place for place, op in enumerate(ops) if node_of(key_of(op)) == "A"]
        if machine.name != "one" or not silent:
            return send(machine, ops, answer, link)
        live = [op for place, op in enumerate(ops) if place not in silent]
        if not live:
            return None

        def partly(replies: Any) -> None:
            left = iter(replies)
            silence = failed("it did not answer within 1 s", sent=True, silent=True)
            both = [silence if place in silent else next(left) for place in range(len(ops))]
            world.at(world.now_us + 900_000, lambda: answer(both))

        return send(machine, live, partly, link)

    vars(world)["send"] = divided


def test_a_crowd_on_one_node_ends_although_another_node_serves() -> None:
    play = Play(seed=1)
    client, other = warm_client(play), play.client("two")
    divide(client)
    for name in ("a", "b"):
        Timed(play, other, acquire_and_hold(play, name, ttl=30))
    play.run(1)
    on_a, on_b = ([Timed(play, client, acquire(name, wait=20, cohort=0)) for _ in range(40)] for name in ("a", "b"))
    play.run(3)
    assert client._driver.registry.crowd.members
    silence_node_a(play.world)
    silent_at = play.world.now_us / 1e6
    play.run(30)
    assert all(isinstance(call.result, holdfast.Unavailable) for call in on_a)
    assert all(isinstance(call.result, holdfast.AcquireTimeout) for call in on_b)
    assert max(call.ended for call in on_a) < silent_at + 5
    assert min(call.ended for call in on_b) > silent_at + 15


def test_a_lock_on_several_names_judges_by_the_node_that_has_been_lost_for_longest() -> None:
    contacts = Contacts()
    contacts.node_of = node_of
    contacts.note_failure(Step("acquire", ("b",), ()), 1.0, refused(), 1.0)
    contacts.note_failure(Step("acquire", ("a",), ()), 9.5, refused(), 9.5)
    assert contacts.of("a", "b") is contacts.of("b", "a") is contacts.of("b")
