"""The suite of the lock, played with a semaphore of one permit, and with either side of a readers-writer lock.

What the suite does to the lock's key behind its back is done here to the key of those inside.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.conformance import test_lock as suite

pytestmark = pytest.mark.needs("semaphore", "rwlock")

ROOM = {name: f"{name}:hf1:holders:{{{name}}}" for name in ("a", "b")}

# What cannot be asked of a room, and why.
OF_THE_MUTEX = {
    "test_the_key_is_a_plain_string_with_the_token_and_a_ttl": "rooms keep side keys only",
    "test_a_stolen_key_is_noticed": "nobody can put a token of its own in the place of another's",
    "test_locked_asks_the_server": "looks at a foreign lock, and rooms have none",
}
NOT_OF_MANY = {
    "test_a_lost_lease_occupies_its_object_until_released": "the object holds many, and may have another",
}
EXCLUDING = {
    "test_it_excludes_others": "readers do not",
    "test_a_waiter_gets_it_after_release": "nobody waits",
    "test_an_object_has_one_lease_whoever_shares_it": "nobody waits",
    "test_no_update_of_a_counter_is_lost": "readers do not write",
    "test_waiting_ends_with_acquire_timeout": "nobody waits",
    "test_a_lease_is_renewed": "sees that by being refused",
    "test_cancelled_while_asking_or_waiting_it_leaves_no_key": "nobody waits",
}
KINDS: dict[str, tuple[Any, dict[str, str]]] = {
    "semaphore": (
        lambda client, name, options: client.semaphore(name, 1, **options),
        {**OF_THE_MUTEX, **NOT_OF_MANY},
    ),
    "write": (lambda client, name, options: client.rwlock(name, **options).write, OF_THE_MUTEX),
    "read": (
        lambda client, name, options: client.rwlock(name, **options).read,
        {**OF_THE_MUTEX, **NOT_OF_MANY, **EXCLUDING},
    ),
}
TESTS = {name: test for name, test in vars(suite).items() if name.startswith("test_")}
CASES = [
    pytest.param(kind, name, marks=[mark for mark in getattr(test, "pytestmark", []) if mark.name == "needs"])
    for kind, (_, left_out) in KINDS.items()
    for name, test in TESTS.items()
    if name not in left_out
]


class _Client:
    def __init__(self, client: Any, make: Any) -> None:
        self._client = client
        self._make = make

    def lock(self, name: str, **options: Any) -> Any:
        return self._make(self._client, name, options)


class _Api:
    """A stage on which every lock is of another kind."""

    def __init__(self, api: Any, make: Any) -> None:
        self._api = api
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def client(self, **options: Any) -> _Client:
        return _Client(self._api.client(**options), self._make)

    async def raw(self, command: str, *args: Any) -> Any:
        args = tuple(ROOM.get(arg, arg) for arg in args)
        if command == "GET":  # who has it
            holders = await self._api.raw("ZRANGE", *args, -1, -1)  # behind the slots
            return holders[0] if holders else None
        reply = await self._api.raw(command, *args)
        return reply - 1000 if command == "PTTL" and args[0] in ROOM.values() else reply  # less the margin


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_as_a_lock(play: Any, kind: str, name: str) -> None:
    make, _ = KINDS[kind]
    test = TESTS[name]

    def play_with_rooms(scenario: Any) -> Any:
        return play(lambda api: scenario(_Api(api, make)))

    if "seconds" in inspect.signature(test).parameters:
        for seconds in (0.0, 0.0005, 0.05):
            test(play_with_rooms, seconds)
    else:
        test(play_with_rooms)


def test_what_is_left_out_still_exists() -> None:
    for _, left_out in KINDS.values():
        assert left_out.keys() <= TESTS.keys()
