"""The transitions of a search: some clients, one server, one lock, and what can happen next.

A ``State`` consists of numbers: the store, a ``Local`` for each client, the messages under way, the time, the number of
faults so far. ``moves`` lists what can happen next; ``after`` returns the next state and the events of the transition.
Expensive work (Lua, generators) is done once for each pair of cause and effect, in ``Server`` and ``Local``; a
transition is then a few lookups.

Time is discrete: steps take no time, and when nothing else is left to do, the clock jumps to the next moment at which
a timer is due. So a client is late only if it was paused, which counts as a fault. A holder may release at any time
until its stay is over.

A client's step is one move: its request is executed, and the client takes the reply and runs up to its next request.
Pauses, crashes, losses and late replies are separate moves in between. With ``overtaking`` a step can also be executed
without its reply, which then arrives after another message to its client: a notification of a later event, or the reply
to a later step. If no message overtakes a reply, the run is the same as one in which the reply arrives at once, and is
explored only once. A late reply is a fault: time passes before it arrives. If its sender has given up by then, the
reply is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from holdfast.lab.invariants.history import Event
from holdfast.lab.search.failover import is_out, new_fleet, steps_of
from holdfast.lab.search.local import Local
from holdfast.lab.search.newcomer import is_served
from holdfast.lab.search.server import Server
from holdfast.lab.search.site import Input, Request, Site
from holdfast.lab.search.state import NEVER, NOBODY, Choice, Config, State, View, is_answered, under_way
from holdfast.lab.search.transition import MOVING_US, Transition
from holdfast.lab.servers.store import START_US

SITES_KEPT: Final = 4000
_IDLE: Final = ("new", "done", "over")  # stages before and after a visit
# Steps and commands that are never late, by name; on etcd by the last word of the name, the kind of the request
# (simulation/programs.py). To be late is to be lost for what only reads; for a watch, on which nothing may depend; and
# for a new lease of etcd, whose id then no client knows. Plain requests ("etcd") are those of the lab itself.
_NOT_LATE: Final = frozenset(
    {"GET", "EXISTS", "TTL", "PTTL", "WATCH", "UNWATCH", "LRANGE", "SCAN", "gets", "election_leader", "inspect_lock"}
    | {"pool_find", "pool_look", "Read", "ReadLease", "Watch", "Unwatch", "GrantLease", "etcd"}
)


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.names = tuple("ABCDEFGH"[: config.clients])
        self.channels = tuple(f"bell:{name}" for name in self.names)
        self.asks_newcomers = True
        self.server = Server(config.new_store(), config.key.encode(), config.queue.encode())
        self.locals: dict[int, Local] = {}  # by their marks
        self._roots: dict[tuple[str, int], Local] = {}  # by name and skew
        self._kept: list[Local] = []
        self._newcomers: dict[tuple[int, int], bool] = {}
        self._free: dict[tuple[int, int], bool] = {}
        self.delayed: Counter[str] = Counter()  # steps and commands that were late, by name

    # Clients.

    def _client(self, name: str, skew_us: int) -> Local:
        config = self.config

        def make() -> Site:
            return Site(name, config, skew_us)

        local = Local(None, (name, skew_us), make)
        local.look(make())
        self.locals[local.mark] = local
        return local

    def feed(self, local: Local, an_input: Input) -> Local:
        found = local.next.get(an_input)
        if found is None:
            found = local.after(an_input)
            self.locals[found.mark] = found
            self._keep(found)
        return found

    def _keep(self, local: Local) -> None:
        """Keep the latest machines only, because they take memory; others can be rebuilt."""
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
        return self.begin((0,) * self.config.clients)

    def begin(self, skews: tuple[int, ...], faults: int = 0, touched: int = 0) -> State:
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
            faults=faults, touched=touched, fleet=new_fleet(self.config),
        )  # fmt: skip

    # Moves.

    def moves(self, state: State) -> list[Choice]:
        urgent = list(self._urgent(state)) or list(self._not_overtaken(state))
        found = [*urgent, *self._lazy(state)]
        if not urgent and (when := self._next_time(state)) is not None:
            found.append(("time", when))
        if state.faults < self.config.most_faults:
            found.extend(self._faults(state))
        return found

    def _urgent(self, state: State) -> Iterator[Choice]:
        """Moves that happen before time passes."""
        now = state.now_us
        for client, mark in enumerate(state.locals):
            until = state.stopped[client]
            local = self.locals[mark]
            if until == NEVER:
                continue
            if until > now:
                # Its requests are already on their way, but it cannot send one again after MOVED.
                if not state.held_back[client] and not state.outdated >> client & 1:
                    for request in local.requests:
                        if not is_answered(state, client, request.number):
                            yield "do", client, request.number
                continue
            if until:
                yield "resume", client
                continue
            if local.timers and local.timers[0] <= now and not state.held_back[client]:
                yield "tick", client
            if local.stage == "holds" and self.config.spares_holders and state.touched >> client & 1:
                yield "leave", client
            for request in local.requests:
                if not is_answered(state, client, request.number):
                    yield "do", client, request.number
                    if self.config.overtaking and self._may_be_overtaken(state, client, request):
                        yield "execute", client, request.number
        for name, item in under_way(state):
            if item.kind in ("ghost", "late") or state.stopped[item.client]:
                continue
            if item.kind != "reply" or item.content.is_overtaken(state, item.client):
                yield "deliver", *name
        if not self.config.late and self._may_come(state):
            yield "come", state.come
        if state.moved_by and state.moved_by <= now:
            yield ("moved",)

    def _not_overtaken(self, state: State) -> Iterator[Choice]:
        """Delivery of replies that no other message has overtaken."""
        for name, item in under_way(state):
            if item.kind == "reply" and not state.stopped[item.client]:
                yield "deliver", *name

    def _lazy(self, state: State) -> Iterator[Choice]:
        """Moves that may happen now or later."""
        if self.config.late and self._may_come(state):
            yield "come", state.come
        for client, mark in enumerate(state.locals):
            local = self.locals[mark]
            spared = self.config.spares_holders and state.touched >> client & 1
            if not state.stopped[client] and not spared and self._may_leave(state, local):
                yield "leave", client
        if state.moved_by == state.now_us + MOVING_US:
            yield ("moved",)
        for step in steps_of(state, self.config):
            yield "failover", step
        for name, item in under_way(state):
            is_late = item.kind == "late" and not state.stopped[item.client]
            is_due = is_late and item.content.is_overtaken(state, item.client)
            if is_due or (item.kind == "ghost" and self._matters(state, name)):
                yield "deliver", *name

    def _matters(self, state: State, ghost: tuple[str, int, int]) -> bool:
        """Whether a late request would change anything if it arrived now.

        If not, its arrival is no move: the state without the request can do nothing that the state with it cannot.
        """
        after, events = self.after(state, ("deliver", *ghost))
        return bool(events) or after._replace(under_way=state.under_way) != state

    def _may_leave(self, state: State, local: Local) -> bool:
        stayed_us = state.now_us - local.granted_us
        return local.stage == "holds" and any(start <= stayed_us <= end for start, end in self.config.leaves_us)

    def _may_be_overtaken(self, state: State, client: int, request: Request) -> bool:
        """Whether another message can reach that client before the reply to its request: the reply to another of its
        steps, or a notification of what another client, or a fault, is about to do.

        False for a subscription, because its confirmation comes first on its own connection.
        """
        if request.listens or request.link is not None:
            return False
        if len(self.locals[state.locals[client]].requests) > 1:
            return True
        done = self.server.execute(state.store, request, self.channels[client])
        channel = self.channels[client].encode()
        listens = channel in self.server.store(done.store).subscribed
        watched = done.watched | {key for key, tracker in state.tracked if tracker == client}
        if not listens and not watched:
            return False
        if watched and "eviction" in self.config.kinds and state.faults < self.config.most_faults:
            return True
        for other, mark in enumerate(state.locals):
            local = self.locals[mark]
            if other == client or state.stopped[other] > state.now_us:
                continue
            if self._may_leave(state, local):
                return True
            for pending in local.requests:
                after = self.server.execute(done.store, pending, self.channels[other])
                if after.written & watched or any(name == channel for name, _ in after.notifications):
                    return True
        return False

    def _may_come(self, state: State) -> bool:
        """Whether the next client may come. If all clients run the same program, each comes after the previous one has
        moved: an earlier arrival would give the same run with exchanged names."""
        if state.come == self.config.clients or is_out(state.fleet):
            return False
        last = state.come - 1
        return last < 0 or not self.config.alike or bool(state.stopped[last]) or self.locals[state.locals[last]].moved

    def _next_time(self, state: State) -> int | None:
        """The next time at which a timer is due; None if there is none within the horizon."""
        times = [state.moved_by] if state.moved_by else []
        for client, mark in enumerate(state.locals):
            until = state.stopped[client]
            if until == NEVER:
                continue
            if until:
                times.append(until)
            elif timers := self.locals[mark].timers:
                times.append(timers[0])
                if any(item.kind == "late" and item.client == client for item in state.under_way):
                    times.append(max(timers[0] - 1, state.now_us + 1))  # a late reply may arrive just before the timer
        if self.config.late and state.come < self.config.clients and (ends := self._lock_ends(state)) is not None:
            times.append(ends)
        when = min(times, default=NEVER)
        return when if when <= self.config.horizon_us else None

    def _lock_ends(self, state: State) -> int | None:
        """When the lock expires, if it does: a client may come at that time."""
        value, expires_us = self.server.lock(state.store)
        until_us = None if value is None else self.config.deadline_us(value, expires_us)
        if until_us is None:
            return None
        now_us = self.server.now_us(state.store) if self.config.by_server else START_US + state.now_us
        return state.now_us + until_us + 1 - now_us if until_us >= now_us else None

    def _faults(self, state: State) -> Iterator[Choice]:
        first = self.config.first
        kinds = (first,) if first and not state.faults else self.config.kinds
        required, is_last = self.config.required, state.faults == self.config.most_faults - 1
        if required and is_last and not state.touched >> self.config.clients & 1:
            kinds = tuple(kind for kind in kinds if kind in required)  # after another one, the run would not count
        if state.now_us == 0 and not state.come and not state.faults and "skew" in kinds:
            for client in range(self.config.clients):
                yield "fault", "skew", client, 1
                yield "fault", "skew", client, -1
        for client, mark in enumerate(state.locals):
            if state.stopped[client]:
                continue
            local = self.locals[mark]
            if local.stage in _IDLE and not local.requests:
                continue
            if local.stage in ("holds", "leaves") and self.config.spares_holders:
                continue
            yield from self._faults_of(state, client, local, kinds)
        for (kind, client, place), _ in under_way(state) if "lost_reply" in kinds else ():
            if kind in ("bell", "push"):
                yield "fault", "lost_reply", client, kind, place
        value, _ = self.server.lock(state.store)
        if state.come:
            for kind in ("restart", "eviction", "script_flush", "clock_jump", "clock_back"):
                if kind == "clock_back" and self.server.now_us(state.store) < START_US + state.now_us:
                    continue  # only once, because otherwise a lock could be kept forever
                if kind in kinds and (value is not None or kind in ("script_flush", "restart")):
                    yield "fault", kind
            if "reshard" in kinds and self.server.store(state.store).slot == "":
                for how in ("moved", "divided", "moving"):
                    yield "fault", "reshard", how
            if "failover" in kinds:
                for lag in range(-1 if self.config.promotes else 0, len(state.before)):
                    yield "fault", "failover", lag

    def _faults_of(self, state: State, client: int, local: Local, kinds: tuple[str, ...]) -> Iterator[Choice]:
        naps = [kind for kind in ("stall", "pause") if kind in kinds]
        if "cancel" in kinds and local.stage not in _IDLE:
            yield "fault", "cancel", client
        waits = not local.requests
        if waits:
            if "crash" in kinds:
                yield "fault", "crash", client
            for kind in naps:
                yield "fault", kind, client
        for request in local.requests:
            if is_answered(state, client, request.number):
                continue
            done = self.server.execute(state.store, request, self.channels[client])
            changes = done.store != state.store
            number = request.number
            if "crash" in kinds:
                if local.moved:  # if not, the run is the same as one in which it never came
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
                if "refused" in kinds:
                    yield "fault", "refused", client, number
                if "duplicate" in kinds and request.link is None:  # a connection delivers each request once
                    yield "fault", "duplicate", client, number
            if "late_reply" in kinds and not request.listens:
                yield "fault", "late_reply", client, number
            if "unconfirmed" in kinds and request.confirms:
                yield "fault", "unconfirmed", client, number
            if "delay" in kinds and not request.listens and _may_be_late(request):
                yield "fault", "delay", client, number

    # Transitions.

    def after(self, state: State, choice: Choice) -> tuple[State, tuple[Event, ...]]:
        return Transition(self, state).make(choice)

    def is_free(self, state: State) -> bool:
        if self.config.view is not None:
            return self._may_go_on(self.config.view, state)
        value, expires_us = self.server.lock(state.store)
        if value is None:
            return True
        until_us = self.config.deadline_us(value, expires_us)
        now_us = self.server.now_us(state.store) if self.config.by_server else START_US + state.now_us
        return until_us is not None and until_us < now_us

    def first_waiter(self, state: State) -> int:
        """The client that has waited longest, of those that are not stopped; NOBODY if none waits."""
        return next((client for client in state.arrived if not state.stopped[client]), NOBODY)

    def _may_go_on(self, view: View, state: State) -> bool:
        """Whether the first waiter can proceed; if no client waits, whether the lock is free."""
        first = self.first_waiter(state)
        known = self._free.get((state.store, first))
        if known is None:
            name = None if first < 0 else self.names[first]
            known = self._free[state.store, first] = view.is_free(self.server.store(state.store), name)
        return known

    def is_mortal(self, store: int) -> bool:
        """Whether all keys of that store have a ttl."""
        there = self.server.store(store)
        return all(key in there.deadlines for key in there.values)

    def admits_newcomer(self, state: State) -> bool:
        """Whether a new client gets the lock within a ttl and the bound, while all others only use other locks."""
        alive = (self.locals[mark] for mark, stopped in zip(state.locals, state.stopped, strict=True) if not stopped)
        kept = frozenset[int]().union(*(local.shared_leases for local in alive))
        store, now_us = self.server.keep(state.store, kept) if kept else state.store, state.now_us
        known = self._newcomers.get((store, now_us))
        if known is None:
            known = self._newcomers[store, now_us] = is_served(self.server, self.config, store, now_us)
        return known


def _may_be_late(request: Request) -> bool:
    return any(name not in _NOT_LATE and name.rpartition(" ")[2] not in _NOT_LATE for name in request.names)
