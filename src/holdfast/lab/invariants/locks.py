"""The invariants of every lock, each a function of a history.

A *hold* runs from acquire's return (``granted``) to release's call (``leaves``). It ends earlier if its holder crashes
(``crashed``), is told of its loss (``lost``), or reaches its local deadline, if the protocol has one.
"""

from __future__ import annotations

from typing import Final

from holdfast.lab.invariants.history import (
    BROKEN,
    ENDS_A_HOLD,
    HOLDS,
    Check,
    Event,
    History,
    Report,
    beside,
    invariant,
    judged,
    never,
)

CHECKS: Final[dict[str, Check]] = {}  # the columns of the matrix
POOL_CHECKS: Final[dict[str, Check]] = {}  # of semaphores and readers-writer locks, instead of mutual exclusion
BLOCK: Final = 64  # fences that one grant may reserve for the tasks to which the lock is passed on
PASSED: Final = "passed"


@invariant(CHECKS, "MutualExclusion", "granted", "extended")
def mutual_exclusion(history: History) -> Report:
    """Two clients never hold the lock at the same time."""
    open_until: dict[tuple[int, int], int | None] = {}  # by client and task
    for event in history:
        who = event.client, event.task
        if event.kind == "extended" and who not in open_until:
            continue
        if event.kind in ("granted", "extended"):
            if event.kind == "extended" and event.until_us is not None and event.until_us <= event.at_us:
                open_until.pop(who)  # the extension came too late
                continue
            for other, until_us in open_until.items():
                if other != who and (until_us is None or until_us > event.at_us):
                    why = "{0} has the lock, and {1} still has it too"
                    return Report(BROKEN, why, (event.client, other[0]))
            open_until[who] = event.until_us
        elif event.kind == "crashed":
            open_until = {other: until_us for other, until_us in open_until.items() if other[0] != event.client}
        elif event.kind in ENDS_A_HOLD:
            open_until.pop(who, None)
    return Report(HOLDS)


@invariant(CHECKS, "FencedSafety", "writes")
def fenced_safety(history: History) -> Report:
    """The protected resource never accepts a write of a client whose lock has passed to the next holder.

    The resource refuses lower fences. A write breaks this invariant if a later hold has replaced the writer's hold.
    """
    seen: int | None = None
    latest: Event | None = None  # the hold that was granted last
    known_when_asked: dict[tuple[int, int], Event | None] = {}
    for event in history:
        who = event.client, event.task
        if event.kind == "wants":
            known_when_asked[who] = latest
        elif event.kind == "granted":
            # A client that asked before the latest grant, and has a lower fence, was granted the lock before it.
            if known_when_asked.get(who, latest) is latest or not _is_lower(event, latest):
                latest = event
        elif event.kind == "writes":
            if event.fence is not None:
                if seen is not None and event.fence < seen:
                    continue  # the resource has refused it
                seen = event.fence
            if latest is not None and (latest.client, latest.task) != who:
                no_fence = event.fence is None
                how = "without a fence it cannot be refused" if no_fence else "and the resource accepts its fence"
                why = f"{{0}} writes although {{1}} has taken over; {how}"
                return Report(BROKEN, why, (event.client, latest.client))
    return Report(HOLDS)


def _is_lower(event: Event, other: Event | None) -> bool:
    """Whether both have fences, and the first has the lower one."""
    if event.fence is None or other is None or other.fence is None:
        return False
    return event.fence < other.fence


@invariant(CHECKS, "OwnerOnlyRelease", "removed")
def owner_only_release(history: History) -> Report:
    """No client removes a lock that belongs to another client."""
    for event in history:
        if event.kind == "removed":
            return Report(BROKEN, "{0} removes the lock of {1}", (event.client, event.other))
    return Report(HOLDS)


@invariant(CHECKS, "OwnerOnlyStretch", "stretched")
def owner_only_stretch(history: History) -> Report:
    """No client makes the lock of another client last longer, or shorter."""
    for event in history:
        if event.kind == "stretched":
            return Report(BROKEN, f"{{0}} {event.what} the lock of {{1}}", (event.client, event.other))
    return Report(HOLDS)


@invariant(CHECKS, "NoFalseHold", "believes")
def no_false_hold(history: History) -> Report:
    """No client is told that it holds the lock after its own time has ended."""
    asked = False
    for event in history:
        if event.kind == "believes" and event.until_us is not None:
            asked = True
            if event.at_us >= event.until_us:
                return Report(BROKEN, "the lease of {0} says held, after its own deadline", (event.client,))
    return judged(asked)


@invariant(CHECKS, "NoOrphan", "newcomer")
def no_orphan(history: History) -> Report:
    """A lock that no client wants any more becomes free by itself.

    Once every live client has stopped wanting it, a newcomer gets in within ttl + bound.
    """
    asked = False
    for event in history:
        if event.kind == "newcomer":
            asked = True
            if event.what != "in":
                left = "and a key without a ttl is left"
                out = "but a newcomer does not get it"
                return Report(BROKEN, f"no client wants the lock any more, {left if event.what == 'left' else out}")
    return judged(asked)


@invariant(CHECKS, "NoLostWakeup", "idle")
def no_lost_wakeup(history: History) -> Report:
    """No client continues to wait for a lock that is free.

    A free lock and a live waiter make progress within the bound.
    """
    return never(history, {"idle": "the lock is free, and {0} still waits for it"}, "arrived", "granted")


@invariant(CHECKS, "FenceMonotone", "granted", "minted")
def fence_monotone(history: History) -> Report:
    """Every holder gets a greater fence than all holders before it.

    If the history has the order of the server (``minted``), that order counts. If not, a grant is earlier than another
    if its holder knew of it before the other client asked. No two grants have the same fence. The fence of a holder is
    one that the server minted for it, or one of the block that was reserved with it.
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
    return judged(greatest is not None)


@invariant(CHECKS, "AcquireTotality", "left_behind")
def acquire_totality(history: History) -> Report:
    """A client that did not get the lock leaves nothing behind that excludes others.

    Each attempt ends granted, refused, or cleaned up.
    """
    why = "{0} did not get the lock, but a key of its attempt blocks others"
    return never(history, {"left_behind": why}, "granted", "refused")


@invariant(CHECKS, "Fifo", "granted")
def fifo(history: History) -> Report:
    """Clients are served in the order in which they came.

    Tasks of one client have a local queue. If a task passes the lock to the next ("passed"), the queue on the server
    does not change; how often that may happen is checked elsewhere.
    """
    waiting: list[int] = []
    tasks: dict[int, list[int]] = {}  # by client: the tasks that want the lock, in order
    touched: set[int] = set()
    came = False
    for event in history:
        if event.kind == "touched":
            if event.what == "script_flush":
                continue  # the queue is still there, so its order must be kept
            if event.client < 0:
                return judged(came)  # the server may have lost the queue
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
                continue  # the next task of this client waits instead
            if event.kind == "granted" and event.what != PASSED:
                place = waiting.index(event.client) if event.client in waiting else len(waiting)
                for other in waiting[:place]:
                    if other not in touched and event.client not in touched:
                        why = "{0} gets the lock before {1}, which came first"
                        return Report(BROKEN, why, (event.client, other))
            if event.client in waiting:
                waiting.remove(event.client)
    return judged(came)


@invariant(POOL_CHECKS, "PermitCount", "granted", "extended")
def permit_count(history: History) -> Report:
    """No more clients hold at the same time than there are permits, and no two have the same permit."""
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
    return judged(counted)


@invariant(POOL_CHECKS, "ModeExclusion", "granted", "extended")
def mode_exclusion(history: History) -> Report:
    """A writer is alone."""
    counted = False
    for holder, others in beside(history):
        counted = counted or holder.what in ("read", "write")
        for other in others:
            if "write" in (holder.what, other.what):
                why = f"{{0}} may {holder.what}, and {{1}} still may {other.what}"
                return Report(BROKEN, why, (holder.client, other.client))
    return judged(counted)


INVARIANTS: Final = tuple(CHECKS)
MEANING: Final = {name: check.meaning for name, check in CHECKS.items()}


def check(history: History) -> dict[str, Report]:
    """The report of every invariant on this history."""
    return {name: check.judge(history) for name, check in CHECKS.items()}
