"""Handing a hold over: the giver gets a ticket for it, and whoever has the ticket adopts the hold.

Invariant. Nobody shares a hold. The giver's ends before there is a ticket; adopting puts a new token in the place of
the giver's, if and only if that is still there, so a ticket serves once, and never takes what is free or another's.
What passes is all that the giver had, and no more: the lock (which stays reentrant if it was), all of several names,
the same slot of a semaphore, the same side of a readers-writer lock. The new fence is greater than any that the giver
had, or had set aside for its cohort.

Atomic: ``hand_over`` on the server makes the hold last one ttl from now; that is the time there is to adopt it, for
nobody renews it meanwhile. ``adopt`` swaps the token. Both are idempotent: a reply that was lost is asked for again.
Whoever gives up on an adoption abandons its new token, tombstone and all; the giver's token is not touched by that.
Nobody who waits is disturbed by either, for nothing becomes free.

If hand_over fails, the lease is as it was: held, or lost. If it succeeds, the lease has ended.

A ticket is a capability, like the token in it: whoever has it can take the lock. So it is opaque and safe in a URL, and
does not show itself where things are logged by their repr. It says what it is for, so that it is not taken for another.

Clocks. A ticket carries no time. How long it is good for is known to the server alone.

An adopted hold stays out of cohorts: it was not this process's turn, and it is not passed on within it. For the same
reason it has a gate of its own, and nobody waits for it who waits for an object.

Where several names do not live in one place (see parts.py), they are adopted place by place. When one ends on the way,
it has some of them and the giver's token stands in the others: each ends by its ttl, and the ticket is of no more use.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

from holdfast.errors import InvalidConfig, LeaseLost, NotAcquired, Unsupported
from holdfast.lease import ENDED, TRYING, BaseLease, Hold
from holdfast.names import MAX_NAME_BYTES
from holdfast.protocol import mutex
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, attach, caller, clock, new_token
from holdfast.protocol.lock import BaseLock, Driver, refuse_closed, weakly
from holdfast.protocol.replies import NotAdopted
from holdfast.protocol.retry import outage, until_answered

__all__ = ["Offer", "Ticket", "adopt", "hand_over", "read_ticket"]

VERSION: Final = "hf1-"
LONGEST: Final = 4 * 33 * MAX_NAME_BYTES // 3  # as many names as one can lock, and the rest
_SUM_BYTES: Final = 4

# What a ticket can be for: a species, and how much of it, in the words of room.py.
_OFFERED: Final = re.compile(r"lock|rlock|semaphore n[1-9][0-9]{0,6}|rwlock (?:any|all)")

L = TypeVar("L", bound=BaseLease)

_ANEW: Final = "Acquire it, or ask for another ticket"
_REFUSED: Final = {
    0: f"the ticket's time ran out, or it was adopted and the lock has been given back since. {_ANEW}",
    -1: f"somebody else has it now: the ticket was adopted already, or its time ran out. {_ANEW}",
    -2: "this attempt was given up before its request arrived",
    -3: f"the ticket was adopted already, or its time ran out. {_ANEW}",
}


class Ticket(str):
    """What ``hand_over`` returns. It is a plain str to whatever sends it on, and only its repr keeps it to itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<ticket>"


class Offer(NamedTuple):
    """What a ticket says."""

    species: str
    wanted: str
    names: tuple[str, ...]
    token: str

    def __repr__(self) -> str:
        return f"<offer of {_in_words(self)}>"  # the rest is the token


def _in_words(what: Offer | Hold) -> str:
    names = ", ".join(f"{name!r:.80}" for name in what.names)
    if what.species == "semaphore":
        return f"a permit of the semaphore {names}"
    if what.species == "rwlock":
        return f"the {'writing' if what.wanted == 'all' else 'reading'} side of {names}"
    if what.species == "rlock":
        return f"the reentrant lock {names}"
    return f"the lock {names}" if len(what.names) == 1 else f"a lock on {names}"


def write_ticket(hold: Hold) -> Ticket:
    main = hold.mains[0]
    namespace = main.removesuffix(hold.names[0])
    # No name or token contains a line break.
    said = "\n".join((f"{hold.species} {hold.wanted}".strip(), hold.token, namespace, *hold.names)).encode()
    packed = urlsafe_b64encode(crc32(said).to_bytes(_SUM_BYTES, "big") + said)
    return Ticket(VERSION + packed.decode().rstrip("="))


def read_ticket(ticket: str, namespace: str) -> Offer:
    """What it offers to a client with that namespace. InvalidConfig, which never shows it, if it makes no sense."""
    if not isinstance(ticket, str) or not ticket.startswith(VERSION) or len(ticket) > LONGEST:
        raise InvalidConfig("a ticket", "give what hand_over() has returned, as it was")
    packed = ticket[len(VERSION) :]
    try:
        data = urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        offered, token, theirs, *names = data[_SUM_BYTES:].decode().split("\n")
    except ValueError:  # not ASCII, not base64, not UTF-8; or too few lines
        names = []
    if not names or crc32(data[_SUM_BYTES:]).to_bytes(_SUM_BYTES, "big") != data[:_SUM_BYTES]:
        raise InvalidConfig("a ticket", "it has come to harm on its way: give what hand_over() has returned, as it was")
    species, _, wanted = offered.partition(" ")
    if not _OFFERED.fullmatch(offered) or (offered != "lock" and len(names) > 1):
        raise Unsupported(f"a ticket for a {offered:.20}", "a newer version of Holdfast may know what that is")
    offer = Offer(species, wanted, tuple(names), token)
    if theirs != namespace:
        raise InvalidConfig(
            f"a ticket for {_in_words(offer)} in the namespace {theirs!r:.80}",
            f"this client's namespace is {namespace!r:.80}: connect with the other one",
        )
    return offer


def hand_over_step(hold: Hold) -> Step:
    keys, terms = hold.keys, hold.terms
    stands_ms = max(terms.ttl_ms, mutex.TOMBSTONE_MS) if hold.doubtful else 0
    if hold.kind is not None:
        return hold.kind.hand_over_step(hold, stands_ms)
    return Step("hand_over", (keys.main, keys.tombstone(hold.token)), (hold.token, str(terms.ttl_ms), str(stands_ms)))


def adopt_step(hold: Hold, giver: str) -> Step:
    if hold.kind is not None:
        return hold.kind.adopt_step(hold, giver)
    keys, token = hold.keys, hold.token
    ttl, retention, _ = hold.terms.said
    return Step("adopt", (*keys.shared[:2], keys.tombstone(token)), (token, ttl, retention, giver))


def hand_over(lease: BaseLease) -> Effects[Ticket]:
    """End this lease, and say how somebody else can go on with the hold."""
    hold = lease._hold
    driver: Driver = lease._driver
    if hold.species == "recipe":
        raise Unsupported(f"hand_over of {hold.name!r}", "a lock of history has no such step. Use client.lock for that")
    if not hold.mine:
        raise LeaseLost(hold.name, hold.fence, hold.reason)
    asked_at = yield from mutex.insist(hold, hand_over_step(hold))
    hold.prolong(hold.terms.ttl, asked_at)
    ours = True
    try:
        ticket = write_ticket(hold)
        ours = driver.book.leave(hold)
        if not ours:  # somebody has released it meanwhile
            raise hold.ended()
        hold.handed_over = True
        hold.phase = ENDED
        driver.cohorts.leave(hold)
        for bell in list(hold.bells):
            bell.ring()
        return ticket
    except STOPPED:
        if ours and hold not in driver.book.holds:  # it has ended, and nobody will have the ticket
            hold.handed_over = False
            driver.cohorts.leave(hold)
            yield from mutex.settle(hold)
        raise


def adopt(lock: BaseLock[L], offer: Offer) -> Effects[L]:
    """Go on with what another has handed over, as a lease of this lock. NotAcquired if it is not there any more."""
    driver: Driver = lock._driver
    refuse_closed(driver)
    me = yield from caller()
    if lock._life != driver.life:
        lock._begin_life()
    hold = lock._new_hold()
    _refuse_another(hold, offer)
    hold.wanted, hold.caller = offer.wanted, weakly(me)
    hold.terms = terms = replace(hold.terms, cohort=0)
    hold.seat = hold.gate = gate = Gate()
    gate.cohorts = driver.cohorts
    hold.token = yield from new_token(terms.label)
    try:
        driver.cohorts.sit_down(hold)  # on a seat of its own
        yield from _swap(hold, offer.token)
        driver.admit(hold)
        lease = lock._lease_class(driver, hold)
        lock._note(lease, me)
        if terms.on_lost == "cancel":
            yield from attach(hold)
        return lease
    except STOPPED:
        driver.book.leave(hold)
        driver.cohorts.leave(hold)
        if not mutex.is_settled(hold):
            yield from mutex.settle(hold)
        raise


def _refuse_another(hold: Hold, offer: Offer) -> None:
    """Of how many permits it was one does not matter: that is for those to say who ask for one."""
    same = hold.species == offer.species and (hold.wanted == offer.wanted or hold.species == "semaphore")
    if not same or sorted(hold.names) != sorted(offer.names):
        raise InvalidConfig(
            f"a ticket for {_in_words(offer)}",
            f"this is {_in_words(hold)}. Adopt it where it belongs, or by client.adopt, which takes every ticket",
        )


def _swap(hold: Hold, giver: str) -> Effects[None]:
    """Put our token where the giver's is."""
    step = adopt_step(hold, giver)
    while True:
        try:
            reply, asked_at, _, doubtful = yield from until_answered(lambda: step, hold.terms, hold=hold)
        except StepFailed as failed:
            hold.unheard = failed.silent
            raise outage(failed, _in_words(hold), hold.terms.timeout) from failed.__cause__
        if type(reply) is NotAdopted:
            hold.doubtful = doubtful
            raise NotAcquired(hold.name, _REFUSED[reply.code])
        hold.slot = reply.slot
        hold.grant(reply.fence, asked_at)
        hold.doubtful = doubtful  # not before: a signal handler may strike here, and the token is known to us alone
        if (yield from clock()) < hold.deadline:
            return
        # The reply came after the deadline; but the key may be ours still.
        hold.phase, hold.doubtful = TRYING, True
