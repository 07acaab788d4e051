"""The invariants, each a function of a history.

A history is a list of events in the order in which they happened. It can come from a search, where that order is
exact, or from processes on real machines whose clocks are comparable; a checker sees no difference, and knows nothing
of recipes. A verdict is ``holds``, ``broken`` or ``unknown``: the last if the history says nothing about the matter
(no fences in it, nobody waited).

A *hold* runs from acquire's return (``granted``) to release's call (``leaves``), and is cut short by its holder's death
(``crashed``), by word of its loss (``lost``), and at its local deadline, where the protocol itself keeps one.

| event | client | what it says |
|---|---|---|
| wants | who | an attempt to acquire begins |
| arrived | who | the server has refused it, and it waits its turn |
| minted | for whom | the server has given it the lock, with that fence; it may not know yet |
| granted | who | acquire returned; its fence and local deadline, None where there is none; in ``what``, of a kind of
  lock that several can hold: "read", "write", or "permit 0 of 2"; of one that another task passed on: "passed" |
| extended | who | the holder may now rely on it until then |
| refused | who | acquire returned without, or raised |
| believes | who | ``held`` was true just now, when its deadline was that |
| writes | who | it writes to what the lock guards, with its fence |
| lost | who | the holder was told that it is over |
| leaves, released, unreleased | who | release was called; it returned; it raised |
| crashed | who | it is no more |
| touched | who, or -1 for all | a fault befell it, of the kind in ``what`` |
| removed, stretched | who did it | the key, or its deadline, was changed by a step of that client; ``other`` owned it |
| left_behind | who | its attempt ended without a grant, nothing of it is under way, and yet the key is its |
| newcomer | -1 | all is over, and somebody new asks: ``what`` is "in", or "out" if that took too long, or "left" if
  there is something without a ttl |
| idle | who | it waits for a lock that has been free, or its own, for too long |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN, Verdict

__all__ = [
    "CHECKS",
    "INVARIANTS",
    "MEANING",
    "PASSED",
    "ROOM_CHECKS",
    "Check",
    "Event",
    "History",
    "Report",
    "beside",
    "check",
]


class Event(NamedTuple):
    at_us: int
    client: int
    kind: str
    fence: int | None = None
    until_us: int | None = None
    what: str = ""
    other: int = -1
    task: int = 0  # which of the client's tasks, where several want the same lock


class Report(NamedTuple):
    verdict: Verdict
    why: str = ""  # in a sentence with {0}, {1}, ... for clients
    clients: tuple[int, ...] = ()  # who those are


History = Sequence[Event]
_HOLDS: Final = Report(HOLDS)
_UNKNOWN: Final = Report(UNKNOWN)
BLOCK: Final = 64  # so many fences may be set aside with one grant, for those to whom it is passed on
PASSED: Final = "passed"
_ENDS_A_HOLD: Final = frozenset({"leaves", "crashed", "lost"})


def mutual_exclusion(history: History) -> Report:
    """No two holds overlap."""
    open_until: dict[tuple[int, int], int | None] = {}  # by client and task
    for event in history:
        who = event.client, event.task
        if event.kind == "extended" and who not in open_until:
            continue
        if event.kind in ("granted", "extended"):
            if event.kind == "extended" and event.until_us is not None and event.until_us <= event.at_us:
                open_until.pop(who)  # it is over all the same
                continue
            for other, until_us in open_until.items():
                if other != who and (until_us is None or until_us > event.at_us):
                    why = "{0} has the lock, and {1} still has it too"
                    return Report(BROKEN, why, (event.client, other[0]))
            open_until[who] = event.until_us
        elif event.kind == "crashed":
            open_until = {other: until_us for other, until_us in open_until.items() if other[0] != event.client}
        elif event.kind in _ENDS_A_HOLD:
            open_until.pop(who, None)
    return _HOLDS


def fenced_safety(history: History) -> Report:
    """A resource that refuses lower fences never takes a write from a hold that a later one has superseded."""
    seen: int | None = None
    latest: Event | None = None  # the hold that was granted last
    known_when_asked: dict[tuple[int, int], Event | None] = {}
    for event in history:
        who = event.client, event.task
        if event.kind == "wants":
            known_when_asked[who] = latest
        elif event.kind == "granted":
            # Who had asked before, and has a lower fence, was granted it before the latest, and only learns of it now.
            if known_when_asked.get(who, latest) is latest or not _is_lower(event, latest):
                latest = event
        elif event.kind == "writes":
            if event.fence is not None:
                if seen is not None and event.fence < seen:
                    continue  # the resource has refused it
                seen = event.fence
            if latest is not None and (latest.client, latest.task) != who:
                how = "without a fence nobody can refuse it" if event.fence is None else "and its fence does not tell"
                why = f"{{0}} writes although {{1}} has taken over; {how}"
                return Report(BROKEN, why, (event.client, latest.client))
    return _HOLDS


def _is_lower(event: Event, other: Event | None) -> bool:
    """Whether both have fences, and the first has the lower one."""
    if event.fence is None or other is None or other.fence is None:
        return False
    return event.fence < other.fence


def owner_only_release(history: History) -> Report:
    """Only the holder's own steps remove the key."""
    for event in history:
        if event.kind == "removed":
            return Report(BROKEN, "{0} takes away the lock of {1}", (event.client, event.other))
    return _HOLDS


def owner_only_stretch(history: History) -> Report:
    """Only the holder's own steps change the key's deadline."""
    for event in history:
        if event.kind == "stretched":
            return Report(BROKEN, f"{{0}} {event.what} the lock of {{1}}", (event.client, event.other))
    return _HOLDS


def no_false_hold(history: History) -> Report:
    """``held`` is never true after the local deadline."""
    asked = False
    for event in history:
        if event.kind == "believes" and event.until_us is not None:
            asked = True
            if event.at_us >= event.until_us:
                return Report(BROKEN, "{0} is told that it holds the lock, after its own deadline", (event.client,))
    return _HOLDS if asked else _UNKNOWN


def no_orphan(history: History) -> Report:
    """Once everyone alive has stopped wanting the lock, a newcomer gets in within ttl + bound."""
    asked = False
    for event in history:
        if event.kind == "newcomer":
            asked = True
            if event.what != "in":
                left = "and something is left that no time removes"
                out = "and yet a newcomer does not get in"
                return Report(BROKEN, f"nobody wants the lock any more, {left if event.what == 'left' else out}")
    return _HOLDS if asked else _UNKNOWN


def no_lost_wakeup(history: History) -> Report:
    """A free lock and a live waiter make progress within the bound."""
    waited = False
    for event in history:
        waited = waited or event.kind in ("arrived", "granted")
        if event.kind == "idle":
            return Report(BROKEN, "the lock is free, and {0} goes on waiting for it", (event.client,))
    return _HOLDS if waited else _UNKNOWN


def fence_monotone(history: History) -> Report:
    """Each grant has a greater fence than all before.

    Before means: by the server's order where the history tells it (``minted``). Else a grant comes before another if it
    was known to its holder when the other had not even begun to ask; but no two ever have the same fence. And a holder
    has one that the server gave it, or one of the block that came with it.
    """
    greatest: Event | None = None
    known_when_asked: dict[tuple[int, int], Event | None] = {}
    by_server = any(event.kind == "minted" for event in history)
    given: dict[int, list[int]] = {}
    seen: dict[int, Event] = {}
    for event in history:
        if event.kind == "wants":
            known_when_asked[event.client, event.task] = greatest
        if by_server and event.fence is not None:
            if event.kind == "minted":
                given.setdefault(event.client, []).append(event.fence)
            elif event.kind == "granted" and not any(
                0 <= event.fence - first < BLOCK for first in given.get(event.client, ())
            ):
                return Report(BROKEN, "{0} has a fence that was never given to it", (event.client,))
        if event.kind != ("minted" if by_server else "granted") or event.fence is None:
            continue
        before = greatest if by_server else known_when_asked.get((event.client, event.task), greatest)
        low = before is not None and before.fence is not None and event.fence <= before.fence
        same = seen.setdefault(event.fence, event)
        if low or same is not event:
            other = before if low and before is not None else same
            return Report(BROKEN, "the fence of {0} is not greater than that of {1}", (event.client, other.client))
        if greatest is None or event.fence > (greatest.fence or 0):
            greatest = event
    return _UNKNOWN if greatest is None else _HOLDS


def acquire_totality(history: History) -> Report:
    """Each attempt ends granted, refused, or cleaned up."""
    ended = False
    for event in history:
        ended = ended or event.kind in ("granted", "refused")
        if event.kind == "left_behind":
            return Report(BROKEN, "{0} did not get the lock, and yet shuts everybody out in its name", (event.client,))
    return _HOLDS if ended else _UNKNOWN


def fifo(history: History) -> Report:
    """Among live waiters whom no fault has befallen, who comes first is served first.

    Tasks of one client queue among themselves. What one of them passes on to the next ("passed") is not a matter of the
    queue on the server, and how often that may be is bounded elsewhere.
    """
    waiting: list[int] = []
    tasks: dict[int, list[int]] = {}  # by client: those that want it, in order
    touched: set[int] = set()
    came = False
    for event in history:
        if event.kind == "touched":
            if event.what == "script_flush":
                continue  # which is no excuse: the queue is still there
            if event.client < 0:
                return _HOLDS if came else _UNKNOWN  # from here on the order may be lost, as a server may forget it
            touched.add(event.client)
        elif event.kind == "wants":
            tasks.setdefault(event.client, []).append(event.task)
        elif event.kind == "arrived" and event.client not in waiting:
            came = True
            waiting.append(event.client)
        elif event.kind in ("granted", "refused", "crashed"):
            mine = tasks.get(event.client, [])
            if event.kind == "granted" and event.task in mine[1:] and event.client not in touched:
                return Report(
                    BROKEN, "{0} has two tasks that want the lock, and the later one gets it", (event.client,)
                )
            if event.task in mine:
                mine.remove(event.task)
            if event.kind == "refused" and mine:
                continue  # the next of its tasks goes on in its place
            if event.kind == "granted" and event.what != PASSED:
                place = waiting.index(event.client) if event.client in waiting else len(waiting)
                for other in waiting[:place]:
                    if other not in touched and event.client not in touched:
                        why = "{0} gets the lock before {1}, who came first"
                        return Report(BROKEN, why, (event.client, other))
            if event.client in waiting:
                waiting.remove(event.client)
    return _HOLDS if came else _UNKNOWN


def permit_count(history: History) -> Report:
    """Of a semaphore: no more hold at the same time than there are permits, and no two the same one."""
    counted = False
    for holder, others in beside(history):
        if not holder.what.startswith("permit"):
            continue
        counted = True
        _, slot, _, permits = holder.what.split(" ")
        if len(others) >= int(permits):
            return Report(BROKEN, f"{{0}} has a permit, and {permits} others have one too", (holder.client,))
        for other in others:
            if other.what.split(" ")[1] == slot:
                return Report(BROKEN, "{0} and {1} have the same permit", (holder.client, other.client))
    return _HOLDS if counted else _UNKNOWN


def mode_exclusion(history: History) -> Report:
    """Of a readers-writer lock: nobody is beside a writer."""
    counted = False
    for holder, others in beside(history):
        counted = counted or holder.what in ("read", "write")
        for other in others:
            if "write" in (holder.what, other.what):
                why = f"{{0}} may {holder.what}, and {{1}} still may {other.what}"
                return Report(BROKEN, why, (holder.client, other.client))
    return _HOLDS if counted else _UNKNOWN


def beside(history: History) -> Iterator[tuple[Event, list[Event]]]:
    """Whoever begins to hold, or goes on, by its grant; and the grants of those who hold beside it."""
    holds: dict[int, tuple[Event, int | None]] = {}
    for event in history:
        if event.kind in _ENDS_A_HOLD:
            holds.pop(event.client, None)
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


class Check(NamedTuple):
    judge: Callable[[History], Report]
    ends_with: frozenset[str]  # the kinds of event that can break it


def _check(judge: Callable[[History], Report], *ends_with: str) -> Check:
    return Check(judge, frozenset(ends_with))


CHECKS: Final = {
    "MutualExclusion": _check(mutual_exclusion, "granted", "extended"),
    "FencedSafety": _check(fenced_safety, "writes"),
    "OwnerOnlyRelease": _check(owner_only_release, "removed"),
    "OwnerOnlyStretch": _check(owner_only_stretch, "stretched"),
    "NoFalseHold": _check(no_false_hold, "believes"),
    "NoOrphan": _check(no_orphan, "newcomer"),
    "NoLostWakeup": _check(no_lost_wakeup, "idle"),
    "FenceMonotone": _check(fence_monotone, "granted", "minted"),
    "AcquireTotality": _check(acquire_totality, "left_behind"),
    "Fifo": _check(fifo, "granted"),
}
INVARIANTS: Final = tuple(CHECKS)

# What is asked of semaphores and readers-writer locks, in the place of mutual exclusion. The matrix is of locks alone.
ROOM_CHECKS: Final = {
    "PermitCount": _check(permit_count, "granted", "extended"),
    "ModeExclusion": _check(mode_exclusion, "granted", "extended"),
}

MEANING: Final = {
    "MutualExclusion": "Two never hold the lock at the same time.",
    "FencedSafety": "What the lock guards never takes a write from somebody whose lock has gone to the next.",
    "OwnerOnlyRelease": "Nobody takes away a lock that is somebody else's.",
    "OwnerOnlyStretch": "Nobody makes somebody else's lock last longer, or shorter.",
    "NoFalseHold": "Nobody is told that it holds the lock when its own time is up.",
    "NoOrphan": "A lock that nobody wants any more becomes free by itself.",
    "NoLostWakeup": "Nobody goes on waiting for a lock that is free.",
    "FenceMonotone": "Every holder gets a greater number than all before it.",
    "AcquireTotality": "Who did not get the lock leaves nothing behind that shuts others out.",
    "Fifo": "Who comes first is served first.",
}


def check(history: History) -> dict[str, Report]:
    """What this history says of every invariant."""
    return {name: check.judge(history) for name, check in CHECKS.items()}
