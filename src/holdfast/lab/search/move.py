"""A move of a client in a search: the execution of its step, messages to it, and the passing of time.

``transition`` adds faults, and the events that follow from the new state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.lab.invariants.history import Event
from holdfast.lab.search.server import Done
from holdfast.lab.search.site import Failure, Request
from holdfast.lab.search.state import NEVER, NOBODY, Reply, State, Under
from holdfast.lab.servers.store import START_US
from holdfast.protocol.effects import Step

if TYPE_CHECKING:
    from holdfast.lab.search.model import Model

REFUSAL: Final = Failure("it executed that, and answered with an error", sent=True, retry=True)
BROKEN_LINK: Final = Failure("the connection broke", sent=True, retry=True, connection_broke=True)
_ADOPTING: Final = ("adopt", "pool_adopt", "multi_adopt")
_QUEUEING: Final = ("acquire", "pool_acquire", "multi_acquire", *_ADOPTING)  # they queue, or are granted at once
GIVER: Final = 3  # among the arguments of an adoption


class Move:
    """A copy of a state, which the steps of a move change."""

    def __init__(self, model: Model, state: State) -> None:
        self.model = model
        self.server = model.server
        self.config = model.config
        self.was = state
        self.now = state.now_us
        self.store = state.store
        self.locals = list(state.locals)
        self.under_way = list(state.under_way)
        self.stopped = list(state.stopped)
        self.held_back = list(state.held_back)
        self.since = list(state.since)
        self.tracked = state.tracked
        self.faults = state.faults
        self.owner = state.owner
        self.arrived = list(state.arrived)
        self.touched = state.touched
        self.come = state.come
        self.fence = state.fence
        self.before = state.before
        self.broken_links = state.broken_links
        self.moved_by = state.moved_by
        self.outdated = state.outdated
        self.fleet = state.fleet
        self.old = state.old
        self.events: list[Event] = []

    def _event(self, client: int, kind: str, **facts: Any) -> None:
        event = Event(self.now, client, kind, **facts)
        if kind == "minted" and event.fence is not None:
            self.fence = max(self.fence, event.fence)
        self.events.append(event)

    # Steps.

    def _resume(self, client: int) -> None:
        """Let a stopped client run again. It takes its replies, or sends its request, before it reads the clock."""
        self.stopped[client] = 0
        self.since[client] = self.now
        if self.held_back[client]:
            return
        for item in self.was.under_way:
            if item.kind == "reply" and item.client == client:
                self.under_way.remove(item)
                self._feed(client, "answer", *item.content[:2])
        self._tick_at_once(client)

    def _request(self, client: int, number: int) -> Request:
        local = self.model.locals[self.locals[client]]
        return next(request for request in local.requests if request.number == number)

    def _redirect(self, client: int, number: int) -> None:
        """The old node of the slot answers MOVED. The step was not executed, and its sender sends it again."""
        self.outdated &= ~(1 << client)
        self.held_back[client] = False
        self._feed(client, "redirect", number)

    def _do(self, client: int, number: int, *, answer: str = "") -> None:
        """Execute a request, and deliver the reply to its sender: at once, or as a message under way."""
        request = self._request(client, number)
        if self.config.tick_us:
            self._move_clock(self.now + self.config.tick_us)
        if request.link in self.broken_links:
            replies: tuple[Any, ...] = (BROKEN_LINK,)
        else:
            # WAIT counts the replicas that have what this connection wrote; if it wrote nothing, any replica counts.
            wrote = request.confirms and self.server.execute(self.store, request, self.model.channels[client]).written
            replies = self._execute(client, request)
            if wrote and self.config.promotes == "confirmed":
                self.before = ()
        self.held_back[client] = False
        if self.stopped[client] > self.now:
            self.under_way.append(Under("reply", client, Reply(number, replies, repr(replies))))
        elif answer:
            reply = Reply(number, replies, repr(replies), self.now, self.locals[client])
            self.under_way.append(Under(answer, client, reply))
        else:
            self._feed(client, "answer", number, replies)

    def _execute(self, client: int, request: Request) -> tuple[Any, ...]:
        model, server = self.model, self.server
        done = server.execute(self.store, request, model.channels[client])
        if done.store != self.store:
            self._note_change(client, request, self.store, done.store)
            if "failover" in self.config.kinds and self.faults < self.config.most_faults:
                self.before = (*self.before, self.store)[-self.config.lag :]
            self.store = done.store
        self._arrive(client, request, done.replies)
        self._mint(client, request, done)
        for op, reply in zip(request.ops, done.replies, strict=False):
            refused = isinstance(reply, Failure) and not reply.sent
            if isinstance(op, Step) and op.script in self.config.heeds and not refused:
                self._event(client, "executed", what=" ".join(map(str, (op.script, *op.args))))
        subscribed = server.store(self.store).subscribed if done.notifications else frozenset()
        for channel, text in done.notifications:
            for other, name in enumerate(model.channels):
                if channel == name.encode() and channel in subscribed and self.stopped[other] != NEVER:
                    self.under_way.append(Under("bell", other, text))
        if done.written and self.tracked:
            told = [pair for pair in self.tracked if pair[0] in done.written]
            self.tracked -= frozenset(told)
            for key, other in sorted(told):
                if other != client and self.stopped[other] != NEVER:
                    self.under_way.append(Under("push", other, key))
        if done.watched:
            self.tracked |= {(key, client) for key in done.watched}
        return done.replies

    def _note_change(self, client: int, request: Request, old: int, new: int) -> None:
        """Find the new owner of the key, and note if the key of another client was removed or stretched."""
        server, config = self.server, self.config
        was, is_now = server.lock(old), server.lock(new)
        if was == is_now or (config.view is not None and not config.view.has_owner):
            return
        (value, expires_us), (new_value, new_expires_us) = was, is_now
        until = None if value is None else config.deadline_us(value, expires_us)
        now_us = server.now_us(old) if config.by_server else START_US + self.now
        stood = value is not None and (until is None or until >= now_us)
        owned = stood and self.owner not in (NOBODY, client)
        if new_value is None:
            if owned:
                self._event(client, "removed", other=self.owner)
            self.owner = NOBODY
            return
        named = self._named_by(new_value)
        if not stood:
            self.owner = client if named is None else named
        elif named is not None and named != self.owner:
            if owned and not _adopts(request, value):
                self._event(client, "removed", other=self.owner)
            self.owner = named
        elif owned and until is not None:
            new_until = config.deadline_us(new_value, new_expires_us)
            if new_until != until:
                longer = new_until is None or new_until > until
                self._event(client, "stretched", other=self.owner, what="stretches" if longer else "cuts short")

    def _named_by(self, value: bytes) -> int | None:
        """The client whose token this is; None if it is not a token."""
        for client, name in enumerate(self.model.names):
            if value.startswith(f"{name}-".encode()):
                return client
        return None

    def _mint(self, client: int, request: Request, done: Done) -> None:
        """Note the grants of the server: first by notification to the next waiter, then by reply to the sender.

        The order matters if the sender is itself the next waiter of a free lock: it is granted the lock first, and its
        reply then reports that the lock is its own.
        """
        for channel, text in done.notifications:
            fence = text.split(b" ")[1]
            if fence.isdigit() and channel.decode() in self.model.channels:
                self._event(self.model.channels.index(channel.decode()), "minted", fence=int(fence))
        if not request.listens and getattr(request.ops[0], "script", "") in _QUEUEING:
            reply = done.replies[0]
            if isinstance(reply, tuple) and reply[0] == 1:  # the reply of a permit pool: fence and slot
                reply = reply[1]
            if isinstance(reply, bytes | int) and int(reply) > 0:
                self._event(client, "minted", fence=int(reply))

    def _arrive(self, client: int, request: Request, replies: tuple[Any, ...]) -> None:
        """Note the arrival of a waiter: when it joins the queue; without a queue, at its first step."""
        if client in self.arrived or self.model.locals[self.locals[client]].stage != "wants":
            return
        reply = replies[0] if replies else None
        if request.listens or (getattr(request.ops[0], "script", "") in _QUEUEING and not _queued(request, reply)):
            return
        self.arrived.append(client)
        self._event(client, "arrived")

    def _feed(self, client: int, kind: str, *content: Any) -> None:
        model = self.model
        local = model.feed(model.locals[self.locals[client]], (kind, self.now, *content))
        self.locals[client] = local.mark
        for note in local.notes:
            self._event(client, note.kind, fence=note.fence, until_us=note.until_us, what=note.what, task=note.task)
            goes_on = note.kind == "refused" and note.task and local.waiting  # another of its tasks waits now
            if note.kind in ("granted", "passed", "refused") and client in self.arrived and not goes_on:
                self.arrived.remove(client)
        for link, unanswered in local.closed_links:
            self._close_link(client, link, unanswered)

    def _close_link(self, client: int, link: str, unanswered: tuple[Request, ...]) -> None:
        """Close a connection after the server has executed all requests that came before its end."""
        executed = {
            item.content.number: item for item in self.under_way if item.kind == "late" and item.client == client
        }
        for request in unanswered:
            if request.number in executed:
                self.under_way.remove(executed[request.number])
            else:
                self.under_way.append(Under("ghost", client, (request.ops, link)))
        if not any(item.kind == "ghost" and item.content[1] == link for item in self.under_way):
            self.store = self.server.hang_up(self.store, (link,))

    def _move_clock(self, when_us: int) -> None:
        self.store = self.server.later(self.store, when_us - self.now)
        self.before = tuple(self.server.later(store, when_us - self.now) for store in self.before)
        self.now = when_us

    def _pass_time(self, when_us: int) -> None:
        self._move_clock(when_us)
        if self.config.reduce:
            for client in range(self.config.clients):
                if not self.stopped[client]:
                    self._tick_at_once(client)

    def _tick_at_once(self, client: int) -> None:
        """Feed timers that are due. This changes one client only, so it commutes with all moves of other clients."""
        timers = self.model.locals[self.locals[client]].timers
        if self.config.reduce and timers and timers[0] <= self.now and not self.held_back[client]:
            self._feed(client, "time")

    def _deliver(self, item: Under) -> None:
        self.under_way.remove(item)
        if item.kind == "ghost":
            self._execute(item.client, Request(0, *item.content))
            if item.content[1] is not None:
                self.store = self.server.hang_up(self.store, (item.content[1],))
        elif item.kind == "cut":
            self._feed(item.client, "cut")
        elif item.kind in ("reply", "late"):
            self._feed(item.client, "answer", *item.content[:2])
        else:
            self._feed(item.client, item.kind, item.content)


def _queued(request: Request, reply: Any) -> bool:
    """Whether that acquire was refused and has joined the queue."""
    return isinstance(reply, tuple) and reply[0] == 0 and request.ops[0].args[4] != ""


def _adopts(request: Request, value: bytes | None) -> bool:
    """Whether it adopts the hold of that token by a ticket. A ticket exists only after its giver has handed over."""
    return any(
        isinstance(op, Step) and op.script in _ADOPTING and op.args[GIVER].encode() == value for op in request.ops
    )
