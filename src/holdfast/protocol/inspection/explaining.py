"""Why a wait lasts long: the present holder, since when it holds, and whether the two may wait for each other.

Invariant. To explain a wait changes nothing, and each request is sent once. Without an answer there is no explanation,
and the wait goes on as before.

A deadlock of two processes is seen from one of them: this caller holds a lock for which the process of the holder
waits. The two locks are looked at one after the other, and a process has many threads, so it is called possible. Longer
cycles are not looked for: a client knows what it holds itself, not what others hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.holder import Holder
from holdfast.protocol.effects import Effects, StepFailed, call, caller
from holdfast.protocol.inspection.locks import inspect_step
from holdfast.protocol.inspection.reading import Seen, seen_in

if TYPE_CHECKING:
    from holdfast.names import Keys
    from holdfast.protocol.hold import Hold
    from holdfast.protocol.keepalive import LeaseRegistry

_MOST_LOCKS: Final = 8  # locks of the caller that are looked at
_TIMEOUT: Final = 0.5  # as long as a waiter may be silent without losing its place


def explain_wait(hold: Hold, registry: LeaseRegistry) -> Effects[tuple[Holder | None, str]]:
    """The holder of what this hold waits for, and a sentence if this may be a deadlock."""
    holder = next((one for seen in (yield from _look(hold.keys)) for one in seen.holders.values()), None)
    if holder is None or not holder.host:
        return holder, ""
    for mine in registry.held_by((yield from caller()))[:_MOST_LOCKS]:
        for seen in (yield from _look(mine.keys)):
            if any((one.host, one.pid) == (holder.host, holder.pid) for one in seen.waiters.values()):
                return holder, f"Possibly a deadlock: that process waits for {mine.key!r}, which this caller holds"
    return holder, ""


def _look(keys: Keys) -> Effects[list[Seen]]:
    try:
        return seen_in(keys, (yield from call(inspect_step(keys), _TIMEOUT)))
    except StepFailed:
        return []
