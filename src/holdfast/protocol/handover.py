"""Handing a hold over: the giver gets a ticket for it, and whoever has the ticket adopts the hold.

Invariant. Nobody shares a hold. The giver's ends before there is a ticket; adopting swaps the giver's token in the key
for a new one, if and only if it is still there, so a ticket serves once, and never takes a lock that is free or
another's. The new fence is greater than any that the giver had, or had set aside for its cohort.

Atomic: ``hand_over`` on the server makes the hold last one ttl from now; that is the time there is to adopt it, for
nobody renews it meanwhile. ``adopt`` swaps the token. Both are idempotent: a reply that was lost is asked for again.
Whoever gives up on an adoption abandons its new token, tombstone and all; the giver's token is not touched by that.

If hand_over fails, the lease is as it was: held, or lost. If it succeeds, the lease has ended.

A ticket is a capability, like the token in it: whoever has it can take the lock. So it is short, opaque and safe in a
URL, and does not show itself where things are logged by their repr.

Clocks. A ticket carries no time. How long it is good for is known to the server alone.

An adopted hold stays out of cohorts: it was not this process's turn, and it is not passed on within it.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

from holdfast.errors import InvalidConfig, LeaseLost, NotAcquired, NotHeld, Unavailable, Unsupported
from holdfast.lease import ENDED, TRYING, BaseLease, Hold, Terms
from holdfast.names import Keys, keys_of
from holdfast.protocol import mutex
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, attach, call, clock, new_token, wait
from holdfast.protocol.lock import Driver

__all__ = ["Offer", "Ticket", "adopt", "hand_over", "read_ticket"]

VERSION: Final = "hf1-"
MUTEX: Final = "lock"
LONGEST: Final = 4096
_FIELDS: Final = 4
_SUM_BYTES: Final = 4

L = TypeVar("L", bound=BaseLease)

_REFUSED: Final = {
    0: "the ticket's time ran out, or it was adopted and the lock has been given back since",
    -1: "somebody else has it now: the ticket was adopted already, or its time ran out",
    -2: "this attempt was given up before its request arrived",
}


class Ticket(str):
    """What ``hand_over`` returns. It is a plain str to whatever sends it on, and only its repr keeps it to itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<ticket>"


class Offer(NamedTuple):
    """What a ticket says."""

    keys: Keys
    token: str

    def __repr__(self) -> str:
        return f"<offer of {self.keys.name!r}>"  # the rest is the token


def write_ticket(hold: Hold) -> Ticket:
    keys = hold.keys
    namespace = keys.main.removesuffix(keys.name)
    # No name or token contains a line break.
    said = "\n".join((MUTEX, hold.token, namespace, keys.name)).encode()
    packed = urlsafe_b64encode(crc32(said).to_bytes(_SUM_BYTES, "big") + said)
    return Ticket(VERSION + packed.decode().rstrip("="))


def read_ticket(ticket: str, namespace: str) -> Offer:
    """What it offers to a client with that namespace. InvalidConfig, which never shows it, if it makes no sense."""
    if not isinstance(ticket, str) or not ticket.startswith(VERSION) or len(ticket) > LONGEST:
        raise InvalidConfig("a ticket", "give what hand_over() has returned, as it was")
    packed = ticket[len(VERSION) :]
    try:
        data = urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        fields = data[_SUM_BYTES:].decode().split("\n")
    except ValueError:  # not ASCII, not base64, not UTF-8
        fields = []
    if len(fields) != _FIELDS or crc32(data[_SUM_BYTES:]).to_bytes(_SUM_BYTES, "big") != data[:_SUM_BYTES]:
        raise InvalidConfig("a ticket", "it has come to harm on its way: give what hand_over() has returned, as it was")
    kind, token, theirs, name = fields
    if kind != MUTEX:
        raise Unsupported(f"a ticket for a {kind:.20}", "a newer version of Holdfast may know what that is")
    if theirs != namespace:
        raise InvalidConfig(
            f"a ticket for {name!r:.80} in the namespace {theirs!r:.80}",
            f"this client's namespace is {namespace!r:.80}: connect with the other one",
        )
    return Offer(keys_of(name, namespace), token)


def hand_over_step(hold: Hold) -> Step:
    keys, terms = hold.keys, hold.terms
    stands_ms = max(terms.ttl_ms, mutex.TOMBSTONE_MS) if hold.doubtful else 0
    return Step("hand_over", (keys.main, keys.tombstone(hold.token)), (hold.token, str(terms.ttl_ms), str(stands_ms)))


def adopt_step(hold: Hold, giver: str) -> Step:
    keys, token = hold.keys, hold.token
    ttl, retention, _, _ = hold.terms.said
    return Step("adopt", (*keys.shared[:2], keys.tombstone(token)), (token, ttl, retention, giver))


def hand_over(lease: BaseLease) -> Effects[Ticket]:
    """End this lease, and say how somebody else can go on with the hold."""
    hold = lease._hold
    driver: Driver = lease._driver
    if not hold.mine:
        raise LeaseLost(hold.name, hold.fence, hold.reason)
    if type(hold) is not Hold:
        raise Unsupported(f"hand_over of {hold.name!r}", "only the lease of a lock on one name can be handed over")
    asked_at = yield from mutex.insist(hold, hand_over_step(hold))
    hold.prolong(hold.terms.ttl, asked_at)
    hold.claimed = True
    ours = True
    try:
        ticket = write_ticket(hold)
        ours = driver.book.leave(hold)
        if not ours:  # somebody has released it meanwhile
            raise NotHeld(hold.name)
        hold.phase = ENDED
        driver.cohorts.leave(hold)
        for bell in list(hold.bells):
            bell.ring()
        return ticket
    except STOPPED:
        if ours and hold not in driver.book.holds:  # it has ended, and nobody will have the ticket
            driver.cohorts.leave(hold)
            yield from mutex.settle(hold)
        raise


def adopt(driver: Driver, offer: Offer, terms: Terms, lease_class: type[L]) -> Effects[L]:
    """Go on with what another has handed over. NotAcquired if it is not there any more."""
    if driver.book.closed:
        raise Unavailable({driver.address: "this client was closed"}, "Connect again, or close it later")
    gate = Gate()
    gate.cohorts = driver.cohorts
    hold = Hold(offer.keys, terms, gate)
    hold.token = yield from new_token(terms.label)
    try:
        driver.cohorts.sit_down(hold)  # on a seat of its own
        yield from _swap(hold, offer.token)
        driver.admit(hold)
        lease = lease_class(driver, hold)
        if terms.on_lost == "cancel":
            yield from attach(hold)
        return lease
    except STOPPED:
        driver.book.leave(hold)
        driver.cohorts.leave(hold)
        if not mutex.is_settled(hold):
            yield from mutex.settle(hold)
        raise


def _swap(hold: Hold, giver: str) -> Effects[None]:
    """Put our token where the giver's is."""
    asked_at = yield from clock()
    until = asked_at + hold.terms.timeout
    attempt = 0
    while True:
        doubtful, hold.doubtful = hold.doubtful, True  # from here until the reply
        try:
            found = int((yield from call(adopt_step(hold, giver), hold.terms.call_timeout)))
        except StepFailed as failed:
            hold.doubtful = doubtful or failed.sent
            attempt += 1
            now = yield from clock()
            if not failed.retry or now >= until:
                raise failed.error from failed.__cause__
            if attempt > 1:
                now = yield from wait(None, min(until, now + mutex.backoff(hold.token, attempt)))
            asked_at = now
            continue
        hold.doubtful = doubtful
        if found <= 0:
            raise NotAcquired(hold.name, _REFUSED.get(found, _REFUSED[0]))
        hold.grant(found, asked_at)
        now = yield from clock()
        if now < hold.deadline:
            return
        # The reply came after the deadline; but the key may be ours still.
        hold.phase, hold.doubtful = TRYING, True
        asked_at = now
