"""Locks on several names: each client wants its own set of names, a letter each.

A name is *kept* for a waiter if the waiter's token is both in the key and in the queue of that name; no client relies
on a kept name. In addition to the invariants of every lock, the search reads the store after each step. It checks
whether a client holds only some of its names. It also checks whether a client was served before a waiter that is in all
its queues and arrived earlier. This check leaves out waiters that arrived more than 2 s ago, clients that a fault has
hit, and a client in one queue that was refused earlier, because that client may be served first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, Final

from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config, State
from holdfast.lab.search.visits import take_and_give_back
from holdfast.lab.subjects.rows import LAB_OPTIONS, QuietLease, fenced_config
from holdfast.names import Keys, keys_of
from holdfast.protocol.kinds.multi import BaseMultiLock, together
from holdfast.protocol.lock import BaseLock

_CLIENTS: Final = "ABCDEFGH"
_SHARED: Final = "b"  # the name whose key the search watches
# A stopped waiter is passed over after a second, by a step that other clients send every half second.
_KEPT_FOR_THE_STOPPED_US: Final = 1_600_000
_LENT_AFTER_US: Final = 2_000_000  # after this a kept name is sometimes lent to a later waiter; see lua/multi


class NamesView:
    """What a search reads from the store about the names that its clients want."""

    in_turn = False
    has_owner = True

    def __init__(self, wants: tuple[str, ...]) -> None:
        self._wants = dict(zip(_CLIENTS, cycle(wants), strict=False))
        names = sorted(set("".join(wants)))
        self._keys: dict[str, Keys] = {name: keys_of(name) for name in names}

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether no name is held. Then the waiter that arrived first can proceed, even if names are kept."""
        return not self._holders(store)

    def is_blocked_by(self, store: Any, name: str) -> bool:
        mine = f"{name}-".encode()
        return any(
            store.values.get(keys.main.encode(), b"").startswith(mine)
            or any(token.startswith(mine) for token in self._queue(store, letter))
            for letter, keys in self._keys.items()
        )

    def _queue(self, store: Any, letter: str) -> dict[bytes, float]:
        queue: dict[bytes, float] = store.values.get(self._keys[letter].shared[2].encode(), {})
        return queue

    def _holders(self, store: Any) -> dict[str, bytes]:
        """By name: the token of its holder, or of a waiter that does not know of its grant yet."""
        tokens = {letter: store.values.get(keys.main.encode()) for letter, keys in self._keys.items()}
        return {
            letter: token
            for letter, token in tokens.items()
            if token is not None and token not in self._queue(store, letter)
        }

    def look(self, model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        """Events for clients that hold only some of their names, and for clients that were overtaken in a queue."""
        if was.store == state.store:
            return
        before, after = model.server.store(was.store), model.server.store(state.store)
        held = self._holders(after)
        for letter, token in held.items():
            if any(held.get(other) != token for other in self._wants_of(token)):
                yield self._client_of(token), "torn", letter
        arrivals: dict[bytes, set[float]] = {}
        for letter in self._keys:
            for token, score in self._queue(after, letter).items():
                arrivals.setdefault(token, set()).add(score)
        for token, scores in arrivals.items():
            if len(scores) > 1:
                yield self._client_of(token), "uneven", ""
        held_before = self._holders(before)
        for letter, token in held.items():
            if held_before.get(letter) != token:
                for other in self._overtaken(before, after, letter, token):
                    client, late = self._client_of(token), self._client_of(other)
                    came_first = token not in self._queue(before, letter) and _came_first(was.arrived, client, late)
                    if not came_first and not state.touched & (1 << late | 1 << client):
                        yield late, "overtaken", letter

    def _overtaken(self, before: Any, after: Any, letter: str, token: bytes) -> Iterator[bytes]:
        """Waiters in that queue that are in all of their queues, and arrived before the client that got the name."""
        queue = self._queue(before, letter)
        arrived = queue.get(token, float("inf"))
        for other, score in queue.items():
            if after.now_us - score >= _LENT_AFTER_US:
                continue
            everywhere = all(self._queue(before, name).get(other) == score for name in self._wants_of(other))
            if (
                everywhere
                and len(self._wants_of(other)) > 1
                and score < arrived
                and other in self._queue(after, letter)
            ):
                yield other

    def _client_of(self, token: bytes) -> int:
        return _CLIENTS.find(token.decode()[0])

    def _wants_of(self, token: bytes) -> str:
        return self._wants.get(token.decode()[0], "")


def _came_first(arrived: tuple[int, ...], client: int, other: int) -> bool:
    """Whether ``client`` was refused before ``other``. A waiter in only one queue may then be served first."""
    return client in arrived and other in arrived and arrived.index(client) < arrived.index(other)


def make_several(driver: Any, names: str) -> Any:
    """A lock on these names, a letter each."""
    options = replace(LAB_OPTIONS, cohort=0)
    if len(names) == 1:
        return BaseLock(driver, keys_of(names), options, QuietLease)
    return BaseMultiLock(driver, together(tuple(map(keys_of, names))), options, QuietLease)


def several_config(*wants: str, **bounds: Any) -> Config:
    """For each client the names that it wants, a letter each. A newcomer wants the same as the first client."""

    def names_of(client: str) -> str:
        return wants[_CLIENTS.find(client) % len(wants)] if client in _CLIENTS else wants[0]

    def make_lock(driver: Any) -> Any:
        return make_several(driver, names_of(driver.name))

    async def visit(site: Site) -> None:
        await take_and_give_back(site, names_of(site.machine.name))

    view, keys = NamesView(wants), keys_of(_SHARED)
    bounds = {"clients": len(wants), "idle_us_per_fault": _KEPT_FOR_THE_STOPPED_US, **bounds}
    return fenced_config(key=keys.main, queue=keys.shared[2], view=view, looks=view.look, **bounds)._replace(
        make_lock=make_lock, program=visit, alike=len(set(wants)) == 1
    )
