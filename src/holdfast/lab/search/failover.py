"""A failover led by Sentinels, in a search: two servers, and two views of which of them is the primary.

The first Sentinel leads the failover. The second one stands for all others: a client may list it twice, for a majority.
It hears of the failover at any time after the promotion, and the leader may stop before that. One replica is promoted,
one follows it later, and one hangs, so the leader lists the old primary until it gives up waiting. Meanwhile the old
primary goes on serving its clients; with ``Config.hangs`` it hangs, clients come after the promotion, and it resumes at
any time after that. With ``Config.stuck`` it then executes a request that was sent to it before. At last it is demoted.

    elect -> promote -> follow -> end -> demote        and after the promotion, at any time: hear, stop, resume

None of these is a fault: a search without faults has them in every order. No write is lost by the promotion; the rows
with the fault ``failover`` are about that.

A client that lists Sentinels (``Config.sentinels``) asks them before its first step, and before a step a second after
it asked; as in production, ``protocol.primary`` says what an answer means, and whether the client goes back. A client
that lists none is cut off together with the old primary. WAIT on the old primary counts no replica from the promotion
on; on the new one, none until a replica follows it. With ``Config.beside`` a replica confirms what the old primary
writes until it follows the new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.lab.search.move import BROKEN_LINK, Move
from holdfast.lab.search.site import Request
from holdfast.lab.search.state import NEVER, Under
from holdfast.protocol import primary
from holdfast.protocol.primary import BEHIND, FOLLOW, GO_BACK, STAY, Choice, Endpoint, Sighting

if TYPE_CHECKING:
    from holdfast.lab.search.state import Config, State

ELECTED, PROMOTED, FOLLOWED, ENDED, DEMOTED = range(1, 6)
OLD: Final[Endpoint] = ("old", 1)
NEW: Final[Endpoint] = ("new", 2)
ASK_EVERY_US: Final = 1_000_000
# What the old primary granted in that second is told of its loss at its next renewal, a third of a ttl later.
TOLD_WITHIN_US: Final = 2_100_000
LONG_AGO_US: Final = 1
HUNG_FOR: Final = 5.0  # seconds: at least this long, since it was replaced
_STEPS: Final = {"elect": ELECTED, "promote": PROMOTED, "follow": FOLLOWED, "end": ENDED, "demote": DEMOTED}


class Followed(NamedTuple):
    """What a client knows."""

    endpoint: Endpoint = OLD
    epoch: int = -1
    ask_at_us: int = 0  # NEVER: its next request was sent before


class Fleet(NamedTuple):
    follows: tuple[Followed, ...]  # by client
    phase: int = 0
    hung: bool = False  # the old primary hangs
    heard_us: int = 0  # when the second Sentinel has heard of the promotion; 0: not yet
    stopped: bool = False  # the Sentinel that led the failover has stopped

    def seen_by(self, sentinel: int) -> Sighting:
        """What that Sentinel says, if it runs."""
        if sentinel:
            name = NEW if self.heard_us else OLD
            return Sighting(name, name, int(name is NEW), up=name is NEW or not self.hung)
        promoted = self.phase >= PROMOTED
        return Sighting(
            NEW if promoted else OLD,
            NEW if self.phase >= ENDED else OLD,
            int(promoted),
            failing_over=ELECTED <= self.phase < ENDED,
            promoted=PROMOTED <= self.phase < ENDED,
            up=self.phase >= ENDED or not self.hung,
        )


def new_fleet(config: Config) -> Fleet | None:
    if not config.sentinels:
        return None
    last = Followed(epoch=0, ask_at_us=NEVER) if config.stuck else Followed()
    return Fleet(((Followed(),) * (config.clients - 1) + (last,)), hung=config.hangs)


def is_out(fleet: Fleet | None) -> bool:
    """Whether there is no primary, so that no client can come."""
    return fleet is not None and fleet.hung and fleet.phase < PROMOTED


def steps_of(state: State, config: Config) -> Iterator[str]:
    """What can happen next in the failover."""
    fleet = state.fleet
    if fleet is None or not (state.come or fleet.hung):
        return
    cut_off = not all(config.sentinels)  # no Sentinel reaches the old primary; and how one lists it matters to none
    goes_on = fleet.phase < (FOLLOWED if cut_off else ENDED) and not fleet.stopped
    if goes_on or (fleet.phase == ENDED and not fleet.hung and fleet.heard_us):
        yield next(step for step, phase in _STEPS.items() if phase == fleet.phase + 1)
    if fleet.phase >= PROMOTED and fleet.hung:
        yield "resume"
    if fleet.phase >= PROMOTED and not fleet.heard_us and not cut_off:
        yield "hear"
        if fleet.phase == PROMOTED and not fleet.stopped:
            yield "stop"


def is_at_old(state: State, client: int) -> bool:
    """Whether the steps of that client go to a server that was replaced."""
    fleet = state.fleet
    return fleet is not None and fleet.phase >= PROMOTED and fleet.follows[client].endpoint is OLD


def two_holders(model: Any, was: State, state: State) -> Iterator[tuple[int, str, str]]:
    """Events: two clients hold the lock, when each of them could know the new primary."""
    fleet = state.fleet
    if fleet is None or not fleet.heard_us or state.now_us <= fleet.heard_us + TOLD_WITHIN_US:
        return
    locals_ = [model.locals[mark] for mark in state.locals]
    holders = [
        client
        for client, local in enumerate(locals_)
        if local.holds and not state.stopped[client] and (local.until_us or NEVER) > state.now_us
    ]
    if len(holders) > 1:
        yield holders[0], "two_holders", ""


class Failover(Move):
    """A move of a client that may use another server than the others."""

    def advance(self, step: str) -> None:
        """Let the failover make that step."""
        assert self.fleet is not None
        fleet = self.fleet._replace(phase=_STEPS.get(step, self.fleet.phase))
        if step == "promote":
            self.old, self.store = self.store, self.server.change(self.store, "failover", self.store)
        elif step == "resume":
            fleet = fleet._replace(hung=False)
        elif step == "hear":
            fleet = fleet._replace(heard_us=self.now)
        elif step == "stop":
            fleet = fleet._replace(stopped=True)
        self.fleet = fleet

    def _move_clock(self, when_us: int) -> None:
        if self.old:
            self.old = self.server.later(self.old, when_us - self.now)
        if self.fleet is not None and when_us > self.fleet.heard_us + TOLD_WITHIN_US and self.fleet.heard_us:
            self.fleet = self.fleet._replace(heard_us=LONG_AGO_US)  # when it was no longer matters: fewer states
        super()._move_clock(when_us)

    def _execute(self, client: int, request: Request) -> tuple[Any, ...]:
        if self.fleet is None:
            return super()._execute(client, request)
        self._ask_sentinels(client)
        fleet = self.fleet
        at_old = fleet.follows[client].endpoint is OLD
        was_stuck = fleet.follows[client].ask_at_us == NEVER
        if at_old and (fleet.hung or fleet.phase == DEMOTED):
            self._know(client, ask_at_us=0)  # its next connection asks
            return (BROKEN_LINK,) * max(1, len(request.ops))
        replaced = at_old and fleet.phase >= PROMOTED
        here = OLD if at_old else NEW
        elsewhere = frozenset(pair for pair in self.tracked if fleet.follows[pair[1]].endpoint is not here)
        self.tracked -= elsewhere
        owner = self.owner
        if replaced:
            self.store, self.old = self.old, self.store
        replies = super()._execute(client, request)
        if replaced:
            self.store, self.old, self.owner = self.old, self.store, owner
        self.tracked |= elsewhere
        if was_stuck:
            self._know(client, ask_at_us=0)
            if primary.is_late(HUNG_FOR):
                self._ask_sentinels(client)
            if self.fleet.follows[client].endpoint is NEW:
                return (BROKEN_LINK,) * max(1, len(request.ops))
        if replaced and fleet.heard_us and self.now > fleet.heard_us + ASK_EVERY_US and self.config.sentinels[client]:
            self._event(client, "old_primary")
        return replies

    def _do(self, client: int, number: int, *, answer: str = "") -> None:
        request = self._request(client, number)
        if self.fleet is None or self._is_answered(client, request):
            return super()._do(client, number, answer=answer)
        self._execute(client, request)
        self.held_back[client] = False
        return self._feed(client, "lose", number)

    def _is_answered(self, client: int, request: Request) -> bool:
        """Whether it is answered before its client gives up: not by a server that hangs, nor WAIT without replicas."""
        assert self.fleet is not None
        self._ask_sentinels(client)
        if self.fleet.hung and self.fleet.follows[client].endpoint is OLD:
            return False
        return not request.confirms or self._is_confirmed(client)

    def _is_confirmed(self, client: int) -> bool:
        """Whether a replica confirms what this client writes now."""
        assert self.fleet is not None
        phase: int = self.fleet.phase
        if self.fleet.follows[client].endpoint is OLD:
            return phase < PROMOTED or (self.config.beside and phase < FOLLOWED)
        return phase >= FOLLOWED

    def _know(self, client: int, **facts: Any) -> None:
        assert self.fleet is not None
        follows = list(self.fleet.follows)
        follows[client] = follows[client]._replace(**facts)
        self.fleet = self.fleet._replace(follows=tuple(follows))

    def _ask_sentinels(self, client: int) -> None:
        """Let the client ask again which server is the primary, if it is time."""
        assert self.fleet is not None
        known = self.fleet.follows[client]
        if self.now < known.ask_at_us:
            return
        sentinels = self.config.sentinels[client]
        behind = []
        for sentinel in sentinels:
            if self.fleet.stopped and not sentinel:
                continue
            choice = primary.choose(self.fleet.seen_by(sentinel), known.epoch)
            if choice.verdict is FOLLOW:
                self._follow(client, choice)
                return
            if choice.verdict is BEHIND:
                behind.append(choice)
        unconfirmed_for = self.now / 1e6  # at most: when a Sentinel named the primary is not part of the state
        verdict = primary.settle(len(behind), len(sentinels), unconfirmed_for, demoted=False)
        if verdict is GO_BACK:
            self._follow(client, behind[0])
        elif verdict is STAY:
            self._know(client, ask_at_us=self.now + ASK_EVERY_US)

    def _follow(self, client: int, choice: Choice) -> None:
        assert self.fleet is not None
        was = self.fleet.follows[client].endpoint
        ask_at_us = self.now + ASK_EVERY_US
        self._know(client, endpoint=choice.endpoint, epoch=choice.epoch, ask_at_us=ask_at_us)
        if choice.endpoint is not was:
            self._drop_connections(client)
        if choice.endpoint is OLD and was is NEW:
            self._event(client, "went_back")

    def _drop_connections(self, client: int) -> None:
        channel, server = self.model.channels[client], self.server
        subscribed = server.store(self.old).subscribed | server.store(self.store).subscribed
        if self.stopped[client] != NEVER and channel.encode() in subscribed:
            self.under_way.append(Under("cut", client, None))
        self.old, self.store = (server.hang_up(store, (), channel) for store in (self.old, self.store))
        self.tracked = frozenset(pair for pair in self.tracked if pair[1] != client)
        self.broken_links |= frozenset(self.model.locals[self.locals[client]].links)
