"""One move of a search: from a state to the next, and the events that it brings.

A move is a step of a client, the passing of time, or a fault. What it changes is collected here, and looked at as a
whole when it is done: whose the key is now, whether anybody waits in vain, whether all is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.lab.check import Event
from holdfast.lab.faults import BEFALLS_ALL
from holdfast.lab.server import Done
from holdfast.lab.site import Failure, Request
from holdfast.lab.state import NEVER, NOBODY, Choice, Reply, State, Under, under_way
from holdfast.lab.store import START_US
from holdfast.protocol.effects import Step

if TYPE_CHECKING:
    from holdfast.lab.model import Model

__all__ = ["Transition"]

BROKEN_LINK: Final = Failure("the connection broke", sent=True, retry=True, prompt=True)
_ADOPTING: Final = ("adopt", "room_adopt", "multi_adopt")
_QUEUEING: Final = ("acquire", "room_acquire", "multi_acquire", *_ADOPTING)  # or else granting it at once
GIVER: Final = 3  # among the arguments of an adoption
AWAY_US: Final = 100_000  # how long a server that starts again, or is replaced, is away


class Transition:
    """One move, in the making."""

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
        self.events: list[Event] = []

    def make(self, choice: Choice) -> tuple[State, tuple[Event, ...]]:
        kind = choice[0]
        if kind == "do":
            self._do(choice[1], choice[2])
        elif kind == "execute":
            self._do(choice[1], choice[2], answer="reply")
        elif kind == "time":
            self._pass_time(choice[1])
        elif kind == "tick":
            self._feed(choice[1], "time")
        elif kind == "resume":
            self._resume(choice[1])
        elif kind == "deliver":
            self._deliver(dict(under_way(self.was))[choice[1:]])
        elif kind == "leave":
            self._feed(choice[1], "leave")
        elif kind == "come":
            self.come += 1
            self.since[choice[1]] = self.now
            self._move_clock(self.now + self.config.tick_us)
            self._feed(choice[1], "start")
        elif choice[1] == "skew":
            client, sign = choice[2], choice[3]
            skews = [0] * self.config.clients
            skews[client] = sign * (self.config.ttl_us * 3 // 2)
            return self.model.begin(tuple(skews), 1, 1 << client), (Event(0, client, "touched", what="skew"),)
        else:
            self.faults += 1
            self._strike(*choice[1:])
        return self._state(), tuple(self.events)

    # Steps.

    def _resume(self, client: int) -> None:
        """It finds what has come for it meanwhile, or sends what it was about to, before it sees what time it is."""
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

    def _do(self, client: int, number: int, *, answer: str = "") -> None:
        """Execute it, and let its sender have the reply: at once, or as something that is under way from now on."""
        request = self._request(client, number)
        if self.config.tick_us:
            self._move_clock(self.now + self.config.tick_us)
        if request.link in self.broken_links:
            replies: tuple[Any, ...] = (BROKEN_LINK,)
        else:
            replies = self._execute(client, request)
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
        for op in request.ops:
            if isinstance(op, Step) and op.script in self.config.heeds:
                self._event(client, "executed", what=" ".join(map(str, (op.script, *op.args))))
        heard = server.store(self.store).subscribed if done.bells else frozenset()
        for channel, text in done.bells:
            for other, name in enumerate(model.channels):
                if channel == name.encode() and channel in heard and self.stopped[other] != NEVER:
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
        """See to whom the key belongs now, and whether it was anybody's to change."""
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
        """The client whose token that is, if it is one."""
        for client, name in enumerate(self.model.names):
            if value.startswith(f"{name}-".encode()):
                return client
        return None

    def _mint(self, client: int, request: Request, done: Done) -> None:
        """The server has granted the lock: by a bell to whoever was next, or to whoever asked.

        In that order: who asks when the lock is free, and is next, is granted it first and then finds it its own.
        """
        for channel, text in done.bells:
            fence = text.split(b" ")[1]
            if fence.isdigit() and channel.decode() in self.model.channels:
                self._event(self.model.channels.index(channel.decode()), "minted", fence=int(fence))
        if not request.listens and getattr(request.ops[0], "script", "") in _QUEUEING:
            reply = done.replies[0]
            if isinstance(reply, tuple) and reply[0] == 1:  # of a room: and the place
                reply = reply[1]
            if isinstance(reply, bytes | int) and int(reply) > 0:
                self._event(client, "minted", fence=int(reply))

    def _arrive(self, client: int, request: Request, replies: tuple[Any, ...]) -> None:
        """It has taken its place: in the queue if there is one, else by its first step."""
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
            goes_on = note.kind == "refused" and note.task and local.waiting  # another of its tasks has its place now
            if note.kind in ("granted", "passed", "refused") and client in self.arrived and not goes_on:
                self.arrived.remove(client)
        for link, unanswered in local.closed_links:
            self._close_link(client, link, unanswered)

    def _close_link(self, client: int, link: str, unanswered: tuple[Request, ...]) -> None:
        """The server sees the end of a connection after all that came before it."""
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
        """What falls due is local, and commutes with all that others do."""
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

    # Faults.

    def _strike(self, kind: str, *where: Any) -> None:
        client = NOBODY if kind in BEFALLS_ALL else where[0]
        self.touched |= 1 << client if client >= 0 else (1 << self.config.clients) - 1
        self._event(client, "touched", what=kind)
        getattr(self, f"_{kind}")(*where)

    def _crash(self, client: int, when: str = "", number: int = 0) -> None:
        if when == "after":
            self._execute(client, self._request(client, number))
        self.store = self.server.hang_up(self.store, (), self.model.channels[client])
        self.tracked = frozenset(pair for pair in self.tracked if pair[1] != client)
        self.under_way = [item for item in self.under_way if item.kind == "ghost" or item.client != client]
        self.stopped[client] = NEVER
        if client in self.arrived:
            self.arrived.remove(client)
        self._event(client, "crashed")

    def _stall(self, client: int, when: str = "", number: int = 0) -> None:
        self._stop(client, self.config.ttl_us // 2, when, number)

    def _pause(self, client: int, when: str = "", number: int = 0) -> None:
        self._stop(client, self.config.ttl_us * 3 // 2, when, number)

    def _stop(self, client: int, us: int, when: str, number: int) -> None:
        if when == "after":
            self._do(client, number, answer="reply")
        self.held_back[client] = when == "before"
        self.stopped[client] = self.now + us

    def _lost_request(self, client: int, number: int) -> None:
        self.held_back[client] = False
        self._feed(client, "lose", number)

    def _lost_reply(self, client: int, *what: Any) -> None:
        if len(what) > 1:  # a wake-up
            self.under_way.remove(dict(under_way(self.was))[what[0], client, what[1]])
        else:
            self.held_back[client] = False
            self._execute(client, self._request(client, what[0]))
            self._feed(client, "lose", what[0])

    def _late_reply(self, client: int, number: int) -> None:
        self.held_back[client] = False
        self._do(client, number, answer="late")

    def _duplicate(self, client: int, number: int) -> None:
        request = self._request(client, number)
        self._do(client, number)
        self.under_way.append(Under("ghost", client, (request.ops, request.link)))

    def _delay(self, client: int, number: int) -> None:
        request = self._request(client, number)
        self.held_back[client] = False
        self._feed(client, "lose", number)
        self.under_way.append(Under("ghost", client, (request.ops, request.link)))

    def _cancel(self, client: int) -> None:
        self.held_back[client] = False
        self._feed(client, "cancel")

    def _restart(self) -> None:
        self._change_server("restart")

    def _failover(self, lag: int) -> None:
        self._change_server("failover", self.before[-1 - lag])

    def _eviction(self) -> None:
        self.store = self.server.change(self.store, "eviction")
        self.owner = NOBODY
        self._push_to_trackers()

    def _script_flush(self) -> None:
        self.store = self.server.change(self.store, "script_flush")

    def _clock_jump(self) -> None:
        self.store = self.server.later(self.store, self.config.ttl_us * 3 // 2)

    def _clock_back(self) -> None:
        self.store = self.server.later(self.store, -self.config.ttl_us // 2)

    def _push_to_trackers(self) -> None:
        for key, client in sorted(self.tracked):
            if key == self.server.key and self.stopped[client] != NEVER:
                self.under_way.append(Under("push", client, key))
        self.tracked = frozenset(pair for pair in self.tracked if pair[0] != self.server.key)

    def _change_server(self, kind: str, store: int = -1) -> None:
        """Another server, or an empty one: connections break, and whoever listened learns that. It takes a moment."""
        self._move_clock(self.now + AWAY_US)
        listeners = self.server.store(self.store).subscribed
        self.store = self.server.change(self.store, kind, store)
        self.before = ()
        self.tracked = frozenset()
        self.broken_links |= {link for mark in self.locals for link in self.model.locals[mark].links}
        self.under_way = [
            item
            for item in self.under_way
            if item.kind in ("reply", "late") or (item.kind == "ghost" and item.content[1] is None)
        ]
        value, _ = self.server.lock(self.store)
        named = None if value is None else self._named_by(value)
        self.owner = NOBODY if value is None or named is None else named
        for client, channel in enumerate(self.model.channels):
            if channel.encode() in listeners and self.stopped[client] != NEVER:
                self.under_way.append(Under("cut", client, None))

    def _drop_unawaited(self) -> None:
        """A late reply is nothing to a sender that has given it up."""
        for item in [item for item in self.under_way if item.kind == "late" and not self.stopped[item.client]]:
            if item.content.number not in self.model.locals[self.locals[item.client]].awaited:
                self.under_way.remove(item)
                self._feed(item.client, "lose", item.content.number)

    # The sum of it.

    def _event(self, client: int, kind: str, **facts: Any) -> None:
        event = Event(self.now, client, kind, **facts)
        if kind == "minted" and event.fence is not None:
            self.fence = max(self.fence, event.fence)
        self.events.append(event)

    def _state(self) -> State:
        was = self.was
        self._drop_unawaited()
        state = State(
            self.now, self.store, tuple(self.locals), tuple(self.under_way), tuple(self.stopped),
            tuple(self.held_back), tuple(self.since), self.tracked, self.faults, self.owner, was.free_since,
            tuple(self.arrived), self.touched, self.come, self.fence,
            self.before if self.faults < self.config.most_faults else (), self.broken_links,
        )  # fmt: skip
        free = self.model.is_free(state)
        if not free and not self._is_unknown_to_its_owner(state):
            state = state._replace(free_since=-1)
        elif was.free_since < 0:
            state = state._replace(free_since=self.now)
        self._look_at(state, free)
        return state

    def _is_unknown_to_its_owner(self, state: State) -> bool:
        """Whether the lock was granted to a waiter that goes on waiting. To all others it might as well be free."""
        if self.config.view is not None or self.config.polls or state.owner < 0 or state.stopped[state.owner]:
            return False
        return self.model.locals[state.locals[state.owner]].stage == "wants"

    def _is_next(self, state: State, client: int) -> bool:
        """Whether it is the turn of that client, where only the first can go on."""
        view = self.config.view
        return view is None or not view.in_turn or client == self.model.first_waiter(state)

    def _look_at(self, state: State, free: bool) -> None:
        """Events that are about how things stand, not about a step."""
        model, config = self.model, self.config
        locals_ = [model.locals[mark] for mark in state.locals]
        if config.view is not None:
            store = model.server.store(state.store)
            for client, local in enumerate(locals_):
                over = local.stage == "over" and local.settled and not state.stopped[client]
                if over and config.view.has_place(store, model.names[client]):
                    self._event(client, "left_behind")
        elif not free and state.owner >= 0:
            local = locals_[state.owner]
            over = local.stage == "over" or (config.polls and local.stage == "wants" and local.asleep)
            if over and local.settled and not state.stopped[state.owner]:
                self._event(state.owner, "left_behind")
        bound = config.idle_us + config.idle_us_per_fault * state.faults
        for client, local in enumerate(locals_):
            if state.free_since < 0 or state.stopped[client]:
                continue
            since_us = max(state.free_since, state.since[client])
            holds = free and local.holds and local.until_us is not None and local.until_us > state.now_us
            if holds and state.now_us - max(local.granted_us, since_us) > bound:
                self._event(client, "unaware")
            waits = (free or client == state.owner) and local.stage == "wants" and self._is_next(state, client)
            if waits and state.now_us - max(local.wants_us, since_us) > bound:
                self._event(client, "idle")
        if (
            model.asks_newcomers
            and state.come
            and not state.under_way
            and all(
                stopped == NEVER or (not stopped and local.stage in ("done", "over") and local.settled)
                for stopped, local in list(zip(state.stopped, locals_, strict=True))[: state.come]
            )
        ):
            what = "in" if model.admits_newcomer(state.store, state.now_us) else "out"
            if config.mortal and not model.is_mortal(state.store):
                what = "left"
            self._event(NOBODY, "newcomer", what=what)
        if config.looks is not None:
            for client, kind, what in config.looks(model, self.was, state):
                self._event(client, kind, what=what)


def _queued(request: Request, reply: Any) -> bool:
    """Whether that acquire was refused and has taken a place in the queue."""
    return isinstance(reply, tuple) and reply[0] == 0 and request.ops[0].args[4] != ""


def _adopts(request: Request, value: bytes | None) -> bool:
    """Whether it takes over what holds that token, with a ticket for it. There is none before its giver has let go."""
    return any(
        isinstance(op, Step) and op.script in _ADOPTING and op.args[GIVER].encode() == value for op in request.ops
    )
