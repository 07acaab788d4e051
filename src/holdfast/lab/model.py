"""The transitions of a search: some clients, one server, one lock, and what can happen next.

Theory. A ``State`` is a handful of numbers: which store, which ``Local`` for each client, what is under way in the
network, what time it is, how many faults there have been. ``moves`` lists what can happen in it; ``after`` says where
that leads and which events it brings. Everything that costs time (Lua, generators) is worked out once for each pair
of cause and effect, in ``Server`` and ``Local``; a transition is then a few lookups.

Time is discrete: steps take none, and the clock jumps to the next moment at which anything is due, once nothing else
is left to do now. So a client is late only if it was paused, which is a fault, and is counted. Who holds the lock may
leave it at any time until its stay is over.

A client's step is one move: its request is executed and the reply is taken in, up to its next request. Between the two
only pauses, crashes and losses can strike, which are moves of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from holdfast.lab.check import Event
from holdfast.lab.faults import BEFALLS_ALL, FAULTS
from holdfast.lab.server import Server
from holdfast.lab.site import Failure, Input, Local, Request, Site, Visit
from holdfast.lab.store import START_US

__all__ = ["NEVER", "Choice", "Config", "Model", "State", "Under", "under_way"]

Choice = tuple[Any, ...]  # what happens; plain data
NOBODY: Final = -1
NEVER: Final = 1 << 62
SITES_KEPT: Final = 4000
BROKEN_LINK: Final = Failure("the connection broke", sent=True, retry=True, prompt=True)
AWAY_US: Final = 100_000  # how long a server that starts again, or is replaced, is away


class Under(NamedTuple):
    """Something under way: to the server (a request that nobody waits for any more), or to a client."""

    kind: str  # "ghost", "bell", "push", "cut" or "reply"
    client: int
    content: Any


class Config(NamedTuple):
    """What is explored, and within which bounds."""

    make_lock: Callable[[Any], Any]  # given a driver
    key: str
    deadline_us: Callable[[bytes, int | None], int | None]  # until when what the key holds shuts others out
    new_store: Callable[[], Any]
    by_server: bool = True  # that deadline is kept by the server's clock, not by those of the clients
    clients: int = 3
    kinds: tuple[str, ...] = tuple(FAULTS)
    opening: tuple[str, ...] | None = None  # what the first fault may be, if not all of these
    spares_holders: bool = False  # no fault befalls a client while it has the lock
    most_faults: int = 2
    ttl_us: int = 3_000_000
    stay_us: int = 1_200_000
    leaves_us: tuple[tuple[int, int], ...] = ((0, 0), (50_000, 150_000))  # when it may leave before that is over
    late: bool = False  # clients may come at any time, not only at the beginning
    polls: bool = False  # who waits does so between two tries, each of which is an attempt of its own
    horizon_us: int = 10_000_000
    lag: int = 1  # how many of the last writes a replica may lack
    patience: float | None = 4.5  # how long a client waits for the lock; None for ever
    idle_us: int = 200_000  # how long a free lock may be left alone while somebody waits,
    idle_us_per_fault: int = 2_000_000  # and how much longer for each fault
    newcomer_us: int = 2_000_000  # how much longer than a ttl a newcomer may need
    tick_us: int = 0  # by how much time passes with each step; 0: steps take no time, so that clocks can agree
    reduce: bool = True  # local steps happen at once, and steps that commute are taken in one order only


class State(NamedTuple):
    now_us: int
    store: int
    locals: tuple[int, ...]
    under_way: tuple[Under, ...] = ()
    stopped: tuple[int, ...] = ()  # until when each client is paused; NEVER if it has crashed
    held_back: tuple[bool, ...] = ()  # whether it was stopped before it could send, and has not done so since
    since: tuple[int, ...] = ()  # since when each could have made progress
    tracked: frozenset[tuple[bytes, int]] = frozenset()
    faults: int = 0
    owner: int = NOBODY  # whose the key is
    free_since: int = 0  # since when the lock is free; -1 while it is not
    arrived: tuple[int, ...] = ()  # who waits, in the order of arrival
    touched: int = 0  # whom a fault has befallen, as bits
    come: int = 0  # how many clients have come
    fence: int = 0  # the highest that was granted
    before: tuple[int, ...] = ()  # stores that a replica may still be at
    broken_links: frozenset[str] = frozenset()  # connections to a server that is no more


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.names = tuple("ABCDEFGH"[: config.clients])
        self.channels = tuple(f"bell:{name}" for name in self.names)
        self.server = Server(config.new_store(), config.key.encode())
        self.locals: dict[int, Local] = {}  # by their marks
        self._roots: dict[tuple[str, int], Local] = {}  # by name and skew
        self._kept: list[Local] = []
        self._newcomers: dict[tuple[int, int], bool] = {}

    # Clients.

    def _client(self, name: str, skew_us: int) -> Local:
        config = self.config
        visit = Visit(config.make_lock, config.patience, config.stay_us)

        def make() -> Site:
            return Site(name, visit, skew_us)

        local = Local(None, (name, skew_us), make)
        local.look(make())
        self.locals[local.mark] = local
        return local

    def _feed(self, local: Local, an_input: Input) -> Local:
        found = local.next.get(an_input)
        if found is None:
            found = local.after(an_input)
            self.locals[found.mark] = found
            self._keep(found)
        return found

    def _keep(self, local: Local) -> None:
        """Machines at rest are dear: keep the latest only, the others can be built again."""
        kept = self._kept
        kept.append(local)
        if len(kept) > SITES_KEPT:
            for old in kept[: SITES_KEPT // 2]:
                if old.live is not None:
                    old.live.discard()
                    old.live = None
            del kept[: SITES_KEPT // 2]

    # States.

    def first(self) -> State:
        return self._begin((0,) * self.config.clients)

    def _begin(self, skews: tuple[int, ...], faults: int = 0, touched: int = 0) -> State:
        clients = len(skews)
        roots = []
        for name, skew_us in zip(self.names, skews, strict=True):
            root = self._roots.get((name, skew_us))
            if root is None:
                root = self._roots[name, skew_us] = self._client(name, skew_us)
            roots.append(root.mark)
        zeros = (0,) * clients
        return State(
            0, self.server.first, tuple(roots), stopped=zeros, held_back=(False,) * clients, since=zeros,
            faults=faults, touched=touched,
        )  # fmt: skip

    # What can happen.

    def moves(self, state: State) -> list[Choice]:
        urgent = list(self._urgent(state))
        found = [*urgent, *self._lazy(state)]
        if not urgent and (when := self._next_time(state)) is not None:
            found.append(("time", when))
        if state.faults < self.config.most_faults:
            found.extend(self._faults(state))
        return found

    def _urgent(self, state: State) -> Iterator[Choice]:
        """What happens before time goes on."""
        now = state.now_us
        for client, mark in enumerate(state.locals):
            until = state.stopped[client]
            local = self.locals[mark]
            if until == NEVER:
                continue
            if until > now:
                if not state.held_back[client]:  # what it has sent is on its way all the same
                    for request in local.requests:
                        if not _is_answered(state, client, request.number):
                            yield "do", client, request.number
                continue
            if until:
                yield "resume", client
                continue
            if local.timers and local.timers[0] <= now and not state.held_back[client]:
                yield "tick", client
            for request in local.requests:
                if not _is_answered(state, client, request.number):
                    yield "do", client, request.number
        for name, item in under_way(state):
            if item.kind != "ghost" and not state.stopped[item.client]:
                yield "deliver", *name
        if not self.config.late and self._may_come(state):
            yield "come", state.come

    def _lazy(self, state: State) -> Iterator[Choice]:
        """What may happen now or later."""
        if self.config.late and self._may_come(state):
            yield "come", state.come
        for client, mark in enumerate(state.locals):
            local = self.locals[mark]
            if local.stage == "holds" and not state.stopped[client]:
                stayed_us = state.now_us - local.granted_us
                if any(start <= stayed_us <= end for start, end in self.config.leaves_us):
                    yield "leave", client
        for name, item in under_way(state):
            if item.kind == "ghost":
                yield "deliver", *name

    def _may_come(self, state: State) -> bool:
        """Whether the next client may come. All are alike, so they come in order; and none before the one before it has
        done or suffered anything, for that would be the same as if their names were exchanged."""
        if state.come == self.config.clients:
            return False
        last = state.come - 1
        return last < 0 or bool(state.stopped[last]) or self.locals[state.locals[last]].moved

    def _next_time(self, state: State) -> int | None:
        """The next moment at which anything is due; None if there is none within the horizon."""
        times = []
        for client, mark in enumerate(state.locals):
            until = state.stopped[client]
            if until == NEVER:
                continue
            if until:
                times.append(until)
            elif timers := self.locals[mark].timers:
                times.append(timers[0])
        if self.config.late and state.come < self.config.clients and (ends := self._lock_ends(state)) is not None:
            times.append(ends)
        when = min(times, default=NEVER)
        return when if when <= self.config.horizon_us else None

    def _lock_ends(self, state: State) -> int | None:
        """When the lock becomes free by itself, if it does: somebody may come just then."""
        value, expires_us = self.server.lock(state.store)
        until_us = None if value is None else self.config.deadline_us(value, expires_us)
        if until_us is None:
            return None
        now_us = self.server.now_us(state.store) if self.config.by_server else START_US + state.now_us
        return state.now_us + until_us + 1 - now_us if until_us >= now_us else None

    def _kinds(self, state: State) -> tuple[str, ...]:
        """What may go wrong next."""
        opening = self.config.opening
        return self.config.kinds if opening is None or state.faults else opening

    def _faults(self, state: State) -> Iterator[Choice]:
        kinds = self._kinds(state)
        if state.now_us == 0 and not state.come and not state.faults and "skew" in kinds:
            for client in range(self.config.clients):
                yield "fault", "skew", client, 1
                yield "fault", "skew", client, -1
        for client, mark in enumerate(state.locals):
            if state.stopped[client]:
                continue
            local = self.locals[mark]
            if local.stage in ("new", "done", "over") and not local.requests:
                continue
            if local.stage in ("holds", "leaves") and self.config.spares_holders:
                continue
            yield from self._faults_of(state, client, local, kinds)
        for (kind, client, place), _ in under_way(state) if "lost_reply" in kinds else ():
            if kind in ("bell", "push"):
                yield "fault", "lost_reply", client, kind, place
        value, _ = self.server.lock(state.store)
        if state.come:
            for kind in ("restart", "eviction", "script_flush", "clock_jump"):
                if kind in kinds and (value is not None or kind == "script_flush"):
                    yield "fault", kind
            if "failover" in kinds:
                for lag in range(len(state.before)):
                    yield "fault", "failover", lag

    def _faults_of(self, state: State, client: int, local: Local, kinds: tuple[str, ...]) -> Iterator[Choice]:
        naps = [kind for kind in ("stall", "pause") if kind in kinds]
        if "cancel" in kinds and local.stage in ("wants", "holds"):
            yield "fault", "cancel", client
        waits = not local.requests
        if waits:
            if "crash" in kinds:
                yield "fault", "crash", client
            for kind in naps:
                yield "fault", kind, client
        for request in local.requests:
            if _is_answered(state, client, request.number):
                continue
            done = self.server.execute(state.store, request, self.channels[client])
            changes = done.store != state.store
            number = request.number
            if "crash" in kinds:
                if local.moved:  # else it is as if it had never come
                    yield "fault", "crash", client, "before", number
                if changes:
                    yield "fault", "crash", client, "after", number
            for kind in naps:
                yield "fault", kind, client, "before", number
                yield "fault", kind, client, "after", number
            if "lost_request" in kinds:
                yield "fault", "lost_request", client, number
            if changes and not request.listens:
                if "lost_reply" in kinds:
                    yield "fault", "lost_reply", client, number
                if "duplicate" in kinds and request.link is None:  # no connection says anything twice
                    yield "fault", "duplicate", client, number
            if "delay" in kinds and not request.listens and not _only_reads(request):
                yield "fault", "delay", client, number

    # Where that leads.

    def after(self, state: State, choice: Choice) -> tuple[State, tuple[Event, ...]]:
        return _Transition(self, state).make(choice)

    def is_free(self, state: State) -> bool:
        value, expires_us = self.server.lock(state.store)
        if value is None:
            return True
        until_us = self.config.deadline_us(value, expires_us)
        now_us = self.server.now_us(state.store) if self.config.by_server else START_US + state.now_us
        return until_us is not None and until_us < now_us

    def admits_newcomer(self, store: int, now_us: int) -> bool:
        """Whether somebody new gets the lock within a ttl and the bound, if nobody else does anything any more."""
        known = self._newcomers.get((store, now_us))
        if known is None:
            known = self._newcomers[store, now_us] = self._try_newcomer(store, now_us)
        return known

    def _try_newcomer(self, store: int, now: int) -> bool:
        server, config = self.server, self.config
        visit = Visit(config.make_lock, None, config.stay_us)
        site = Site("N", visit)
        end = now + config.ttl_us + config.newcomer_us
        site.feed(("start", now))
        while not site.granted:
            if site.requests:
                request, _ = next(iter(site.requests.values()))
                done = server.execute(store, request, "bell:N")
                store = done.store
                site.feed(("answer", now, request.number, done.replies))
                for channel, text in done.bells:
                    if channel == b"bell:N":
                        site.feed(("bell", now, text))
            else:
                timers = site.timers()
                if not timers or timers[0] > end:
                    break
                store = server.later(store, max(0, timers[0] - now))
                now = max(now, timers[0])
                site.feed(("time", now))
        granted = site.granted
        site.discard()
        return granted


def under_way(state: State) -> Iterator[tuple[tuple[str, int, int], Under]]:
    """What is under way, each with a name: its kind, its client, and its place among those of that kind and client."""
    count: dict[tuple[str, int], int] = {}
    for item in sorted(set(state.under_way), key=repr) if len(state.under_way) > 1 else state.under_way:
        place = count[item.kind, item.client] = count.get((item.kind, item.client), -1) + 1
        yield (item.kind, item.client, place), item


def _is_answered(state: State, client: int, number: int) -> bool:
    """Whether the server has executed it, and the reply waits for the client to wake up."""
    return any(item.kind == "reply" and item.client == client and item.content[0] == number for item in state.under_way)


_READS: Final = frozenset({"GET", "EXISTS", "TTL", "PTTL", "WATCH", "UNWATCH", "GETS", "gets"})


def _only_reads(request: Request) -> bool:
    return all(getattr(op, "args", ("",))[0] in _READS for op in request.ops)


class _Transition:
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
            return self.model._begin(tuple(skews), 1, 1 << client), (Event(0, client, "touched", what="skew"),)
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
                self._feed(client, "answer", *item.content)
        self._tick_at_once(client)

    def _request(self, client: int, number: int) -> Request:
        local = self.model.locals[self.locals[client]]
        return next(request for request in local.requests if request.number == number)

    def _do(self, client: int, number: int, *, answer: bool = True) -> None:
        request = self._request(client, number)
        if self.config.tick_us:
            self._move_clock(self.now + self.config.tick_us)
        if request.link in self.broken_links:
            replies: tuple[Any, ...] = (BROKEN_LINK,)
        else:
            replies = self._execute(client, request)
        self.held_back[client] = False
        if self.stopped[client] > self.now or not answer:
            self.under_way.append(Under("reply", client, (number, replies)))
        else:
            self._feed(client, "answer", number, replies)

    def _execute(self, client: int, request: Request) -> tuple[Any, ...]:
        model, server = self.model, self.server
        done = server.execute(self.store, request, model.channels[client])
        if done.store != self.store:
            self._note_change(client, self.store, done.store)
            if "failover" in self.config.kinds and self.faults < self.config.most_faults:
                self.before = (*self.before, self.store)[-self.config.lag :]
            self.store = done.store
        self._arrive(client, request, done.replies)
        for channel, text in done.bells:
            for other, name in enumerate(model.channels):
                if channel == name.encode() and self.stopped[other] != NEVER:
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

    def _note_change(self, client: int, old: int, new: int) -> None:
        """See to whom the key belongs now, and whether it was anybody's to change."""
        server, config = self.server, self.config
        was, is_now = server.lock(old), server.lock(new)
        if was == is_now:
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
            if owned:
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

    def _arrive(self, client: int, request: Request, replies: tuple[Any, ...]) -> None:
        """It has taken its place: in the queue if there is one, else by its first step."""
        if client in self.arrived or self.model.locals[self.locals[client]].stage != "wants":
            return
        reply = replies[0] if replies else None
        if request.listens or (getattr(request.ops[0], "script", "") == "acquire" and not _queued(request, reply)):
            return
        self.arrived.append(client)
        self._event(client, "arrived")

    def _feed(self, client: int, kind: str, *content: Any) -> None:
        model = self.model
        local = model._feed(model.locals[self.locals[client]], (kind, self.now, *content))
        self.locals[client] = local.mark
        for note in local.notes:
            self._event(client, note.kind, fence=note.fence, until_us=note.until_us, what=note.what)
            if note.kind in ("granted", "refused") and client in self.arrived:
                self.arrived.remove(client)
            if note.kind == "granted" and note.fence is not None:
                self.fence = max(self.fence, note.fence)
        for link, unanswered in local.closed_links:
            self._close_link(client, link, unanswered)

    def _close_link(self, client: int, link: str, unanswered: tuple[Request, ...]) -> None:
        """The server sees the end of a connection after all that came before it."""
        self.under_way.extend(Under("ghost", client, (request.ops, link)) for request in unanswered)
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
            self._do(client, number, answer=False)
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
            if item.kind == "reply" or (item.kind == "ghost" and item.content[1] is None)
        ]
        value, _ = self.server.lock(self.store)
        named = None if value is None else self._named_by(value)
        self.owner = NOBODY if value is None or named is None else named
        for client, channel in enumerate(self.model.channels):
            if channel.encode() in listeners and self.stopped[client] != NEVER:
                self.under_way.append(Under("cut", client, None))

    # The sum of it.

    def _event(self, client: int, kind: str, **facts: Any) -> None:
        self.events.append(Event(self.now, client, kind, **facts))

    def _state(self) -> State:
        was = self.was
        state = State(
            self.now, self.store, tuple(self.locals), tuple(self.under_way), tuple(self.stopped),
            tuple(self.held_back), tuple(self.since), self.tracked, self.faults, self.owner, was.free_since,
            tuple(self.arrived), self.touched, self.come, self.fence,
            self.before if self.faults < self.config.most_faults else (), self.broken_links,
        )  # fmt: skip
        free = self.model.is_free(state)
        if not free:
            state = state._replace(free_since=-1)
        elif was.free_since < 0:
            state = state._replace(free_since=self.now)
        self._look_at(state, free)
        return state

    def _look_at(self, state: State, free: bool) -> None:
        """Events that are about how things stand, not about a step."""
        model, config = self.model, self.config
        locals_ = [model.locals[mark] for mark in state.locals]
        if not free and state.owner >= 0:
            local = locals_[state.owner]
            over = local.stage == "over" or (config.polls and local.stage == "wants" and local.asleep)
            if over and local.settled and not state.stopped[state.owner]:
                self._event(state.owner, "left_behind")
        if free:
            bound = config.idle_us + config.idle_us_per_fault * state.faults
            for client, local in enumerate(locals_):
                if local.stage == "wants" and not state.stopped[client]:
                    waits_since = max(local.wants_us, state.free_since, state.since[client])
                    if state.now_us - waits_since > bound:
                        self._event(client, "idle")
        if (
            state.come
            and not state.under_way
            and all(
                stopped == NEVER or (not stopped and local.stage in ("done", "over") and local.settled)
                for stopped, local in list(zip(state.stopped, locals_, strict=True))[: state.come]
            )
        ):
            self._event(NOBODY, "newcomer", what="in" if model.admits_newcomer(state.store, state.now_us) else "out")


def _queued(request: Request, reply: Any) -> bool:
    """Whether that acquire was refused and has taken a place in the queue."""
    return isinstance(reply, tuple) and request.ops[0].args[4] != ""
