"""Locks on several names as rows of a search: each client wants names of its own, a letter each.

A name is *kept* for a waiter whose token is in the key and in the queue of that name; no client relies on a kept name.
Beside the invariants of every lock, the search looks into the store after each step: whether a client holds some of its
names only, and whether one was served before another that stands in all its queues and arrived earlier (less than 2 s
ago, and neither was struck by a fault; a client that was refused earlier and stands in one queue may be served first).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, Final

from holdfast.lab.check import Check, History, Report, beside
from holdfast.lab.rows import LAB_TERMS, QuietLease, fenced_config
from holdfast.lab.site import Site
from holdfast.lab.state import Config, State
from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN
from holdfast.lab.visits import take_and_give_back
from holdfast.names import Keys, keys_of
from holdfast.protocol.lock import BaseLock
from holdfast.protocol.multi import BaseMultiLock, together

__all__ = ["SEVERAL_PROMISES", "SEVERAL_PROMISES_MEAN", "NamesView", "several_config"]

_CLIENTS: Final = "ABCDEFGH"
_SHARED: Final = "b"  # the name whose key the search watches
# A stopped waiter is passed over after a second, by a step that others send every half second.
_KEPT_FOR_THE_STOPPED_US: Final = 1_600_000
_LENT_AFTER_US: Final = 2_000_000  # from then on a kept name goes to a later waiter now and then; see multi_acquire.lua


class NamesView:
    """What the stores of a search say of the names that its clients want."""

    in_turn = False
    has_owner = True

    def __init__(self, wants: tuple[str, ...]) -> None:
        self._wants = dict(zip(_CLIENTS, cycle(wants), strict=False))
        names = sorted(set("".join(wants)))
        self._keys: dict[str, Keys] = {name: keys_of(name) for name in names}

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether no name is held. Then the waiter that arrived first can go on, whatever is kept for others."""
        return not self._holders(store)

    def has_place(self, store: Any, name: str) -> bool:
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
        """By name, the token that holds it: of a holder, or of a waiter that does not know of its grant yet."""
        tokens = {letter: store.values.get(keys.main.encode()) for letter, keys in self._keys.items()}
        return {
            letter: token
            for letter, token in tokens.items()
            if token is not None and token not in self._queue(store, letter)
        }

    def look(self, model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
        """Clients that hold some of their names only, and clients that were overtaken in a queue."""
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
        """Waiters in that queue that stand in all of theirs, and arrived before the one that has got the name."""
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
    """Whether that client was refused earlier, which counts for a waiter that stands in one queue only."""
    return client in arrived and other in arrived and arrived.index(client) < arrived.index(other)


def several_config(*wants: str, **bounds: Any) -> Config:
    """For each client the names that it wants, a letter each. A newcomer wants what the first does."""
    terms = replace(LAB_TERMS, cohort=0)

    def names_of(client: str) -> str:
        return wants[_CLIENTS.find(client) % len(wants)] if client in _CLIENTS else wants[0]

    def make_lock(driver: Any) -> Any:
        names = names_of(driver.name)
        if len(names) == 1:
            return BaseLock(driver, keys_of(names), terms, QuietLease)
        return BaseMultiLock(driver, together(tuple(map(keys_of, names))), terms, QuietLease)

    async def visit(site: Site) -> None:
        await take_and_give_back(site, names_of(site.machine.name))

    view, keys = NamesView(wants), keys_of(_SHARED)
    bounds = {"clients": len(wants), "idle_us_per_fault": _KEPT_FOR_THE_STOPPED_US, **bounds}
    return fenced_config(key=keys.main, queue=keys.shared[2], view=view, looks=view.look, **bounds)._replace(
        make_lock=make_lock, program=visit, alike=len(set(wants)) == 1
    )


def name_exclusion(history: History) -> Report:
    """No two hold the same name at the same time. The grant says which names it is for."""
    counted = False
    for holder, others in beside(history):
        counted = counted or holder.what != ""
        for other in others:
            if shared := set(holder.what) & set(other.what):
                why = f"{{0}} has the lock on {min(shared)!r}, and {{1}} still has it too"
                return Report(BROKEN, why, (holder.client, other.client))
    return Report(HOLDS if counted else UNKNOWN)


def all_or_none(history: History) -> Report:
    """A client holds all of its names, or none."""
    return _never(history, "torn", "{0} holds some of its names, and not the others")


def arrival_order(history: History) -> Report:
    """A waiter has one time of arrival, and once in all queues it is served before every waiter that arrived later."""
    uneven = _never(history, "uneven", "{0} stands in two queues with two times of arrival")
    if uneven.verdict == BROKEN:
        return uneven
    return _never(history, "overtaken", "{0} stands in all its queues, and a client that came later is served first")


def _never(history: History, kind: str, why: str) -> Report:
    granted = False
    for event in history:
        granted = granted or event.kind == "granted"
        if event.kind == kind:
            return Report(BROKEN, why, (event.client,))
    return Report(HOLDS if granted else UNKNOWN)


SEVERAL_PROMISES: Final = {
    "NameExclusion": Check(name_exclusion, frozenset({"granted", "extended"})),
    "AllOrNone": Check(all_or_none, frozenset({"torn"})),
    "ArrivalOrder": Check(arrival_order, frozenset({"overtaken", "uneven"})),
}
SEVERAL_PROMISES_MEAN: Final = {
    "NameExclusion": "No two clients hold the same name at the same time.",
    "AllOrNone": "A client holds all of its names, or none.",
    "ArrivalOrder": "A waiter has one time of arrival in all its queues, and is served before waiters that arrived "
    "later.",
}
