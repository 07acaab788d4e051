"""Histories: the events of a run, and the verdict of an invariant on them.

A history is a list of events in the order in which they happened. It can come from a search, where that order is exact,
or from processes on real machines whose clocks are comparable. An invariant sees no difference, and does not depend on
recipes. A verdict is ``holds``, ``broken`` or ``unknown``. It is ``unknown`` if the history has no events that the
invariant is about (such as grants with fences, or waiters).

| event | what happened to its client |
|---|---|
| wants | an attempt to acquire begins |
| arrived | the server has refused it, and it waits its turn |
| minted | the server has granted it the lock, with that fence; it may not know yet |
| granted | acquire returned, with that fence and local deadline (None if there is none); ``what`` is "read", "write" or
  "permit 0 of 2" of a lock that several clients can hold, and "passed" if another task passed the lock on |
| extended | the holder may now rely on the lock until then |
| shared | a writer becomes a reader; it relies on no more from now on, even if its step is not executed yet |
| refused | acquire returned without the lock, or raised |
| believes | ``held`` was true just now, when its deadline was that |
| writes | it writes to the guarded resource, with its fence |
| lost | the holder was told of the loss |
| leaves, released, unreleased | release was called; it returned; it raised |
| crashed | it crashed |
| touched | a fault of the kind ``what`` hit it; client -1: it hit all clients |
| removed, stretched | one of its steps removed the key, or changed its deadline, while ``other`` owned it |
| left_behind | its attempt ended without a grant, none of its requests is under way, but the key is its own |
| newcomer | all clients are done (its client is -1), and a new one asks: ``what`` is "in", "out" if that took too long,
  or "left" if a key without a ttl is left |
| idle | it waits for a lock that has been free, or its own, for too long |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

Verdict = Literal["holds", "broken", "unknown"]
HOLDS: Final = "holds"
BROKEN: Final = "broken"
UNKNOWN: Final = "unknown"
ENDS_A_HOLD: Final = frozenset({"leaves", "crashed", "lost"})


class Event(NamedTuple):
    at_us: int
    client: int
    kind: str
    fence: int | None = None
    until_us: int | None = None
    what: str = ""
    other: int = -1
    task: int = 0  # which of the client's tasks, if several want the same lock


class Report(NamedTuple):
    verdict: Verdict
    why: str = ""  # in a sentence with {0}, {1}, ... for clients
    clients: tuple[int, ...] = ()  # the clients in the sentence


History = Sequence[Event]


Judge = Callable[[History], Report]


class Check(NamedTuple):
    judge: Judge
    ends_with: frozenset[str]  # the kinds of event that can break it
    meaning: str  # in a sentence for readers of the matrix


def invariant(checks: dict[str, Check], name: str, *ends_with: str) -> Callable[[Judge], Judge]:
    """Add a function to that table. The first paragraph of its docstring is its meaning."""

    def enter(judge: Judge) -> Judge:
        meaning = " ".join((judge.__doc__ or "").partition("\n\n")[0].split())
        checks[name] = Check(judge, frozenset(ends_with), meaning)
        return judge

    return enter


def judged(applies: bool) -> Report:
    """The report on an invariant that nothing has broken; unknown if no event was about it."""
    return Report(HOLDS if applies else UNKNOWN)


def never(history: History, kinds: dict[str, str], *about: str) -> Report:
    """Events of these kinds break it; the values are the reasons. Unknown if no event has a kind in ``about``."""
    applies = False
    for event in history:
        applies = applies or event.kind in about
        if event.kind in kinds:
            return Report(BROKEN, kinds[event.kind], (event.client,))
    return judged(applies)


def beside(history: History) -> Iterator[tuple[Event, list[Event]]]:
    """Each grant when its hold begins or is extended, and the grants that other clients hold at that time."""
    holds: dict[int, tuple[Event, int | None]] = {}
    for event in history:
        if event.kind in ENDS_A_HOLD:
            holds.pop(event.client, None)
        elif event.kind == "shared" and event.client in holds:
            grant, until_us = holds[event.client]
            holds[event.client] = grant._replace(what=event.what), until_us
        elif event.kind == "granted" or (event.kind == "extended" and event.client in holds):
            grant = event if event.kind == "granted" else holds[event.client][0]
            yield (
                grant,
                [
                    other
                    for client, (other, until_us) in holds.items()
                    if client != event.client and (until_us is None or until_us > event.at_us)
                ],
            )
            holds[event.client] = grant, event.until_us
