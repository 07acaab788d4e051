"""One transition of a search: from a state to the next, with its events.

A transition is a step of a client, the passing of time, or a fault. Events that follow from the whole new state are
found at its end: the owner of the key, waiters of a free lock, whether all clients are done.

A slot that moves (``reshard``). All keys of a search are in one slot. The slot moves at once, or key by key; the latter
ends in the same instant or after MOVING_US. Until then, a step on several keys is answered TRYAGAIN if its keys are
"divided", or if one of them does not exist. Otherwise ("moving": no key has moved yet) the step is executed, but fails
in the middle of its script at a key that the script has deleted. A step on one key is executed.

When the slot has moved, the new node has all keys with their ttls. Subscriptions and client tracking have ended, and
each subscriber is notified of that. The next step of each client goes to the old node, is not executed, and is sent
again. The protocols react as in production: they repeat refused steps, and ask without a channel until the client has
subscribed again. The engine's part is modelled: ``Site._follow`` for MOVED, ``Machine.lose_listener`` for the end of a
subscription.

Not searched: a slot map that is out of date more than once, a slot that moves for longer, names in several slots
(protocol/kinds/parts.py), and a node that fails while it moves a slot away, except as a second fault.

Confirmed grants (``replicas=``). WAIT is answered once replicas have all writes, except with the fault
``unconfirmed``. A failover then promotes a replica that has all confirmed grants, or any replica: see
``Config.promotes``.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.lab.invariants.history import Event
from holdfast.lab.search.failover import Failover
from holdfast.lab.search.faults import SERVER_WIDE
from holdfast.lab.search.move import REFUSAL
from holdfast.lab.search.state import NEVER, NOBODY, Choice, State, Under, under_way
from holdfast.lab.servers.etcd import Etcd

AWAY_US: Final = 100_000  # how long a server that restarts, or is replaced, is away
MOVING_US: Final = 100_000  # how long a slot moves key by key, if not in an instant


class Transition(Failover):
    """Computes one transition."""

    def make(self, choice: Choice) -> tuple[State, tuple[Event, ...]]:
        kind = choice[0]
        if kind in ("do", "execute") and self.outdated >> choice[1] & 1:
            self._redirect(choice[1], choice[2])
        elif kind == "do":
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
        elif kind == "moved":
            self._move_slot()
        elif kind == "failover":
            self.advance(choice[1])
        elif choice[1] == "skew":
            client, sign = choice[2], choice[3]
            skews = [0] * self.config.clients
            skews[client] = sign * (self.config.ttl_us * 3 // 2)
            return self.model.begin(tuple(skews), 1, 1 << client), (Event(0, client, "touched", what="skew"),)
        else:
            self.faults += 1
            self._strike(*choice[1:])
        return self._state(), tuple(self.events)

    # Faults.

    def _strike(self, kind: str, *where: Any) -> None:
        client = NOBODY if kind in SERVER_WIDE else where[0]
        self.touched |= 1 << client if client >= 0 else (1 << self.config.clients) - 1
        if kind in self.config.required:
            self.touched |= 1 << self.config.clients
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

    def _refused(self, client: int, number: int) -> None:
        self.held_back[client] = False
        request = self._request(client, number)
        self._execute(client, request)
        self._feed(client, "answer", number, (self._refusal(),) * len(request.ops))

    def _refusal(self) -> Any:
        store = self.server.store(self.store)
        return store.refusal if isinstance(store, Etcd) else REFUSAL

    def _late_reply(self, client: int, number: int) -> None:
        self.held_back[client] = False
        self._do(client, number, answer="late")

    def _duplicate(self, client: int, number: int) -> None:
        request = self._request(client, number)
        self._do(client, number)
        self.under_way.append(Under("ghost", client, (request.ops, request.link)))

    def _delay(self, client: int, number: int) -> None:
        request = self._request(client, number)
        self.model.delayed.update(request.names)
        self.held_back[client] = False
        self._feed(client, "lose", number)
        self.under_way.append(Under("ghost", client, (request.ops, request.link)))

    def _unconfirmed(self, client: int, number: int) -> None:
        self.held_back[client] = False
        *replies, _ = self._execute(client, self._request(client, number))
        self._feed(client, "answer", number, (*replies, 0))

    def _cancel(self, client: int) -> None:
        self.held_back[client] = False
        self._feed(client, "cancel")

    def _restart(self) -> None:
        self._change_server("restart")

    def _failover(self, lag: int) -> None:
        self._change_server("failover", self.before[-1 - lag] if lag >= 0 else self.store)

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

    def _reshard(self, how: str) -> None:
        if how == "moved":
            self._move_slot()
        else:
            self.store = self.server.change(self.store, how)
            self.moved_by = self.now + MOVING_US

    def _move_slot(self) -> None:
        """Move the slot to another node. All keys move; subscriptions and client tracking end.

        If the keys moved one by one, each was deleted on the old node, and the clients that track it get a push.
        """
        if self.moved_by:
            self._push_to_trackers()
        before = self.server.store(self.store)
        self.broken_links |= {str(name) for name in before.connections}  # the others have no state to lose
        self.store = self.server.change(self.store, "moved")
        self.tracked = frozenset()
        self.moved_by = 0
        self.outdated = (1 << self.config.clients) - 1
        self._cut_off(before.subscribed)

    def _push_to_trackers(self) -> None:
        for key, client in sorted(self.tracked):
            if key == self.server.key and self.stopped[client] != NEVER:
                self.under_way.append(Under("push", client, key))
        self.tracked = frozenset(pair for pair in self.tracked if pair[0] != self.server.key)

    def _change_server(self, kind: str, store: int = -1) -> None:
        """Replace the server by another or an empty one. Connections break; subscribers notice that a bit later."""
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
        self._cut_off(listeners)

    def _cut_off(self, listeners: frozenset[bytes]) -> None:
        """Let these subscribers notice that their subscriptions have ended."""
        for client, channel in enumerate(self.model.channels):
            if channel.encode() in listeners and self.stopped[client] != NEVER:
                self.under_way.append(Under("cut", client, None))

    def _drop_unawaited(self) -> None:
        """Drop late replies whose senders have given up."""
        for item in [item for item in self.under_way if item.kind == "late" and not self.stopped[item.client]]:
            if item.content.number not in self.model.locals[self.locals[item.client]].awaited:
                self.under_way.remove(item)
                self._feed(item.client, "lose", item.content.number)

    # The new state.

    def _state(self) -> State:
        was = self.was
        self._drop_unawaited()
        state = State(
            self.now, self.store, tuple(self.locals), tuple(self.under_way), tuple(self.stopped),
            tuple(self.held_back), tuple(self.since), self.tracked, self.faults, self.owner, was.free_since,
            tuple(self.arrived), self.touched, self.come, self.fence,
            self.before if self.faults < self.config.most_faults else (), self.broken_links, self.moved_by,
            self.fleet, self.old, self.outdated,
        )  # fmt: skip
        free = self.model.is_free(state)
        if not free and not self._is_unknown_to_its_owner(state):
            state = state._replace(free_since=-1)
        elif was.free_since < 0:
            state = state._replace(free_since=self.now)
        self._look_at(state, free)
        return state

    def _is_unknown_to_its_owner(self, state: State) -> bool:
        """Whether the lock was granted to a waiter that does not know yet. For all others it is as good as free."""
        if self.config.view is not None or self.config.polls or state.owner < 0 or state.stopped[state.owner]:
            return False
        owner = self.model.locals[state.locals[state.owner]]
        return owner.stage == "wants" and not owner.left  # else the key may be that of the hold that it has left

    def _is_next(self, state: State, client: int) -> bool:
        """Whether that client may proceed: it is the first waiter, or the order does not matter."""
        view = self.config.view
        return view is None or not view.in_turn or client == self.model.first_waiter(state)

    def _look_at(self, state: State, free: bool) -> None:
        """Note events that follow from the state, not from a step."""
        model, config = self.model, self.config
        locals_ = [model.locals[mark] for mark in state.locals]
        if config.view is not None:
            store = model.server.store(state.store)
            for client, local in enumerate(locals_):
                over = local.stage == "over" and local.settled and not local.left and not state.stopped[client]
                if over and config.view.is_blocked_by(store, model.names[client]):
                    self._event(client, "left_behind")
        elif not free and state.owner >= 0:
            local = locals_[state.owner]
            over = local.stage == "over" or (config.polls and local.stage == "wants" and local.asleep)
            if over and local.settled and not local.left and not state.stopped[state.owner]:
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
            and not state.moved_by
            and all(
                stopped == NEVER or (not stopped and local.stage in ("done", "over") and local.settled)
                for stopped, local in list(zip(state.stopped, locals_, strict=True))[: state.come]
            )
        ):
            what = "in" if model.admits_newcomer(state) else "out"
            if config.mortal and not model.is_mortal(state.store):
                what = "left"
            self._event(NOBODY, "newcomer", what=what)
        if config.looks is not None:
            for client, kind, what in config.looks(model, self.was, state):
                self._event(client, kind, what=what)
