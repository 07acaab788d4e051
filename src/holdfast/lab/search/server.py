"""The server of a search: all stores met so far, each kept once, and the outcome of each step on each store.

Stores are interned by content and time: a state of the search names a store by its mark (a number, the same for the
same store), and a step on a store is executed once. ``perform`` runs the .lua files of production, as everywhere in the
lab.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from holdfast.lab.search.site import Request, frozen
from holdfast.lab.search.state import NEVER
from holdfast.lab.servers.store import Store
from holdfast.lab.simulation.world import perform, watched_keys
from holdfast.lua import SCRIPTS
from holdfast.protocol.effects import Command, Step


class Done(NamedTuple):
    """The outcome of a step."""

    store: int
    replies: tuple[Any, ...] = ()
    notifications: tuple[tuple[bytes, bytes], ...] = ()  # channel and text
    written: frozenset[bytes] = frozenset()
    watched: frozenset[bytes] = frozenset()  # keys whose next write is pushed to the sender


class Server:
    def __init__(self, first: Any, key: bytes, queue: bytes = b"") -> None:
        self.key = key
        self._queue = queue
        self._stores: dict[int, Any] = {}
        self._done: dict[Hashable, Done] = {}
        self._seen: dict[int, tuple[bytes | None, int | None]] = {}  # the lock's value, and when it expires
        if isinstance(first, Store):
            for script in SCRIPTS.values():
                first.execute("SCRIPT", "LOAD", script.source)
        self.first = self._mark(first)

    def _mark(self, store: Any) -> int:
        store.written.clear()
        store.outbox.clear()
        mark = hash((store.now_us, store.fingerprint()))
        if mark not in self._stores:
            self._stores[mark] = store
            value = store.values.get(self.key)
            if value is not None and value in store.values.get(self._queue, ()):
                value = None  # the lock is only kept for a waiter
            ends_ms = store.deadlines.get(self.key)
            # A key still exists in the millisecond of its deadline.
            self._seen[mark] = _shown(value), None if ends_ms is None else (ends_ms + 1) * 1000
        return mark

    def lock(self, store_mark: int) -> tuple[bytes | None, int | None]:
        """The value of the lock's key, and when (by the server's clock) it expires; None for never."""
        return self._seen[store_mark]

    def now_us(self, store_mark: int) -> int:
        now_us: int = self._stores[store_mark].now_us
        return now_us

    def store(self, store_mark: int) -> Any:
        """That store, read-only."""
        return self._stores[store_mark]

    def later(self, store_mark: int, us: int) -> int:
        """The same store with its clock moved, backwards if negative."""
        cause = store_mark, us
        done = self._done.get(cause)
        if done is None:
            store = self._stores[store_mark].copy()
            store.now_us += us
            done = self._done[cause] = Done(self._mark(store))
        return done.store

    def execute(self, store_mark: int, request: Request, channel: str) -> Done:
        """The outcome of a request of the client with that channel."""
        cause = store_mark, request.content, channel if request.listens else None
        done = self._done.get(cause)
        if done is None:
            done = self._done[cause] = self._execute(self._stores[store_mark].copy(), request, channel)
        return done

    def _execute(self, store: Any, request: Request, channel: str) -> Done:
        if request.listens:
            store.subscribed |= {channel.encode()}
            return Done(self._mark(store), (True,))
        replies = tuple(frozen(_reply(store, op, request.link)) for op in request.ops)
        watched = frozenset(
            key
            for op, reply in zip(request.ops, replies, strict=True)
            if isinstance(op, Step) and op.watch
            for key in watched_keys(op, reply)
        )
        notifications, written = tuple(store.outbox), frozenset(store.written)
        return Done(self._mark(store), replies, notifications, written, watched)

    def keep(self, store_mark: int, leases: frozenset[int]) -> int:
        """The store (of etcd) with these leases renewed from now on."""
        cause = store_mark, "keep", leases
        done = self._done.get(cause)
        if done is None:
            store = self._stores[store_mark].copy()
            store.leases |= {lease: (store.leases[lease][0], NEVER) for lease in leases & store.leases.keys()}
            done = self._done[cause] = Done(self._mark(store))
        return done.store

    def hang_up(self, store_mark: int, links: tuple[str, ...], channel: str = "") -> int:
        """The store without these dedicated connections; with a channel, without all connections of that client."""
        cause = store_mark, "hang up", links, channel
        done = self._done.get(cause)
        if done is None:
            store = self._stores[store_mark].copy()
            for name in list(store.connections):
                if name in links or (channel and str(name).startswith(channel.removeprefix("bell:") + "/")):
                    store.session(name).close()
            if channel:
                store.subscribed -= {channel.encode()}
            done = self._done[cause] = Done(self._mark(store))
        return done.store

    def change(self, store_mark: int, kind: str, other: int = -1) -> int:
        """The store after a fault: empty, an earlier one, without the lock's key or scripts, or with a moving slot."""
        cause = store_mark, kind, other
        done = self._done.get(cause)
        if done is None:
            store = self._stores[store_mark].copy()
            if kind == "eviction":
                store.remove(self.key)
            elif kind == "script_flush":
                store.execute("SCRIPT", "FLUSH")
            elif kind in ("moving", "divided"):
                store.slot = kind
            elif kind == "moved":
                store.slot = ""
                store.connections.clear()
                store.subscribed = frozenset()
            else:
                now_us, slot = store.now_us, store.slot
                store = type(store)(now_us) if kind == "restart" else self._stores[other].copy()
                store.now_us = now_us
                if slot is not None:
                    store.slot = slot
                store.connections.clear()
                store.subscribed = frozenset()
            done = self._done[cause] = Done(self._mark(store))
        return done.store


def _reply(store: Any, op: Step | Command, link: str | None) -> Any:
    if isinstance(op, Command) and op.args[0] == "WAIT":
        return op.args[1]  # the number of replicas that have all writes
    return perform(store, op, link)


def _shown(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else repr(value).encode()
