"""Breaking a lock: an operator ends a hold whose holder is stuck.

Invariant. A break ends exactly the hold that was inspected: the step compares the token on the server, and the fence if
one was given, and changes nothing if they differ. After it

- the fence on the server is greater than every fence of the broken hold, so a guard that has seen it, or has seen a
  later holder, refuses the broken holder (FenceMonotone, FencedSafety);
- no late request of the broken holder brings the hold back: its token has a tombstone;
- the lock goes to the next waiter, as after a release;
- the holder is told: the server reports the write to the tracked key, and a renewal, an extension or a release finds
  that the key is not its own. The tombstone names the operator and the reason;
- the history has an entry.

A break gives up mutual exclusion if the holder does not notice it: a process that was stopped or cut off continues its
guarded work when it runs again, until it checks its lease. The operator decides to accept that. In any case the lease
ends, by the holder's own clock, at the end of its ttl.

Atomic: the look, and the break step. Between the two the hold may end: then the step finds another token, and nothing
is broken. The step is idempotent by token: sent again after a lost reply, it finds its own tombstone.

Why not DEL? It also frees a later hold, notifies no waiter and leaves no record, and a late request of the holder
brings the key back.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from holdfast import events
from holdfast.errors import InvalidConfig, NotHeld
from holdfast.holder import Broken, Holder, holder_of, id_of, is_foreign
from holdfast.lease import MAX_FENCE
from holdfast.names import Keys, unprintable_in
from holdfast.options import FENCES, LockOptions
from holdfast.protocol.cache.entry import entry_of
from holdfast.protocol.effects import Effects, Step, new_token, report
from holdfast.protocol.inspection.history import who_and_why
from holdfast.protocol.inspection.locks import ask, look
from holdfast.protocol.inspection.reading import CACHE, RESERVED, Seen
from holdfast.protocol.kinds.pool import pool_keys
from holdfast.protocol.replies import DONE, TAKEN
from holdfast.untrusted import MOST_REASON

_KEPT: Final = "is kept for a waiter and held by no client: it goes to that waiter, or is free again within 2 s"
_MOST: Final = 100_000  # holders that are searched for the one to break


class Break(NamedTuple):
    """Which hold to break, and what the history says about it."""

    fence: int | None
    holder_id: str | None
    reason: str
    label: str  # of the operator

    def fits(self, holder: Holder, fences: int = 1) -> bool:
        """Whether to break this holder. ``fences``: how many fences its grant may include, for local passes."""
        if self.holder_id is not None and holder.id != self.holder_id:
            return False
        return self.fence is None or (holder.fence is not None and 0 <= self.fence - holder.fence < fences)


def check_break(name: str, fence: Any, holder_id: Any, reason: Any, label: str) -> Break:
    """What the caller asked for, checked."""
    what, see = f"break_lock({name!r:.60})", "see client.inspect(name).holders"
    if fence is None and holder_id is None:
        raise InvalidConfig(what, f"say which holder: fence=, or holder_id= if it has no fence; {see}")
    if fence is not None and (type(fence) is not int or not 0 < fence <= MAX_FENCE):
        raise InvalidConfig(f"fence={fence!r:.60}", f"give the fence of the holder; {see}")
    if holder_id is not None and (not isinstance(holder_id, str) or not holder_id):
        raise InvalidConfig(f"holder_id={holder_id!r:.60}", f"give the id of the holder; {see}")
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidConfig(what, "give a reason: the holder and the history get it")
    reason = " ".join(reason.split())
    if why := unprintable_in(reason):
        raise InvalidConfig(f"reason={reason!r:.60}", why)
    if len(reason) > MOST_REASON:
        raise InvalidConfig(f"reason={reason!r:.60}", f"it has {len(reason):,} characters: give at most {MOST_REASON}")
    return Break(fence, holder_id, reason, label)


def break_lock(driver: Any, keys: Keys, options: LockOptions, wanted: Break) -> Effects[Broken]:
    """End the hold of that name. NotHeld, and nothing was changed, if there is no such hold."""
    found = yield from look(keys, options, _MOST)
    target = _chosen(found, wanted)
    if target is None:
        raise NotHeld(keys.name, _not_found(found, wanted), key=keys.key)
    seen, token, holder = target
    if holder.mode == RESERVED:
        raise NotHeld(keys.name, _KEPT, key=keys.key)
    operator = yield from new_token(wanted.label)
    compared, retention = "" if wanted.fence is None else str(wanted.fence), options.wire_args[1]
    step = _step(seen, keys, token, (compared, retention, who_and_why(token, operator, wanted.reason)))
    code, raised, at_us = yield from ask(step, keys, options)
    if code != DONE:
        raise NotHeld(keys.name, _KEPT if code == TAKEN else _not_found([], wanted), key=keys.key)
    for key in (keys.main, step.keys[0]):
        driver.registry.check_key(key)  # the holder may be in this client, to which its own writes are not reported
    yield from report(
        events.Broken(
            name=keys.name,
            key=keys.key,
            kind=seen.kind,
            fence=holder.fence,
            reason=wanted.reason,
            holder=holder,
        )
    )
    by = holder_of(operator.encode())
    return Broken(keys.name, at_us / 1e6, holder, by, wanted.reason, raised or None, keys.key)


def _chosen(found: list[Seen], wanted: Break) -> tuple[Seen, bytes, Holder] | None:
    every = [(seen, token, holder) for seen in found for token, holder in seen.holders.items()]
    for target in every:
        if wanted.fits(target[2]):
            return target
    return next((target for target in every if target[0].kind == "lock" and wanted.fits(target[2], FENCES)), None)


def _not_found(found: list[Seen], wanted: Break) -> str:
    which = f"fence {wanted.fence}" if wanted.fence is not None else f"id {wanted.holder_id}"
    present = [holder for seen in found for holder in seen.holders.values()]
    if not present:
        return f"is not held with {which} any more, and nothing was changed: inspect it again"
    now = "; ".join(f"{holder} (fence {holder.fence}, id {holder.id})" for holder in present[:3])
    return f"is not held with {which}, and nothing was changed. Its holder is now {now}"


def _step(seen: Seen, keys: Keys, token: bytes, args: tuple[str, ...]) -> Step:
    """The break step of its kind. ``args``: the fence, the retention of fences, and the text for the history."""
    text, history = token.decode(errors="replace"), f"{keys.head}history{keys.tail}"
    recorded = (history,) if is_foreign(token) else (history, keys.tombstone(text))
    if seen.kind == CACHE:
        return Step("break_claim", (*entry_of(keys.main).shared, *recorded), (text, args[-1]))
    if seen.kind in ("semaphore", "rwlock"):
        return Step("break_permit", (*pool_keys(keys), *recorded), (text, *args))
    return Step("break_lock", (*keys.shared, *recorded), (id_of(token), *args))
