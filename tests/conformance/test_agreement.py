"""Random programs, played on all three stages: every result, error and message must be the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError
from tests.conformance.stages import APIS, STAGES
from tests.servers import Server

LOCKS = 3  # two clients: one has two lock objects of the name, the other has one

ACTIONS = st.one_of(
    st.tuples(st.just("acquire"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("acquire_in_time"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("release"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("release_lease"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("extend"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("check"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("locked"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("with"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("with_error"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("repr"), st.integers(0, LOCKS - 1)),
    st.tuples(st.just("delete_key"), st.just(0)),
    st.tuples(st.just("steal_key"), st.just(0)),
)


async def perform(program: list[tuple[str, int]], api: Any) -> list[str]:
    one, two = api.client(), api.client()
    options = {"ttl": 20, "wait": 0}
    # The labels tell which of them an error names as the holder, on a stage where all have one host and process, too.
    locks = [
        client.lock("a", label=label, **options) for client, label in ((one, "first"), (one, "second"), (two, "other"))
    ]
    leases: list[Any] = [None] * LOCKS
    transcript = []
    for action, number in program:
        try:
            said = await act(api, action, locks[number], leases, number)
        except (HoldfastError, ZeroDivisionError) as error:
            notes = getattr(error, "__notes__", [])
            said = f"{type(error).__name__}: {error} {notes}"
        transcript.append(f"{action} {number}: {said}")
    transcript.append(f"held: {[lease is not None and lease.held for lease in leases]}")
    transcript.append(f"key: {await api.raw('EXISTS', 'a')}")
    for lease in leases:
        if lease is not None:
            try:
                await lease.release()
            except HoldfastError:
                pass
    # What differs for good reasons: fences are times, addresses are addresses, each face has its module, and a
    # holder's host and process are those of the stage.
    differing = r"\d{16}|0x[0-9a-f]+|holdfast\.(aio|blocking)|\S+( \(pid \d+\))?(?=, label )"
    return [re.sub(differing, "~", line) for line in transcript]


async def act(api: Any, action: str, lock: Any, leases: list[Any], number: int) -> str:
    lease = leases[number]
    if action in ("acquire", "acquire_in_time"):
        got = await (lock.acquire(blocking=False) if action == "acquire" else lock.acquire(timeout=0.002))
        if got is not None:
            leases[number] = got
        return "a lease" if got else repr(got)
    if action in ("release", "locked"):
        return repr(await getattr(lock, action)())
    if action in ("with", "with_error"):
        async with lock as inner:
            if action == "with_error":
                raise ZeroDivisionError
            return f"entered, held {inner.held}"
    if action == "delete_key":
        return repr(await api.raw("DEL", "a"))
    if action == "steal_key":
        await api.raw("SET", "a", "thief", "PX", 60_000)
        return "stolen"
    if action == "repr":
        return f"{lock!r} {lease!r}"
    if lease is None:
        return "nothing"
    if action == "check":
        return repr(lease.check())
    return repr(await (lease.extend(40) if action == "extend" else lease.release()))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(ACTIONS, min_size=1, max_size=14))
@pytest.mark.needs("the keys of Redis")
def test_random_programs_go_the_same_way_on_every_stage(
    server: Server, monkeypatch: pytest.MonkeyPatch, program: list[tuple[str, int]]
) -> None:
    # In the world no time passes. On a busy machine it must not make a difference either: that the keeper looks after a
    # tenth of a second, and that a short wait gives an answer no more than that, has tests of its own.
    monkeypatch.setattr("holdfast.protocol.hold.CHECK_AFTER", 60.0)
    for limit in ("retry.SHORTEST_CALL", "wait.contact.SHORTEST_CALL", "wait.contact.LONGEST_CALL"):
        monkeypatch.setattr(f"holdfast.protocol.{limit}", 5.0)
    transcripts = {}
    for stage in STAGES:
        with server.client() as admin:
            admin.flushall()
        transcripts[stage] = APIS[stage].play(lambda api: perform(program, api), server)
    world = transcripts.pop("world")
    for stage, transcript in transcripts.items():
        assert transcript == world, f"{stage} differs from the world"


@pytest.mark.needs("the keys of Redis")
def test_the_holder_that_an_error_names_is_compared(play: Any) -> None:
    program = [("acquire", 1), ("with", 2), ("steal_key", 0), ("with", 2)]
    refused, _, stolen = play(lambda api: perform(program, api))[1:4]
    assert ": ~, label 'second' holds it" in refused
    assert ": a client of another library holds it" in stolen


def test_the_comparison_can_fail(server: Server) -> None:
    program = [("acquire", 0), ("check", 0)]
    played = APIS["blocking"].play(lambda api: perform(program, api), server)
    assert played[:2] == ["acquire 0: a lease", "check 0: None"]
    other = APIS["world"].play(lambda api: perform([("acquire", 0), ("delete_key", 0)], api), None)
    with pytest.raises(AssertionError):
        assert played == other
