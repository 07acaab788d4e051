"""Keeping leases: one keeper for all the leases of a client.

Invariant. A hold in the book is renewed once a third of its ttl is over, as long as the server can be reached; whoever
takes it out of the book (``leave`` succeeds for exactly one caller) ends it, and from then on no renewal of it is
sent and no reply to one is heeded. A hold whose deadline passes is told so.

The first renewal comes a tenth of a second after the grant. From then on the server tells us if anybody else writes the
key; such a push is a hint, and answered by the same renewal, which finds out. So short holds pay nothing, and the loss
of others is known in milliseconds. Rooms, whose
keys are written by every visitor, are looked after in another way: see lookout.py.

What is due together is sent together: a round renews all that is due now or soon, so that the rounds of ten thousand
leases are a few a second, not thousands. A round that fails is tried again until the deadline of each hold; one
error never ends the keeper.

It also finishes what its callers could not: chores are holds whose key must not outlive them, abandoned again and
again until the server has confirmed it, or until it no longer matters. And it speaks for waiters, where these are many:
see presence.py. Renewals go before all of that: other work is done in batches, for a tenth of a second at a time, and
then the keeper looks again for what is due.

Clocks: as in mutex.py. The keeper being late is safe: ``held`` does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, NamedTuple
from weakref import ref

from holdfast.lease import HELD, LOST, Hold, drift
from holdfast.protocol import mutex
from holdfast.protocol.effects import Bell, Effects, Step, StepFailed, call_each, clock, tell, wait
from holdfast.protocol.lookout import Look, Lookout, Lookouts, SharedHold, look_steps, plan_looks
from holdfast.protocol.presence import Crowd, show_presence
from holdfast.protocol.replies import FREED, GONE
from holdfast.protocol.retry import SHORTEST_CALL

__all__ = ["CLOSED", "Book", "Round", "keep", "plan"]

LONGEST_SLEEP: Final = 60.0
LONGEST_CALL: Final = 1.0  # a stuck connection must not keep the keeper from other leases for long
CHORE_PAUSE: Final = 0.2
BATCH: Final = 1000
SLICE: Final = 0.1  # seconds of other work, before the keeper looks again which leases are due

CLOSED: Final = "its client was closed"


class Chore(NamedTuple):
    hold: Hold
    until: float


class Book:
    """The holds of one client. Its methods are single dict and deque operations, so any thread may call them."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.holds: dict[Hold, Hold] = {}
        self.watched: dict[str, Hold] = {}  # by key: the server tells us when anybody else writes it
        self.lookouts = Lookouts(self.wake_the_keeper)  # and of which rooms it does
        self.crowd = Crowd()  # the waiters for which the keeper speaks
        self.chores: deque[Chore] = deque()
        self.wakes_at = float("inf")  # when the keeper will look next; infinite while it is not asleep
        self.wanted_at = 0.0  # when it was last asked to; kept although that hold may be over, lest each one wakes it
        self.closed = False

    def wake_the_keeper(self) -> None:
        self.bell.ring()  # which is another one after a fork, and in another event loop

    def enter(self, hold: Hold) -> None:
        self.holds[hold] = hold
        if self.closed:
            hold.lose(CLOSED)
        when = due_at(hold)
        if isinstance(hold, SharedHold):
            hold.lookouts = self.lookouts
            self.lookouts.in_use = True
            self.lookouts.move(hold)
            when = min(when, hold.old_at)
        if when < self.wakes_at:
            self.wanted_at = when
            self.bell.ring()

    def leave(self, hold: Hold) -> bool:
        """Take it out; True for exactly one caller, who may then end it."""
        if self.watched:
            self.unwatch(hold)
        if self.lookouts.rooms and isinstance(hold, SharedHold):
            self.lookouts.move(hold)
        return self.holds.pop(hold, None) is not None

    def unwatch(self, hold: Hold) -> None:
        for key in hold.mains:
            if self.watched.get(key) is hold:
                self.watched.pop(key, None)

    def held_by(self, caller: Hashable) -> list[Hold]:
        """What this thread or task has acquired and not released."""
        me = ref(caller)
        return [hold for hold in list(self.holds) if hold.caller == me]

    def look_at(self, key: str) -> None:
        """Somebody else wrote that key: if a hold relies on it, see what became of it."""
        hold = self.watched.pop(key, None)
        if hold is not None:
            hold.look_at = 0.0
            self.bell.ring()
        self.lookouts.stir(key)

    def look_at_all(self) -> None:
        for key in list(self.watched):
            self.look_at(key)
        self.lookouts.stir_all()

    def is_watching(self) -> bool:
        return bool(self.watched or self.lookouts.rooms)

    def entrust(self, hold: Hold, now: float) -> None:
        # As long as the key can be there (it may have been extended), or a late request could bring it back.
        matters = max(hold.terms.ttl, mutex.TOMBSTONE_MS / 1000, hold.deadline - now + drift(hold.terms.ttl))
        self.chores.append(Chore(hold, now + matters))
        self.bell.ring()

    def attend(self, hold: Hold, now: float) -> None:
        """This waiter sleeps: show the server that it is alive, from now on."""
        if self.crowd.join(hold, now):
            self.bell.ring()

    def look_for_crowd(self) -> None:
        """Notifications may have been lost: see at once which waiters of the crowd should ask."""
        if self.crowd.look_at_once():
            self.bell.ring()

    def close(self) -> None:
        self.closed = True
        self.bell.ring()

    def disown(self, reason: str) -> None:
        """In a forked child: nothing here is ours. No bell is rung, for whoever waited is not in this process."""
        for hold in self.holds.values():
            hold.mine = False
            hold.phase = LOST
            hold.reason = reason
        self.holds.clear()
        self.watched.clear()
        self.lookouts.rooms.clear()
        self.crowd.forget()
        self.chores.clear()


class Round(NamedTuple):
    """What to do now, and when to look again."""

    over: list[Hold]
    due: list[Hold]
    wakes_at: float
    first_deadline: float


def due_at(hold: Hold) -> float:
    """When to see to it: after a third of the ttl, so that two more tries fit in; at its deadline if it is not renewed;
    sooner if there is reason to look."""
    deadline, terms = hold.deadline, hold.terms
    when = deadline if not terms.renew or deadline >= hold.ends else deadline - terms.renewed_with
    when = min(when, hold.look_at)
    return when if when > hold.retry_at else hold.retry_at


def asked_for(hold: Hold, now: float) -> float:
    """How long a renewal should make it last.

    With max_hold in sight no more than is left of it (and the drift that will be taken off); and if it is not to be
    renewed, so little that nothing changes and we only see that it is there.
    """
    if not hold.terms.renew:
        return 0.001
    return min(hold.terms.ttl, (hold.ends - now) * 1.02 + 0.003)


def retry_pause(hold: Hold, now: float) -> float:
    """After a failed renewal: shorter the less time is left."""
    return max(0.02, min(1.0, hold.terms.ttl / 30, (hold.deadline - now) / 10))


def plan(holds: list[Hold], now: float) -> Round:
    """Decide on a round. Whatever falls due within a twelfth of its ttl is taken along."""
    over: list[Hold] = []
    due: list[Hold] = []
    wakes_at = now + LONGEST_SLEEP
    first_deadline = float("inf")
    for hold in holds:
        if hold.phase is not HELD:
            continue
        if now >= hold.deadline:
            over.append(hold)
            continue
        when = due_at(hold)
        if when < hold.deadline:
            first_deadline = min(first_deadline, hold.deadline)
        slack = 0.0 if when == hold.look_at else hold.terms.ttl / 12
        if when < hold.deadline and when <= now + slack and hold.retry_at <= now:
            due.append(hold)
        else:
            wakes_at = min(wakes_at, when, hold.deadline)
    return Round(over, due, wakes_at, first_deadline)


def keep(book: Book) -> Effects[None]:
    """The keeper's life. It ends when the book is closed, after one last try at its chores."""
    while True:
        book.bell.clear()
        closing = book.closed
        now = yield from clock()
        todo = plan(list(book.holds.values()), now)
        for hold in todo.over:
            if hold.lose(hold.why_over()):
                yield from tell(hold)
        if not closing and todo.due:
            yield from _renew(book, todo, now)
        candidates = list(book.holds.values()) if book.lookouts.in_use else []
        looks, look_at = plan_looks(candidates, book.lookouts, now)
        if not closing and looks:
            yield from _look(book, looks)
        slice_ends = float("inf") if closing else min(todo.wakes_at, now + SLICE)
        busy = bool(book.chores) and (yield from _do_chores(book, slice_ends))
        if closing:
            return
        crowd = book.crowd
        if crowd.is_due(now):
            # As in _look: it must leave time for renewals.
            timeout = min(LONGEST_CALL, max(SHORTEST_CALL, (todo.first_deadline - now) / 3))
            yield from show_presence(crowd, slice_ends, timeout)
            busy = busy or crowd.is_due(now)
        if not todo.due and not looks and not busy:
            wakes_at = min(todo.wakes_at, look_at, crowd.due_at)
            if book.chores:
                wakes_at = min(wakes_at, now + CHORE_PAUSE)
            book.wakes_at = min(wakes_at, book.wanted_at) if book.wanted_at > now else wakes_at
            if not book.closed:
                yield from wait(book.bell, book.wakes_at)
            book.wakes_at = float("inf")


def _renew(book: Book, todo: Round, now: float) -> Effects[None]:
    for start in range(0, len(todo.due), BATCH):
        batch = [hold for hold in todo.due[start : start + BATCH] if hold in book.holds]
        asked_at = yield from clock()
        ttls = [asked_for(hold, asked_at) for hold in batch]
        for hold in batch:
            hold.look_at = float("inf")
            if hold.kind is None or hold.kind.watches:
                for key in hold.mains:
                    book.watched[key] = hold
        steps = [mutex.renew_step(hold, ttl, watch=True) for hold, ttl in zip(batch, ttls, strict=True)]
        shortest = min((hold.terms.ttl for hold in batch), default=1.0)
        # Not beyond the deadline of any that is to be renewed, lest it is told late; but long enough for a round trip.
        timeout = min(LONGEST_CALL, shortest / 3, max(SHORTEST_CALL, todo.first_deadline - asked_at))
        for hold, ttl in zip(batch, ttls, strict=True):
            hold.ask_to_prolong(ttl, asked_at + timeout)
        replies = yield from call_each(steps, timeout)
        now = yield from clock()
        for hold, ttl, reply in zip(batch, ttls, replies, strict=True):
            if hold not in book.holds:
                # Released while the renewal was under way: its fate is not ours any more.
                book.unwatch(hold)
                continue
            if isinstance(reply, StepFailed):
                hold.doubtful = hold.doubtful or reply.sent
                hold.retry_at = hold.look_at = now + retry_pause(hold, now)
            elif reply == FREED:
                hold.prolong(ttl, asked_at)
            elif hold.lose(mutex.LOST_BY[reply]):
                yield from tell(hold)


def _look(book: Book, looks: list[Look]) -> Effects[None]:
    """See who of ours is still in those rooms, and have them watched from now on."""
    for start in range(0, len(looks), BATCH):
        batch = looks[start : start + BATCH]
        now = yield from clock()
        for look in batch:
            book.lookouts.rooms.setdefault(look.key, Lookout()).begin(now)
        asked = [part for look in batch for part in look_steps(look)]
        # It must leave time for the renewals of others, and for telling those whose leases are to end.
        first_deadline = min((hold.deadline for hold in list(book.holds.values())), default=now)
        timeout = min(LONGEST_CALL, max(SHORTEST_CALL, (first_deadline - now) / 3))
        replies = yield from call_each([step for step, _ in asked], timeout)
        for (step, holds), reply in zip(asked, replies, strict=True):
            if isinstance(reply, StepFailed) or len(reply) != len(holds):
                book.look_at(step.keys[0])
                continue
            for hold, found in zip(holds, reply, strict=True):
                # Who has left meanwhile has given its place back, or is about to.
                if not found and hold in book.holds and hold.lose(mutex.LOST_BY[GONE]):
                    yield from tell(hold)


def _do_chores(book: Book, until: float) -> Effects[bool]:
    """Abandon what is left to do, in batches, until that time; whether to go on at once after a look at the leases.

    Each chore has one try: what fails is tried again after a pause.
    """
    for start in range(0, len(book.chores), BATCH):
        now = yield from clock()
        if start and now >= until:  # but one batch in each round, however long the renewals take
            return True
        chores = [book.chores.popleft() for _ in range(min(BATCH, len(book.chores)))]
        chores = [chore for chore in chores if now < chore.until]
        steps: list[Step] = [mutex.abandon_step(chore.hold) for chore in chores]
        replies = (yield from call_each(steps, LONGEST_CALL)) if steps else []
        for chore, step, reply in zip(chores, steps, replies, strict=True):
            if isinstance(reply, StepFailed) or not reply.buried:
                book.chores.append(chore)
            book.lookouts.stir(step.keys[0])  # it was we who wrote there, and a watch has ended by that
        if replies and isinstance(replies[-1], StepFailed):
            return False  # the other batches would have no answer, either
    return False
