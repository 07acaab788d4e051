"""Handing a hold over: the giver gets a ticket, and a process that has the ticket adopts the hold.

Invariant. Two processes never share a hold. The giver's hold ends before there is a ticket. Adopting replaces the
giver's token by a new one, if and only if the giver's is still there; so a ticket serves once, and never takes a lock
that is free or another holder's. The adopter gets exactly what the giver had: the lock (still reentrant if it was), all
of several names, the same slot of a semaphore, the same side of a readers-writer lock. The new fence is greater than
all fences that the giver had, or had set aside for its cohort.

Atomic: ``hand_over`` makes the hold last one ttl from now on the server; that is the time to adopt it, as it is not
renewed meanwhile. ``adopt`` swaps the token. Both are idempotent: after a lost reply they are sent again. An adopter
that gives up abandons its new token, with a tombstone; the giver's token is not touched. Waiters notice neither step,
because nothing becomes free.

If hand_over fails, the lease is as it was: held, or lost. If it succeeds, the lease has ended.

A ticket is a capability, like the token in it: its owner can take the lock. So it is opaque, safe in a URL, and hidden
by its repr. It says what it is for, so that it cannot be mistaken for another ticket.

Clocks. A ticket carries no time: only the server knows how long it is valid.

An adopted hold stays out of cohorts: it did not wait in this process's local queue, and is not passed on there. For the
same reason it has an object slot of its own.

Where one step cannot reach all names (see parts.py), they are adopted part by part. If the adopter ends in between, it
has some of the names and the giver's token is in the others: all end by their ttl, and the ticket is of no more use.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

from holdfast.errors import InvalidConfig, NotAcquired, Unsupported
from holdfast.lease import BaseLease
from holdfast.protocol import mutex
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, attach, caller, clock, new_token
from holdfast.protocol.hold import Hold
from holdfast.protocol.leases import Driver
from holdfast.protocol.lock import BaseLock, weakly
from holdfast.protocol.refusals import refuse_closed
from holdfast.protocol.replication import confirm
from holdfast.protocol.replies import NotAdopted
from holdfast.protocol.reporting import observe_acquire, observe_release
from holdfast.protocol.retry import outage, until_answered
from holdfast.protocol.wait.cohort import ObjectSlot
from holdfast.untrusted import MAX_NAME_BYTES, shown

VERSION: Final = "hf1-"
LONGEST: Final = 4 * 37 * MAX_NAME_BYTES // 3  # the most names that a lock can have, its token, and the rest
_SUM_BYTES: Final = 4

# A ticket is for a kind of lock, with its mode as in pool.py.
_OFFERED: Final = re.compile(r"lock|rlock|semaphore n[1-9][0-9]{0,6}|rwlock (?:any|all)")

L = TypeVar("L", bound=BaseLease)

_ANEW: Final = "Acquire it, or ask for another ticket"
_REFUSED: Final = {
    0: f"the ticket's time ran out, or it was adopted and the lock was released since. {_ANEW}",
    -1: f"another holder has it: the ticket was adopted already, or its time ran out. {_ANEW}",
    -2: "this attempt was abandoned before its request arrived",
    -3: f"the ticket was adopted already, or its time ran out. {_ANEW}",
}


class Ticket(str):
    """What ``hand_over`` returns: a str whose repr does not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<ticket>"


class Offer(NamedTuple):
    """The contents of a ticket."""

    kind: str
    mode: str
    names: tuple[str, ...]
    token: str

    def __repr__(self) -> str:
        return f"<offer of {_describe(self, self.names)}>"  # without the token


def _describe(what: Offer | Hold, each: Sequence[str]) -> str:
    names = ", ".join(f"{name!r:.80}" for name in each)
    if what.kind == "semaphore":
        return f"a permit of the semaphore {names}"
    if what.kind == "rwlock":
        return f"the {'writing' if what.mode == 'all' else 'reading'} side of {names}"
    if what.kind == "rlock":
        return f"the reentrant lock {names}"
    return f"the lock {names}" if len(each) == 1 else f"a lock on {names}"


def write_ticket(hold: Hold) -> Ticket:
    main = hold.main_keys[0]
    namespace = main.removesuffix(hold.names[0])
    # No name or token contains a line break.
    text = "\n".join((f"{hold.kind} {hold.mode}".strip(), hold.token, namespace, *hold.names)).encode()
    packed = urlsafe_b64encode(crc32(text).to_bytes(_SUM_BYTES, "big") + text)
    return Ticket(VERSION + packed.decode().rstrip("="))


def read_ticket(ticket: str, namespace: str) -> Offer:
    """What the ticket offers to a client with that namespace; InvalidConfig, which never shows it, if it is invalid."""
    if not isinstance(ticket, str) or not ticket.startswith(VERSION) or len(ticket) > LONGEST:
        raise InvalidConfig("a ticket", "pass hand_over()'s string unchanged")
    packed = ticket[len(VERSION) :]
    try:
        data = urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        offered, token, theirs, *names = data[_SUM_BYTES:].decode().split("\n")
    except ValueError:  # not ASCII, not base64, not UTF-8; or too few lines
        names = []
    if not names or crc32(data[_SUM_BYTES:]).to_bytes(_SUM_BYTES, "big") != data[:_SUM_BYTES]:
        raise InvalidConfig("a ticket", "checksum mismatch: pass hand_over()'s string unchanged")
    kind, _, mode = offered.partition(" ")
    if not _OFFERED.fullmatch(offered) or (offered != "lock" and len(names) > 1):
        raise Unsupported(f"a ticket for a {shown(offered, 20)}", "a newer version of Holdfast may support it")
    offer = Offer(kind, mode, tuple(names), token)
    if theirs != namespace:
        raise InvalidConfig(
            f"a ticket for {_describe(offer, offer.names)} in the namespace {theirs!r:.80}",
            f"this client's namespace is {namespace!r:.80}: connect with the ticket's namespace",
        )
    return offer


def hand_over_step(hold: Hold) -> Step:
    tombstone_ms = max(hold.options.ttl_ms, mutex.TOMBSTONE_MS) if hold.outcome_unknown else 0
    return hold.steps.hand_over_step(hold, tombstone_ms)


def hand_over(lease: BaseLease) -> Effects[Ticket]:
    """End this lease. Returns a ticket, with which another process can adopt the hold."""
    handing_over = _hand_over(lease)
    return observe_release(handing_over, lease._hold) if lease._driver.registry.observed() else handing_over


def _hand_over(lease: BaseLease) -> Effects[Ticket]:
    hold = lease._hold
    driver: Driver = lease._driver
    if hold.kind == "recipe":
        raise Unsupported(f"hand_over of {hold.key!r}", "a recipe has no such step. Use client.lock for that")
    if not hold.mine:
        raise hold.lost_error()
    asked_at = yield from mutex.step_as_holder(hold, hand_over_step(hold))
    if not hold.options.replicas:  # else no replica has confirmed that, and an interrupt may let the holder go on
        hold.prolong(hold.options.ttl, asked_at)
    ours = True
    try:
        ticket = write_ticket(hold)
        ours = driver.registry.leave(hold)
        if not ours:  # another caller has released it meanwhile
            raise hold.not_held_error()
        hold.hand_over()
        driver.cohorts.leave(hold)
        hold.wake_loss_waiters()
        return ticket
    except STOPPED:
        if ours and hold not in driver.registry.holds:  # it has ended, but the caller does not get the ticket
            hold.end()
            driver.cohorts.leave(hold)
            yield from mutex.settle(hold)
        raise


def adopt(lock: BaseLock[L], offer: Offer) -> Effects[L]:
    """Adopt a handed-over hold, as a lease of this lock; NotAcquired if it is no longer there."""
    driver = lock._driver
    adoption = _adopt(lock, offer)
    return observe_acquire(adoption, [], lock) if driver.registry.observed() else adoption


def _adopt(lock: BaseLock[L], offer: Offer) -> Effects[L]:
    driver: Driver = lock._driver
    refuse_closed(driver)
    me = yield from caller()
    if lock._generation != driver.generation:
        lock._begin_generation()
    hold = lock._new_hold()
    _refuse_mismatch(hold, offer)
    hold.mode, hold.caller = offer.mode, weakly(me)
    hold.options = options = replace(hold.options, cohort=0)
    hold.local_key = hold.object_slot = ObjectSlot(driver.cohorts)
    hold.token = yield from new_token(options.label)
    try:
        driver.cohorts.try_activate(hold)  # its local queue has no other waiter
        yield from _swap(hold, offer.token)
        if options.replicas:
            yield from confirm(hold, driver)
        driver.admit(hold)
        lease = lock._lease_class(driver, hold)
        lock._note(lease, me)
        if options.on_lost == "cancel":
            yield from attach(hold)
        return lease
    except STOPPED:
        driver.registry.leave(hold)
        driver.cohorts.leave(hold)
        if not mutex.is_settled(hold):
            yield from mutex.settle(hold)
        raise


def _refuse_mismatch(hold: Hold, offer: Offer) -> None:
    """Refuse a ticket for another lock. The number of a semaphore's permits may differ: it comes with each request."""
    same = hold.kind == offer.kind and (hold.mode == offer.mode or hold.kind == "semaphore")
    if not same or sorted(hold.names) != sorted(offer.names):
        raise InvalidConfig(
            f"a ticket for {_describe(offer, offer.names)}",
            f"this is {_describe(hold, hold.names)}. Adopt it there, or by client.adopt, which takes every ticket",
        )


def _swap(hold: Hold, giver: str) -> Effects[None]:
    """Replace the giver's token by ours."""
    step = hold.steps.adopt_step(hold, giver)
    while True:
        try:
            reply, asked_at, _, outcome_unknown = yield from until_answered(lambda: step, hold.options, hold=hold)
        except StepFailed as failed:
            hold.server_silent = failed.silent
            subject = _describe(hold, [keys.key for keys in hold.all_keys()])
            raise outage(failed, subject, hold.options.timeout) from failed.__cause__
        if type(reply) is NotAdopted:
            hold.answer(outcome_unknown)
            raise NotAcquired(hold.name, _REFUSED[reply.code], key=hold.key)
        hold.grant(reply.fence, asked_at, reply.slot)
        # After the grant, because an interrupt may come in between, and only this hold knows the token.
        hold.answer(outcome_unknown)
        if (yield from clock()) < hold.deadline:
            return
        # The reply came after the deadline, but the key may still be ours.
        hold.take_back()
